"""Models of `transformers`, unmodified, trained with everything on the drive and about two units in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio.optim import round_bf16
from tests.engine.models import config
from tests.ranks import launch

pytest.importorskip("transformers", reason="install swapio[models]")
pytest.importorskip("peft", reason="install swapio[models]")

from . import work, zoo
from .work import LR, MOMENTUM, STEPS, Run

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft still asks


def plain(model: Any, name: str, dtype: str) -> Run:
    """fp32, or bf16 weights with fp32 masters by hand, rounded as the split rounds them."""
    params = [p for p in model.parameters() if p.requires_grad]
    masters = params
    kind = torch.float32
    if dtype == "bf16":
        kind = torch.bfloat16
        masters = [p.detach().clone() for p in params]
        for p in model.parameters():
            p.data = round_bf16(p.detach())
        for name_, buffer in model.named_buffers():
            module, _, own = name_.rpartition(".")
            if buffer.is_floating_point():
                model.get_submodule(module)._buffers[own] = buffer.bfloat16()
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    seen: list[torch.Tensor] = []
    for step in range(STEPS):
        loss = zoo.loss(model, name, step, kind)
        loss.backward()
        for p, master in zip(params, masters, strict=True):
            if p is not master:
                master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        optimizer.step()
        optimizer.zero_grad()
        for p, master in zip(params, masters, strict=True):
            if p is not master:
                p.data.copy_(round_bf16(master))
        losses.append(loss.item())
        if step == 1:
            seen = zoo.look(model, name, kind)
    return losses, [v.clone() for v in model.state_dict().values()], seen


def managed(model: Any, name: str, settings: dict[str, Any], dtype: str) -> tuple[Run, dict[str, Any]]:
    kind = torch.bfloat16 if dtype == "bf16" else torch.float32
    losses = []
    seen: list[torch.Tensor] = []
    with swapio.initialize(model=model, config=settings)[0] as engine:
        for step in range(STEPS):
            loss = zoo.loss(engine, name, step, kind)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 1:
                seen = zoo.look(engine, name, kind)
        return (losses, [v.clone() for v in engine.module.state_dict().values()], seen), engine.stats()


CASES = [(name, reentrant, "fp32") for name in zoo.ARCHITECTURES for reentrant in (None, False, True)] + [("llama", False, "bf16")]


@pytest.mark.parametrize(("name", "reentrant", "dtype"), CASES)
def test_one_rank(tmp_path: Path, name: str, reentrant: bool | None, dtype: str) -> None:
    """With the model's own gradient checkpointing, and dropout; evaluation and `generate` in between."""
    model = zoo.make(name, reentrant=reentrant)
    want = plain(copy.deepcopy(model), name, dtype)
    got, stats = managed(model, name, work.two_units(model, config(tmp_path, dtype=dtype)), dtype)
    assert got[0] == want[0]
    for mine, its in zip(got[1] + got[2], want[1] + want[2], strict=True):
        assert torch.equal(mine, its)
    assert stats["host_memory_peak"] <= stats["host_memory_budget"]
    assert stats["bytes_read"] > stats["bytes_on_nvme"] > 0, "nothing had to come back: the budget was too large to test anything"


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    """Each with a slice of everything on the drive, and half of each batch."""
    world = 2
    sgd = {"type": "SGD", "params": {"lr": LR, "momentum": MOMENTUM}}
    settings = config(tmp_path, optimizer=sgd) | {"train_batch_size": world * zoo.BATCH}
    cases = [(name, bool(number % 2), settings) for number, name in enumerate(zoo.ARCHITECTURES)]
    results = launch.run("train_all", world, cases, module="tests.models.work")
    for number, (name, *_) in enumerate(cases):
        losses, weights, seen = work.plain(name, world)
        first = [v.clone() for v in zoo.make(name, reentrant=None, dropout=0.0).state_dict().values()]
        moved = False
        ranks = [results[rank][number] for rank in range(world)]
        assert [sum(each) / world for each in zip(*(r[0] for r in ranks), strict=True)] == pytest.approx(losses, rel=1e-5)
        for start, want, *each in zip(first, weights, *(r[1] for r in ranks), strict=True):
            torch.testing.assert_close(each[0], want, rtol=1e-4, atol=1e-6)
            assert torch.equal(each[0], each[1])
            moved |= not torch.allclose(start, want, atol=1e-2)
        assert moved, "the weights hardly changed: no proof of right gradients"
        for got, want in zip(ranks[0][2], seen, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
