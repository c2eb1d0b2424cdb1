"""Whatever rests where, the numbers are those of plain PyTorch, to the bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapio

from . import models
from .models import batch, check_same, config, make, smallest_budget, train, train_plain, train_plain_bf16, with_budget

PAIRS = list(itertools.product(("none", "cpu", "nvme"), repeat=2))


def run(model: Any, settings: dict[str, Any], fn: models.LossFn = models.plain_loss) -> Any:
    with swapio.initialize(model=model, config=settings)[0] as engine:
        result = train(engine, fn)
        stats = engine.stats()
        assert stats["host_memory_budget"] is None or stats["host_memory_peak"] <= stats["host_memory_budget"]
        assert not engine.manager.mover.room.scratch, "a gradient lease is left after step()"
        return result


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("params", "state"), PAIRS)
def test_nine_pairs(tmp_path: Path, params: str, state: str, dtype: str, device: str) -> None:
    want = (train_plain if dtype == "fp32" else train_plain_bf16)(make())
    settings = config(tmp_path, params=params, state=state, dtype=dtype, device=device)
    check_same(run(make(), settings), want)
    check_same(run(make(), with_budget(settings, smallest_budget(make(), settings))), want)


def test_close_to_ordinary_adamw(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(5):
        models.plain_loss(model, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    _, got = run(make(), config(tmp_path))
    for (name, want), value in zip(model.state_dict().items(), got, strict=True):
        if "qkv.bias" not in name:  # the gradient of a key's bias is zero but for rounding, which AdamW blows up
            torch.testing.assert_close(value, want, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "momentum"])
@pytest.mark.parametrize("from_config", [True, False])
def test_other_optimizers(tmp_path: Path, optimizer: str, from_config: bool) -> None:
    kwargs: dict[str, Any] = {"lr": 1e-2} | ({"momentum": 0.9, "nesterov": True} if optimizer == "momentum" else {})
    cls = torch.optim.Adam if optimizer == "Adam" else torch.optim.SGD
    model = make()
    plain = cls(model.parameters(), fused=True, **kwargs)
    for step in range(4):
        models.plain_loss(model, step).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
    ours = make()
    params = {k: v for k, v in kwargs.items()} | ({"adam_w_mode": False} if optimizer == "Adam" else {})
    settings = config(tmp_path, optimizer={"type": "Adam" if optimizer == "Adam" else "SGD", "params": params})
    given = None
    if not from_config:
        del settings["optimizer"]
        given = cls(ours.parameters(), **kwargs)
    settings = with_budget(settings, smallest_budget(make(), config(tmp_path)))
    with swapio.initialize(model=ours, optimizer=given, config=settings)[0] as engine:
        _, got = train(engine, steps=4)
    for a, b in zip(got, models.values(model), strict=True):
        assert torch.equal(a, b)


def _checkpointed(call: str, reentrant: bool) -> models.LossFn:
    def fn(model: Any, step: int) -> torch.Tensor:
        ids, targets = batch(step)
        x = model.embed(ids)
        for block in model.blocks:
            x = checkpoint(block if call == "module" else block.forward, x, use_reentrant=reentrant)
        loss: torch.Tensor = model.loss(x, targets)
        return loss

    return fn


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("extra_units", range(5))
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", ["module", "forward"])
def test_checkpointing(tmp_path: Path, call: str, reentrant: bool, extra_units: int, device: str) -> None:
    fn = _checkpointed(call, reentrant)
    settings = config(tmp_path, device=device)
    budget = smallest_budget(make(), settings) + extra_units * models.largest_unit(make())
    check_same(run(make(), with_budget(settings, budget), fn), train_plain(make(), fn))


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", ["module", "forward"])
def test_a_recomputed_block_is_read_twice(tmp_path: Path, call: str, reentrant: bool, device: str) -> None:
    """Once in the forward, once for recomputation and backward together. Gradients are small, so the budget holds few of the weights."""

    def start() -> models.GPT:
        model = make()
        for block in model.blocks:
            for layer in (m for m in block.modules() if isinstance(m, nn.Linear)):
                layer.requires_grad_(False)
        return model

    fn = _checkpointed(call, reentrant)
    settings = config(tmp_path, device=device)
    budget = smallest_budget(start(), settings) + models.largest_unit(start())
    most: list[int] = []
    reads: list[str] = []
    with swapio.initialize(model=start(), config=with_budget(settings, budget))[0] as engine:
        engine.manager.mover.on_event = lambda kind, key: reads.append(key) if kind == "read" else None
        for step in range(5):
            reads.clear()
            engine.backward(fn(engine.module, step))
            most.append(max(reads.count(f"blocks.{i}") for i in range(3)))
            engine.step()
    assert max(most[2:]) == 2, most  # the first two steps differ: there is nothing to update yet, then for the first time


def test_whole_model_in_one_checkpoint(tmp_path: Path) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        loss: torch.Tensor = checkpoint(model, *batch(step), use_reentrant=False)
        return loss

    settings = config(tmp_path)
    check_same(run(make(), with_budget(settings, smallest_budget(make(), settings)), fn), train_plain(make(), fn))


def _any_use(model: Any, step: int) -> torch.Tensor:
    """By another module, in a reduction, through a captured function, in the loss outside forward, by a sub-module alone."""
    ids, targets = batch(step)
    x = model.embed(ids)
    for block in model.blocks:
        x = block(x)
    x = F.linear(model.ln(x), model.wte.weight)

    def project(y: torch.Tensor) -> Any:
        return y @ model.blocks[0].out.weight

    loss = F.cross_entropy(x.float().flatten(0, 1), targets.flatten())
    loss = loss + (model.blocks[1].fc1.weight ** 2).sum() * 1e-3 + project(model.blocks[2].out.weight).abs().mean()
    loss = loss + (model.head.weight * model.head.weight).sum() * 1e-3 + model.blocks[1].qkv.weight.t().norm() * 1e-3
    total: torch.Tensor = loss + model.blocks[2].ln1(torch.ones(models.DIM)).sum() * 1e-2
    return total


def _branches(model: Any, step: int) -> torch.Tensor:
    ids, targets = batch(step)
    x = model.embed(ids)
    for number, block in enumerate(model.blocks):
        if (step + number) % 3:
            x = block(x)
    loss: torch.Tensor = model.loss(x, targets)
    return loss


def _twice(model: Any, step: int) -> torch.Tensor:
    ids, targets = batch(step)
    x = model.embed(ids)
    for block in (*model.blocks, *model.blocks):
        x = block(x)
    loss: torch.Tensor = model.loss(x, targets)
    return loss


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("extra_units", [0, 1, 4])
@pytest.mark.parametrize("fn", [_any_use, _branches, _twice])
def test_uses(tmp_path: Path, fn: models.LossFn, extra_units: int, device: str) -> None:
    settings = config(tmp_path, device=device)
    budget = smallest_budget(make(), settings) + (extra_units + (fn is _any_use)) * models.largest_unit(make())
    check_same(run(make(), with_budget(settings, budget), fn), train_plain(make(), fn))


def test_tied_weights(tmp_path: Path) -> None:
    settings = config(tmp_path)
    got = run(make(tied=True), with_budget(settings, smallest_budget(make(tied=True), settings)))
    check_same(got, train_plain(make(tied=True)))


def test_frozen_parameters_get_no_state(tmp_path: Path) -> None:
    def frozen() -> Any:
        model = make()
        for name, param in model.named_parameters():
            param.requires_grad_("fc" in name or "head" in name)
        return model

    settings = config(tmp_path)
    settings = with_budget(settings, smallest_budget(frozen(), settings))
    events: list[tuple[str, str]] = []
    model = frozen()
    with swapio.initialize(model=model, config=settings)[0] as engine:
        engine.manager.flush().wait()
        engine.manager.mover.on_event = lambda kind, key: events.append((kind, key))
        got = train(engine)
        trained = sum(u["trained_numel"] for u in engine.describe_units())
    check_same(got, train_plain(frozen()))
    assert trained < sum(p.numel() for p in model.parameters() if p.requires_grad) + 64 * 20
    assert not {key for kind, key in events if kind == "write"} & {"wte", "wpe", "ln"}, "a frozen unit was written"


@pytest.mark.parametrize("made", ["before", "by a function"])
def test_several_groups(tmp_path: Path, made: str) -> None:
    def groups(model: Any) -> list[dict[str, Any]]:
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]

    model = make()
    plain = torch.optim.AdamW(groups(model), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(5):
        models.plain_loss(model, step).backward()  # type: ignore[no-untyped-call]
        plain.step()
        plain.zero_grad()
        schedule.step()
    ours = make()
    given = torch.optim.AdamW(groups(ours), lr=1e-2)
    settings = config(tmp_path)
    del settings["optimizer"]
    settings = with_budget(settings, smallest_budget(make(), config(tmp_path)))

    def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    scheduler = schedule_of(given) if made == "before" else schedule_of
    engine, _, _, _ = swapio.initialize(model=ours, optimizer=given, lr_scheduler=scheduler, config=settings)
    with engine:
        _, got = train(engine)
        assert [g["lr"] for g in engine.optimizer.param_groups] == [g["lr"] for g in plain.param_groups]
    for a, b in zip(got, models.values(model), strict=True):
        assert torch.equal(a, b)
