"""Offload must not change a number: gradients that are absent, zero, infinite, added, clipped; groups, dtypes, buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapio
from swapio.optim import round_bf16
from tests.engine.models import check_same, config, smallest_budget, train, train_plain, values, with_budget

from .compare import DIM, both_devices, every_place, layers, managed, mean_square, plain_adamw, rows, same_as_pytorch


def both(
    path: Path,
    make: Callable[[], Any],
    run: Callable[[Any, Any, int], None],
    *,
    steps: int = 3,
    optimizer: Any = plain_adamw,
    **kwargs: Any,
) -> None:
    """`run(model, optimizer, step)` leaves the same weights in both."""
    plain = make()
    steps_plain = optimizer(plain)
    with managed(path, make(), optimizer=optimizer, **kwargs) as engine:
        for step in range(steps):
            run(engine.module, engine.optimizer, step)
            run(plain, steps_plain, step)
        for (name, want), got in zip(plain.state_dict().items(), values(engine.module), strict=True):
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)) if want.dim() else torch.equal(got, want), name


def ordinary(model: Any, optimizer: Any, step: int) -> None:
    mean_square(model, step).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()


@every_place
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_thirty_steps(tmp_path: Path, place: tuple[str, str, str], dtype: str) -> None:
    same_as_pytorch(tmp_path, layers, mean_square, steps=30, place=place, dtype=dtype)


@every_place
def test_weights_right_after_initialize(tmp_path: Path, place: tuple[str, str, str]) -> None:
    want = values(layers())
    with managed(tmp_path, layers(), place=place) as engine:
        check_same(([], values(engine.module)), ([], want))
        for param, value in zip(engine.module.parameters(), want, strict=True):
            assert torch.equal(param, value)
    with managed(tmp_path, layers(), place=place, dtype="bf16") as engine:
        check_same(([], values(engine.module)), ([], [round_bf16(value) for value in want]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_offload_works_at_every_stage(tmp_path: Path, stage: int) -> None:
    settings = config(tmp_path)
    settings["zero_optimization"]["stage"] = stage
    settings = with_budget(settings, smallest_budget(layers(), settings))
    with swapio.initialize(model=layers(), config=settings)[0] as engine:
        got = train(engine, mean_square, steps=3)
        assert engine.stats()["bytes_on_nvme"] > 0
    check_same(got, train_plain(layers(), mean_square, steps=3))


@both_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_several_backwards_add_up(tmp_path: Path, place: tuple[str, str, str], dtype: torch.dtype) -> None:
    """Also those of a part of the model only."""
    plain = layers().to(dtype)
    with managed(tmp_path, layers().to(dtype), place=place) as engine:
        for step in range(3):
            engine.backward(mean_square(engine.module, step))
            mean_square(plain, step).backward()  # type: ignore[no-untyped-call]
        for model in (engine.module, plain):
            mean_square(model[1], 7).backward()  # type: ignore[index, no-untyped-call]
        for param, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad, want.grad)  # type: ignore[arg-type]


@both_devices
@pytest.mark.parametrize("clip", ["norm", "value", "by hand"])
def test_clipping_by_pytorchs_functions(tmp_path: Path, clip: str, place: tuple[str, str, str]) -> None:
    norms: list[float] = []

    def run(model: Any, optimizer: Any, step: int) -> None:
        mean_square(model, step).backward()  # type: ignore[no-untyped-call]
        if clip == "norm":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
            assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) <= 1e-3 * (1 + 1e-5)
        elif clip == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        else:
            norms.append(sum(p.grad.norm().item() ** 2 for p in model.parameters()) ** 0.5)
            for param in model.parameters():
                param.grad.mul_(1e-3 / norms[-1])
        optimizer.step()
        optimizer.zero_grad()

    both(tmp_path, layers, run, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.5, fused=True), place=place, extra=1 << 17)
    assert norms[::2] == norms[1::2]
    assert all(norm > 1e-3 for norm in norms)


@both_devices
@pytest.mark.parametrize("where", ["loss", "one gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_gradient_never_reaches_16_bit_weights(
    tmp_path: Path, value: float, where: str, place: tuple[str, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """The run goes on as if the batch had not been there: weights, masters, moments, step counts, scheduler."""

    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    results = []
    for bad in (True, False):
        settings = config(tmp_path, params=place[0], state=place[1], device=place[2], dtype="bf16")
        engine = swapio.initialize(model=layers(), config=settings, lr_scheduler=scheduler)[0]
        with engine:
            for step in range(4):
                if step == 2 and bad:
                    loss = mean_square(engine, 99)
                    engine.backward(loss * value if where == "loss" else loss)
                    if where == "one gradient":
                        engine.module[1][0].weight.grad[3, 5] = value  # type: ignore[index]
                    engine.step()
                    assert not engine.was_step_applied()
                    assert ("1.0.weight" if where == "one gradient" else "0.0.weight") in caplog.text
                engine.backward(mean_square(engine, step))
                engine.step()
                assert engine.was_step_applied()
            assert (engine.global_steps, engine.skipped_steps) == (4 + int(bad), int(bad))
            assert engine.optimizer is not None
            results.append(([g["lr"] for g in engine.optimizer.param_groups], values(engine.module)))
    check_same(*results)


def test_nan_in_fp32_does_what_pytorch_does(tmp_path: Path) -> None:
    """There is no loss scale to mend, so the step is taken, and every weight says so."""

    def run(model: Any, optimizer: Any, step: int) -> None:
        (mean_square(model, step) * (float("nan") if step == 1 else 1.0)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        assert torch.isnan(model[0][0].weight).all().item() == (step >= 1)

    both(tmp_path, layers, run)


OPTIMIZERS = {
    "AdamW": plain_adamw,
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zero_gradients_are_steps_and_absent_ones_are_not(tmp_path: Path, optimizer: str) -> None:
    """Two parameters of one unit: decay, moments and the counts of the bias correction go on for one, and rest for the other."""

    def run(model: Any, optimizer: Any, step: int) -> None:
        mean_square(model, step).backward()  # type: ignore[no-untyped-call]
        if step in (1, 2, 4):
            model[0][0].weight.grad = None
            model[1][0].bias.grad.zero_()
        if step == 3:
            for param in model[2].parameters():
                param.grad = torch.zeros_like(param)
        optimizer.step()
        optimizer.zero_grad()

    both(tmp_path, layers, run, steps=6, optimizer=OPTIMIZERS[optimizer])


class Alternating(nn.Module):
    """One unit, of which each call uses another half."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleDict({"even": nn.Linear(DIM, DIM), "odd": nn.Linear(DIM, DIM)})
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used += 1
        out: torch.Tensor = self.halves["odd" if self.used % 3 == 0 else "even"](x)
        return out


