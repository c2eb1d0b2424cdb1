"""How people train: accumulation, clipping, loss scales, schedules, monitors."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio.optim import round_bf16

from .models import batch, check_same, config, make, values

STEPS = 4


def plain(
    *, accumulate: int = 1, clip: float = 0.0, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[list[float], list[torch.Tensor]]:
    """Micro-batches accumulated in fp32, clipped by PyTorch, stepped on fp32 masters."""
    model = make().to(dtype)
    masters: list[torch.Tensor] = list(model.parameters())
    if dtype is not torch.float32:
        masters = [p.detach().float().clone() for p in make().parameters()]
        _show(model, masters, dtype)
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(STEPS):
        sums: list[torch.Tensor | None] = [None] * len(masters)
        for micro in range(accumulate):
            loss = model(*batch(step * accumulate + micro))
            ((loss / accumulate if accumulate > 1 else loss) * scale).backward()
            losses.append(loss.item())
            for i, p in enumerate(model.parameters()):
                if p.grad is not None:
                    grad, seen = p.grad.float(), sums[i]
                    sums[i] = grad.clone() if seen is None else seen.add_(grad)
                p.grad = None
        for master, total in zip(masters, sums, strict=True):
            master.grad = None if total is None else total / scale
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, clip)
        optimizer.step()
        if dtype is not torch.float32:
            _show(model, masters, dtype)
        for master in masters:
            master.grad = None
    return losses, values(model)


def _show(model: Any, masters: list[torch.Tensor], dtype: torch.dtype) -> None:
    for p, master in zip(model.parameters(), masters, strict=True):
        p.data.copy_(round_bf16(master) if dtype is torch.bfloat16 else master)


def train(path: Path, *, accumulate: int = 1, device: str = "cpu", dtype: str = "fp32", place: str = "nvme", **keys: Any) -> Any:
    settings = config(path, params=place, state=place, dtype=dtype, device=device) | keys
    del settings["train_batch_size"]
    settings |= {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulate}
    with swapio.initialize(model=make(), config=settings)[0] as engine:
        losses = []
        for micro in range(STEPS * accumulate):
            assert engine.is_gradient_accumulation_boundary() == ((micro + 1) % accumulate == 0)
            loss = engine(*batch(micro))
            engine.backward(loss)
            engine.step()
            assert engine.was_step_applied() == ((micro + 1) % accumulate == 0)
            losses.append(loss.item())
        assert (engine.global_steps, engine.micro_steps) == (STEPS, STEPS * accumulate)
        assert engine.global_samples == 2 * STEPS * accumulate
        return losses, values(engine.module)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("accumulate", "clip"), [(3, 0.0), (1, 0.3), (3, 0.3)])
def test_accumulation_and_clipping_are_exact(tmp_path: Path, accumulate: int, clip: float, dtype: str, device: str) -> None:
    got = train(tmp_path, accumulate=accumulate, dtype=dtype, device=device, gradient_clipping=clip)
    check_same(got, plain(accumulate=accumulate, clip=clip, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16))


def test_accumulation_equals_one_big_batch(tmp_path: Path) -> None:
    """Within the rounding of the mean over the batch."""
    settings = config(tmp_path) | {"gradient_accumulation_steps": 4}
    settings = {k: v for k, v in settings.items() if k != "train_batch_size"} | {"train_micro_batch_size_per_gpu": 2}
    weights = []
    for accumulate in (4, 1):
        settings["gradient_accumulation_steps"] = accumulate
        with swapio.initialize(model=make(), config=settings)[0] as engine:
            for step in range(2):
                parts = [batch(4 * step + i) for i in range(4)]
                whole = [(torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))] if accumulate == 1 else parts
                for x, y in whole:
                    engine.backward(engine(x, y))
                    engine.step()
            weights.append(values(engine.module))
    for a, b in zip(*weights, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize("place", ["nvme", "none"])
def test_fp16_with_a_fixed_scale_is_exact(tmp_path: Path, place: str) -> None:
    got = train(tmp_path, place=place, accumulate=2, fp16={"enabled": True, "loss_scale": 128.0})
    check_same(got, plain(accumulate=2, dtype=torch.float16, scale=128.0))


def test_an_overflow_skips_the_step_and_lowers_the_scale(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 2}
    settings = config(tmp_path) | {
        "fp16": fp16,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
    }
    with swapio.initialize(model=make(), config=settings)[0] as engine:
        before, rate, scale = values(engine.module), engine.get_lr(), engine.loss_scale()
        assert scale == 2.0**30
        assert engine.dynamic_loss_scale()
        with caplog.at_level(logging.WARNING, "swapio"):
            engine.backward(engine(*batch(0)))
            engine.step()
        assert "step skipped: the gradient of '" in caplog.text
        assert not engine.was_step_applied()
        assert (engine.skipped_steps, engine.loss_scale(), engine.get_lr()) == (1, scale / 2, rate)
        assert all(torch.equal(a, b) for a, b in zip(before, values(engine.module), strict=True))
        for step in range(40):
            engine.backward(engine(*batch(step)))
            engine.step()
        assert 0 < engine.skipped_steps < 41
        assert engine.loss_scale() < scale
        assert engine.get_lr() != rate
        assert all(bool(v.isfinite().all()) for v in values(engine.module))


def test_a_plain_backward_of_the_scaled_loss(tmp_path: Path) -> None:
    settings = config(tmp_path) | {"gradient_accumulation_steps": 2, "train_batch_size": 4}
    with swapio.initialize(model=make(), config=settings)[0] as engine:
        losses = []
        for micro in range(2 * STEPS):
            with engine.no_sync():
                loss = engine(*batch(micro))
                engine.scale(loss).backward()
            engine.step()
            losses.append(loss.item())
        check_same((losses, values(engine.module)), plain(accumulate=2))


def test_the_user_decides_where_a_step_ends(tmp_path: Path) -> None:
    with swapio.initialize(model=make(), config=config(tmp_path))[0] as engine:
        before = values(engine.module)
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(*batch(0)))
        engine.step()
        assert all(torch.equal(a, b) for a, b in zip(before, values(engine.module), strict=True))
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(*batch(1)))
        engine.step()
        assert engine.global_steps == 1
        assert not all(torch.equal(a, b) for a, b in zip(before, values(engine.module), strict=True))


def test_micro_batches_never_add_up_in_16_bits(tmp_path: Path) -> None:
    settings = config(tmp_path, dtype="bf16")
    with swapio.initialize(model=make(), config=settings)[0] as engine, pytest.raises(swapio.UsageError, match="grad_accum_dtype"):
        engine.set_gradient_accumulation_boundary(False)
    with swapio.initialize(model=make(), config=settings | {"data_types": {"grad_accum_dtype": "fp32"}})[0] as engine:
        engine.set_gradient_accumulation_boundary(False)


def test_the_norm_is_that_of_pytorch(tmp_path: Path) -> None:
    model = make()
    model(*batch(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    with swapio.initialize(model=make(), config=config(tmp_path) | {"gradient_clipping": 1.0})[0] as engine:
        assert engine.get_global_grad_norm() is None
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.get_global_grad_norm() == norm


@pytest.mark.parametrize("missing", [False, True])
def test_the_norm_without_clipping_is_summed_in_the_step(tmp_path: Path, missing: bool) -> None:
    """With everything in memory nothing looks at the norm before; a gradient that was dropped does not count."""
    with swapio.initialize(model=make(), config=config(tmp_path, params="cpu", state="cpu", dtype="bf16"))[0] as engine:
        engine.backward(engine(*batch(0)))
        params = list(engine.module.parameters())
        if missing:
            params[0].grad = None
        norms = [torch.linalg.vector_norm(p.grad.float()) for p in params if p.grad is not None]
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(torch.linalg.vector_norm(torch.stack(norms)).item(), rel=1e-6)
        engine.backward(engine(*batch(1)))
        grad = params[0].grad
        assert grad is not None
        grad.fill_(torch.inf)
        before = [p.clone() for p in params]
        engine.step()
        assert engine.skipped_steps == 1 and engine.get_global_grad_norm() == torch.inf
        assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_monitor_and_log_say_what_a_step_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path / "drive") | {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"},
        "steps_per_print": 2,
    }
    with caplog.at_level(logging.INFO, "swapio"), swapio.initialize(model=make(), config=settings)[0] as engine:
        losses = []
        for step in range(4):
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    assert [r.message.split(":")[0] for r in caplog.records if r.message.startswith("step ")] == ["step 2", "step 4"]
    found = next((tmp_path / "csv").rglob("*train_loss*"))
    with found.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    assert [float(row[1]) for row in rows] == pytest.approx(losses)


def test_training_data_becomes_a_loader(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(7.0).unsqueeze(1), torch.arange(7.0))
    settings = config(tmp_path) | {"dataloader_drop_last": True}
    engine, _, loader, _ = swapio.initialize(model=torch.nn.Linear(1, 1), config=settings, training_data=data)
    with engine:
        assert sorted(len(y) for _, y in loader) == [2, 2, 2]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_masters_and_gradients_can_be_seen_and_set(tmp_path: Path, dtype: str) -> None:
    half = {"fp16": {"enabled": True, "loss_scale": 64.0}} if dtype == "fp16" else {"bf16": {"enabled": True}}
    with swapio.initialize(model=make(), config=config(tmp_path) | half)[0] as engine:
        param = engine.module.get_parameter("head.weight")
        master = swapio.utils.safe_get_full_fp32_param(param)
        assert master is not None
        assert torch.equal(master, make().head.weight)
        engine.backward(engine(*batch(0)))
        grad = swapio.utils.safe_get_full_grad(param)
        assert grad is not None
        assert param.grad is not None
        assert torch.allclose(grad, param.grad.float() / engine.loss_scale())
        engine.step()
        stepped = swapio.utils.safe_get_full_fp32_param(param)
        assert stepped is not None
        assert not torch.equal(stepped, master)
        swapio.utils.safe_set_full_fp32_param(param, master)
        again = swapio.utils.safe_get_full_fp32_param(param)
        assert again is not None
        assert torch.equal(again, master)
        assert torch.equal(param.float(), (round_bf16(master) if dtype == "bf16" else master.half()).float())
