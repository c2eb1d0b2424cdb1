"""What single ranks do in the tests of parameters written and read whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio.zero import GatheredParameters
from tests.engine.models import make

from .work import micro_batch, settings

Values = list[torch.Tensor]


def engine_of(path: str, stage: int, rank: int, dtype: str = "bf16", place: str = "nvme", **own: Any) -> Any:
    config = settings(path, stage=stage, params=place, state=place, dtype=dtype, accumulate=1, clip=0.0, world=1)
    config["swapio"] |= own
    return swapio.initialize(model=make(seed=rank, layers=1), config=config)[0]


def train(engine: swapio.Engine, rank: int, steps: int = 1, start: int = 0) -> None:
    for step in range(start, start + steps):
        engine.backward(engine(*micro_batch(rank, engine.world_size, step, 0, 1)))
        engine.step()


def values(engine: swapio.Engine) -> Values:
    return [v.clone() for v in engine.module.state_dict().values()]


def write(rank: int, path: str, stage: int, place: str = "nvme", by: int | None = 1) -> tuple[Values, Values]:
    """The weights after a write by one rank (or all alike) between two steps, and after the second step."""
    with engine_of(path, stage, rank, place=place) as engine:
        train(engine, rank)
        if by is not None:
            by = min(by, engine.world_size - 1)
        block = engine.module.blocks[0]
        with GatheredParameters([block.fc1.weight, block.ln1.bias, block.fc2.weight], modifier_rank=by):
            if by in (None, rank):
                block.fc1.weight.data.fill_(0.25)  # behind autograd's back
                block.fc2.weight.data = torch.full_like(block.fc2.weight, 0.5)
                with torch.no_grad():
                    block.ln1.bias.add_(1)
        written = values(engine)
        train(engine, rank, start=1)
        return written, values(engine)


def load(rank: int, path: str, stage: int) -> list[Values]:
    """The weights of another model, loaded; after a step; and what a load of half of them leaves."""
    with engine_of(path, stage, rank) as engine:
        train(engine, rank)
        state = make(seed=7, layers=1).bfloat16().state_dict()
        engine.module.load_state_dict(state)
        loaded = values(engine)
        train(engine, rank, start=1)
        stepped = values(engine)
        with pytest.raises(RuntimeError, match="Missing key"):
            engine.module.load_state_dict(dict(list(state.items())[:5]))
        half = values(engine)
        with pytest.raises(swapio.UsageError, match="assign=True"):
            engine.module.load_state_dict(state, assign=True)
        return [loaded, stepped, half]


def refuse(rank: int, path: str, stage: int) -> None:
    with engine_of(path, stage, rank) as engine:
        weight = engine.module.head.weight
        with pytest.raises(swapio.UsageError, match="modifier_rank=2: there are 2 ranks"), GatheredParameters(weight, modifier_rank=2):
            pass
        with pytest.raises(swapio.UsageError, match=r"'head\.weight' was not written alike"), GatheredParameters(weight):
            if rank == 0:
                weight.data.zero_()
        with pytest.raises(ZeroDivisionError), GatheredParameters(engine.module):
            1 / 0  # on all ranks: none waits for another
        if stage == 3:
            with pytest.raises(swapio.UsageError, match="GatheredParameters"):
                with torch.no_grad():
                    engine.module.blocks[0].ln1.bias.add_(1)
                engine.empty_partition_cache()
        torch.distributed.barrier()  # the others may still gather
        engine.abandon()


def many(rank: int, calls: list[tuple[str, tuple[Any, ...]]], path: str) -> list[Any]:
    """Several of the functions here, one after the other: a process is dear."""
    Path(path).mkdir(exist_ok=True)
    return [globals()[name](rank, path, *args) for name, args in calls]