@both_devices
def test_step_counts_are_each_parameters_own(tmp_path: Path, place: tuple[str, str, str]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Alternating(), Alternating())

    same_as_pytorch(tmp_path, make, mean_square, steps=7, place=place)


def test_groups(tmp_path: Path) -> None:
    """With rates, decays and betas of their own, one empty, one at rest, one frozen; changed on the way."""

    def groups(model: Any) -> torch.optim.Optimizer:
        model[3].requires_grad_(False)
        return torch.optim.AdamW(
            [
                {"params": [model[0][0].weight, model[1][0].bias], "lr": torch.tensor(3e-2), "betas": (0.5, 0.9)},
                {"params": [], "lr": 100.0},
                {"params": [model[1][0].weight], "weight_decay": 0.5},
                {"params": [model[0][0].bias], "lr": 0.0},
                {"params": [*model[2].parameters(), *model[3].parameters()], "maximize": True},
            ],
            lr=1e-2, weight_decay=0.1, fused=True,
        )  # fmt: skip

    def run(model: Any, optimizer: Any, step: int) -> None:
        if step == 2:
            optimizer.param_groups[2]["lr"] = 0.2
            optimizer.param_groups[0]["weight_decay"] = 0.0
        ordinary(model, optimizer, step)

    both(tmp_path, lambda: layers(count=4), run, steps=4, optimizer=groups)


@both_devices
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_autocast(tmp_path: Path, how: str, place: tuple[str, str, str]) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        x = rows(step).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in model:
                x = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
            assert x.dtype is torch.bfloat16
        return x.float().pow(2).mean()

    same_as_pytorch(tmp_path, layers, fn, place=place)


