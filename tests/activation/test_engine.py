"""Under an engine with everything on a drive and the smallest budget, checkpointed training is plain training to the bit."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import swapio
from swapio.checkpointing import checkpoint, checkpoint_blocks, configure
from swapio.memory import SimulatedDevice
from tests.engine import models
from tests.engine.models import batch, config, smallest_budget, train, with_budget

LossFn = models.LossFn


class DropBlock(models.Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


def make() -> Any:
    torch.manual_seed(0)
    model = models.GPT(layers=4)
    model.blocks = nn.ModuleList(DropBlock(models.DIM) for _ in range(4))
    return model


def make_row() -> Any:
    model = make()
    model.blocks = nn.ModuleList([nn.Sequential(*model.blocks)])
    return model


def train_seeded(engine: Any, fn: LossFn) -> Any:
    torch.manual_seed(1)
    return (*train(engine, fn, steps=3), torch.get_rng_state())


def train_plain_seeded(model: Any, fn: LossFn) -> Any:
    torch.manual_seed(1)
    return (*models.train_plain(model, fn, steps=3), torch.get_rng_state())


def check(got: Any, want: Any) -> None:
    models.check_same(got[:2], want[:2])
    assert torch.equal(got[2], want[2])


def run(tmp_path: Path, model: Any, fn: LossFn, *, device: str = "cpu") -> Any:
    settings = config(tmp_path, device=device)
    settings = with_budget(settings, smallest_budget(copy.deepcopy(model), settings))
    with swapio.initialize(model=model, config=settings)[0] as engine:
        return train_seeded(engine, fn)


def twice(model: Any, step: int) -> torch.Tensor:
    ids, targets = batch(step)
    x = model.embed(ids)
    for block in (*model.blocks, *model.blocks):
        x = block(x)
    loss: torch.Tensor = model.loss(x, targets)
    return loss


def autocast(model: Any, step: int) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return models.plain_loss(model, step)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("fn", [models.plain_loss, twice, autocast])
@pytest.mark.parametrize(("maker", "number"), [(make, None), (make_row, None), (make_row, 2), (make_row, 1)])
def test_blocks(tmp_path: Path, maker: Callable[[], Any], number: int | None, fn: LossFn, device: str) -> None:
    model = maker()
    checkpoint_blocks(model, number_checkpoints=number)
    check(run(tmp_path, model, fn, device=device), train_plain_seeded(maker(), fn))


def test_blocks_of_an_engine(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings = with_budget(settings, smallest_budget(make_row(), settings))
    with swapio.initialize(model=make_row(), config=settings)[0] as engine:
        with checkpoint_blocks(engine, number_checkpoints=2) as handle:
            assert handle.names == tuple(f"module.blocks.0.{i}" for i in range(4))
            got = train_seeded(engine, models.plain_loss)
        twin = copy.deepcopy(engine.module)
    check(got, train_plain_seeded(make_row(), models.plain_loss))
    for a, b in zip(models.values(twin), got[1], strict=True):
        assert torch.equal(a, b)


def _called(call: str, reentrant: bool, use: bool) -> LossFn:
    def one(function: Any, x: torch.Tensor) -> Any:
        return checkpoint(function, x, use_reentrant=reentrant) if use else function(x)

    def fn(model: Any, step: int) -> torch.Tensor:
        ids, targets = batch(step)
        x = model.embed(ids)
        if call == "nested":
            x = one(lambda x: one(model.blocks[1], one(model.blocks[0], x)), x)
            x = one(lambda x: one(model.blocks[3], one(model.blocks[2], x)), x)
        else:
            for block in model.blocks:
                x = one(block if call == "module" else block.forward, x)
        x = x + one(lambda x: F.linear(x, model.blocks[1].out.weight), x)  # a weight of another unit, in its own right
        loss: torch.Tensor = model.loss(x, targets)
        return loss

    return fn


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("call", ["module", "forward", "nested"])
def test_calls(tmp_path: Path, call: str, reentrant: bool, device: str) -> None:
    want = train_plain_seeded(make(), _called(call, reentrant, False))
    check(run(tmp_path, make(), _called(call, reentrant, True), device=device), want)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_weight_as_an_argument(tmp_path: Path, reentrant: bool) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight).tanh()

    def fn(model: Any, step: int, use: bool = True) -> torch.Tensor:
        ids, targets = batch(step)
        x = model.embed(ids)
        for block in model.blocks:
            x = block(x)
        args = (model.ln(x), model.head.weight)
        logits = checkpoint(function, *args, use_reentrant=reentrant) if use else function(*args)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    check(run(tmp_path, make(), fn), train_plain_seeded(make(), lambda model, step: fn(model, step, False)))


@pytest.mark.parametrize("number", [None, 2])
def test_kept_inputs_in_host_memory(tmp_path: Path, number: int | None) -> None:
    device = SimulatedDevice()
    configure(checkpoint_in_cpu=True, device=device)
    model = make_row()
    checkpoint_blocks(model, number_checkpoints=number)
    check(run(tmp_path, model, models.plain_loss, device="simulated"), train_plain_seeded(make_row(), models.plain_loss))
    assert device.num_downloads == device.num_uploads == 3 * (number or 4)


def tight() -> Any:
    """Gradients are small, so the smallest budget is that of two blocks."""
    model = make_row()
    for param in model.parameters():
        param.requires_grad_(param.dim() < 2)
    return model


@pytest.mark.parametrize(("number", "runs"), [(None, 1), (2, 2), (1, 2)])
def test_two_units_resident(tmp_path: Path, number: int | None, runs: int) -> None:
    model = tight()
    checkpoint_blocks(model, number_checkpoints=number)
    settings = config(tmp_path)
    settings = with_budget(settings, smallest_budget(tight(), settings))
    assert settings["swapio"]["host_memory"] < sum(p.numel() * 4 for p in model.parameters()) / 3
    read: list[str] = []
    losses = []
    with swapio.initialize(model=model, config=settings)[0] as engine:
        engine.manager.mover.on_event = lambda kind, key: read.append(key) if kind == "read" else None
        torch.manual_seed(1)
        for step in range(3):
            loss = models.plain_loss(engine, step)
            read.clear()
            engine.backward(loss)
            reads = collections.Counter(key for key in read if "#" not in key)
            assert 0 < max(reads.values()) <= runs, "in backward a unit is read at most once per run of its block"
            engine.step()
            losses.append(loss.item())
        got = losses, models.values(engine.module), torch.get_rng_state()
        engine.abandon()
    check(got, train_plain_seeded(tight(), models.plain_loss))
