"""What single ranks do in the tests of parameters written and read whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio import utils
from swapio.zero import GatheredParameters
from tests.engine.models import make

from .work import micro_batch, settings

Values = list[torch.Tensor]
KEYS = ("fp32_param", "grad", "exp_avg", "exp_avg_sq")


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


def read(rank: int, path: str, stage: int, dtype: str, place: str = "nvme") -> dict[str, list[torch.Tensor]]:
    """Masters, moments, gradients of one backward pass and of two, and what a step makes of them."""
    with engine_of(path, stage, rank, dtype, place) as engine:
        train(engine, rank)
        params = dict(engine.module.named_parameters())
        assert utils.safe_get_full_grad(params["head.weight"]) is None
        seen: dict[str, Any] = {}
        for number in (1, 2):
            engine.backward(engine(*micro_batch(rank, engine.world_size, number, 0, 1)))
            seen[f"grad {number}"] = [utils.safe_get_full_grad(p) for p in params.values()]
        for when in ("before", "after"):
            seen[f"master {when}"] = [utils.safe_get_full_fp32_param(p) for p in params.values()]
            for key in ("exp_avg", "exp_avg_sq"):
                seen[f"{key} {when}"] = [utils.safe_get_full_optimizer_state(p, key) for p in params.values()]
            if when == "before":
                engine.step()
        local: list[Any] = [utils.safe_get_local_fp32_param(p) for p in params.values()]
        assert all(part.dim() == 1 for part in local)
        seen["numel"] = [torch.tensor(part.numel()) for part in local]
        seen["weight"] = values(engine)
        return seen


def assign(rank: int, path: str, stage: int, dtype: str, local: bool, place: str = "nvme") -> list[Values]:
    """What is read after everything of one parameter was set, and the weights after the step from there."""
    with engine_of(path, stage, rank, dtype, place) as engine:
        train(engine, rank)
        engine.backward(engine(*micro_batch(rank, engine.world_size, 1, 0, 1)))
        param = engine.module.blocks[0].fc1.weight
        given = {key: torch.randn(param.shape, generator=torch.Generator().manual_seed(i)) for i, key in enumerate(KEYS)}
        given["exp_avg_sq"].abs_()
        for key, value in given.items():
            getters = [getattr(utils, f"safe_get_{kind}_{key if key in KEYS[:2] else 'optimizer_state'}") for kind in ("full", "local")]
            setters = [getattr(utils, f"safe_set_{kind}_{key if key in KEYS[:2] else 'optimizer_state'}") for kind in ("full", "local")]
            more = () if key in KEYS[:2] else (key,)
            setters[0](param, value, *more)
            if local:  # twice the value, set in parts
                setters[1](param, getters[1](param, *more) * 2, *more)
        seen = [utils.safe_get_full_fp32_param(param), utils.safe_get_full_grad(param)]
        seen += [utils.safe_get_full_optimizer_state(param, key) for key in KEYS[2:]]
        weight = param.detach().clone()
        engine.step()
        train(engine, rank, start=2)
        return [seen, [weight], list(given.values()), values(engine)]


def join(rank: int, path: str, port: int) -> int:
    """Ranks that a launcher numbered, and that have not met."""
    torch.distributed.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    with engine_of(path, 3, rank) as engine:
        train(engine, rank)
        world: int = engine.world_size
        return world


def many(rank: int, calls: list[tuple[str, tuple[Any, ...]]], path: str) -> list[Any]:
    """Several of the functions here, one after the other: a process is dear."""
    Path(path).mkdir(exist_ok=True)
    return [globals()[name](rank, path, *args) for name, args in calls]