class Normed(nn.Module):
    """16-bit products between fp32 norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.linear = nn.Linear(DIM, DIM).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(self.norm(x.float()).bfloat16())
        return out


@both_devices
def test_fp32_norms_in_a_16_bit_model(tmp_path: Path, place: tuple[str, str, str]) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(Normed(), Normed())

    def fn(model: Any, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(rows(step)).float().pow(2).mean()
        return loss

    plain = make()
    masters = [p.detach().float() for p in plain.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(4):
        loss = fn(plain, step)
        loss.backward()  # type: ignore[no-untyped-call]
        for param, master in zip(plain.parameters(), masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        for param, master in zip(plain.parameters(), masters, strict=True):
            param.data = round_bf16(master) if param.dtype is torch.bfloat16 else master.clone()
        losses.append(loss.item())
    with managed(tmp_path, make(), place=place) as engine:
        check_same(train(engine, fn, steps=4), (losses, values(plain)))


class Buffered(nn.Module):
    """A buffer given from outside, changed in each forward."""

    shared: torch.Tensor

    def __init__(self, shared: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.batch = nn.BatchNorm1d(DIM)
        self.register_buffer("shared", shared)
        self.register_buffer("scratch", torch.zeros(DIM), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.add_(1)
        self.scratch = x.detach().mean(0)
        return self.batch(self.linear(x)) / self.shared.clone() + self.scratch


def buffered() -> nn.Sequential:
    torch.manual_seed(0)
    shared = torch.ones(1)
    return nn.Sequential(Buffered(shared), Buffered(shared))


@both_devices
def test_buffers_change_as_ever(tmp_path: Path, place: tuple[str, str, str]) -> None:
    same_as_pytorch(tmp_path, buffered, mean_square, steps=4, place=place)


def test_a_buffer_of_two_modules_stays_one_when_converted(tmp_path: Path) -> None:
    with managed(tmp_path, buffered(), dtype="bf16") as engine:
        mean_square(engine.module, 0)
        model: Any = engine.module
        assert (model[0].shared.item(), model[1].shared.item()) == (3.0, 3.0)


def test_what_the_optimizer_cannot_do_is_an_error(tmp_path: Path) -> None:
    with managed(tmp_path, layers()) as engine:
        optimizer = engine.optimizer
        assert optimizer is not None
        engine.backward(mean_square(engine, 0))
        for call, says in (
            (optimizer.state_dict, "save_checkpoint"),
            (lambda: optimizer.load_state_dict({}), "load_checkpoint"),
            (lambda: optimizer.step(lambda: 0.0), r"engine\.step"),
            (lambda: optimizer.add_param_group({"params": []}), "before"),
            (lambda: optimizer.zero_grad(set_to_none=False), "set_to_none=True"),
        ):
            with pytest.raises(swapio.UsageError, match=says):
                call()
        optimizer.zero_grad()
        assert all(p.grad is None for p in engine.module.parameters())
        check_same(train(engine, mean_square, steps=2), train_plain(layers(), mean_square, steps=2))


@pytest.mark.parametrize("call", ["optimizer", "given", "engine"])
@pytest.mark.parametrize("hooked", ["optimizer", "given"])
def test_step_hooks_are_run(tmp_path: Path, call: str, hooked: str) -> None:
    model, seen = layers(), list[str]()
    given = plain_adamw(model)
    settings = config(tmp_path)
    del settings["optimizer"]
    with swapio.initialize(model=model, optimizer=given, config=settings)[0] as engine:
        assert engine.optimizer is not None
        by_name: dict[str, Any] = {"engine": engine, "optimizer": engine.optimizer, "given": given}
        by_name[hooked].register_step_pre_hook(lambda *_: seen.append("before"))
        by_name[hooked].register_step_post_hook(lambda *_: seen.append("after"))
        engine.backward(mean_square(engine, 0))
        by_name[call].step()
        assert engine.global_steps == 1
    assert seen == ["before", "after"]


def test_a_scheduler_that_writes_betas(tmp_path: Path) -> None:
    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)

    plain = layers()
    optimizer = plain_adamw(plain)
    schedule = scheduler(optimizer)
    for step in range(5):
        ordinary(plain, optimizer, step)
        schedule.step()
    with swapio.initialize(model=layers(), config=config(tmp_path), lr_scheduler=scheduler)[0] as engine:
        check_same(([], train(engine, mean_square, steps=5)[1]), ([], values(plain)))


def test_a_scheduler_that_needs_a_measure_is_refused(tmp_path: Path) -> None:
    with pytest.raises(swapio.ConfigError, match="ReduceLROnPlateau"):
        swapio.initialize(model=layers(), config=config(tmp_path), lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


@both_devices
def test_a_gradient_scaler(tmp_path: Path, place: tuple[str, str, str]) -> None:
    """It reads and divides the gradients and leaves out the step of an infinite one."""
    scalers: dict[int, Any] = {}

    def run(model: Any, optimizer: Any, step: int) -> None:
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=1024.0))
        scaler.scale(mean_square(model, step) * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (512.0 if step >= 2 else 1024.0)

    both(tmp_path, layers, run, steps=4, place=place)


def test_zero_grad_of_the_module(tmp_path: Path) -> None:
    """To zeros, it leaves gradients that are stepped; to None, nothing."""

    def run(model: Any, optimizer: Any, step: int) -> None:
        mean_square(model, step).backward()  # type: ignore[no-untyped-call]
        model[0].zero_grad(set_to_none=False)
        model[1].zero_grad()
        assert model[1][0].weight.grad is None
        optimizer.step()
        optimizer.zero_grad()

    both(tmp_path, layers, run)


@every_place
@pytest.mark.parametrize("set_to_none", [True, False])
def test_an_optimizer_that_the_engine_does_not_know_trains(tmp_path: Path, place: tuple[str, str, str], set_to_none: bool) -> None:
    """Where `host_memory` holds what it steps at once, and all the rest comes and goes."""

    def run(model: Any, optimizer: Any, step: int) -> None:
        for micro in range(2):
            mean_square(model, 2 * step + micro).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        model[1][0].bias.grad = torch.ones(DIM)
        optimizer.step()
        optimizer.zero_grad(set_to_none)

    settings = config(tmp_path, params=place[0], state=place[1], device=place[2])
    del settings["optimizer"]
    plain = layers()
    outside = plain_adamw(plain)
    with swapio.initialize(model=layers(), config=with_budget(settings, 120_000))[0] as engine:
        inside = plain_adamw(engine.module)
        for step in range(3):
            run(engine.module, inside, step)
            run(plain, outside, step)
            engine.empty_partition_cache()
        assert [p.grad is None for p in engine.module.parameters()] == [set_to_none] * 6
        check_same(([], values(engine.module)), ([], values(plain)))
        engine.zero_grad()
        assert all(p.grad is None for p in engine.module.parameters())
