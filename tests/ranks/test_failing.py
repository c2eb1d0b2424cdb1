"""An `initialize` that fails on some rank ends everywhere; a rank that ends early serves the others to their end."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import swapio
from tests.engine.models import batch, config, make, smallest_budget, with_budget

from . import launch

pytestmark = pytest.mark.slow


def fail_everywhere(rank: int, path: str) -> list[float]:
    settings = config(path) | {"train_batch_size": 4}
    settings = with_budget(settings, smallest_budget(make(), settings))
    losses = []
    with swapio.initialize(model=make(), config=settings)[0] as engine:
        for step in range(2):
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def fail_on_one(rank: int, path: str) -> str:
    settings = config(path) | {"train_batch_size": 4}
    told = Path(path) / "told"
    try:
        engine = swapio.initialize(model=make(), config=with_budget(settings, 4096 if rank else 1 << 30))[0]
        engine(*batch(0))
    except (swapio.BudgetError, swapio.RankError) as error:
        if not rank:
            engine.abandon()
            told.touch()
        give_up = time.monotonic() + 60
        while not told.exists() and time.monotonic() < give_up:  # a rank that is gone has no answer
            time.sleep(0.01)
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody noticed")


class Meet(logging.Handler):
    """Lets rank 1 go on when rank 0 says that it closes."""

    def emit(self, record: logging.LogRecord) -> None:
        if "not given back" in record.getMessage():
            dist.barrier()


def end_early(rank: int, path: str) -> bool:
    """Rank 0 closes before rank 1 has read its weights, which do not fit in the budget."""

    def frozen() -> torch.nn.Module:
        return make(layers=12).requires_grad_(False)

    settings = config(path) | {"train_batch_size": 4}
    settings = with_budget(settings, smallest_budget(frozen(), settings))
    done = Path(path) / "done"
    model = frozen()
    with swapio.initialize(model=model, config=settings)[0] as engine:
        if rank:
            dist.barrier()
            same = all(torch.equal(a, b) for a, b in zip(frozen().state_dict().values(), model.state_dict().values(), strict=True))
            done.touch()
            return same
        logging.getLogger("swapio").addHandler(Meet())
        engine.close()
    return done.exists()


def test_a_rank_that_ends_early(tmp_path: Path) -> None:
    """It closed its store while the others still asked for weights, if its own were too large to be given back to the module."""
    assert launch.run("end_early", 2, str(tmp_path), module=__name__) == [True, True]


def test_a_budget_that_is_too_small_for_all(tmp_path: Path) -> None:
    """All ranks said goodbye at once, each waiting for the other to receive it: they hung."""
    one, two = launch.run("fail_everywhere", 2, str(tmp_path), module=__name__)
    assert one == two
    assert one[0] != one[1]


def test_a_budget_that_is_too_small_for_one(tmp_path: Path) -> None:
    one, two = launch.run("fail_on_one", 2, str(tmp_path), module=__name__)
    assert one.startswith("RankError: gathering 'wte': rank 1 could not read its slice")
    assert two.startswith("BudgetError: swapio.host_memory: 4096 bytes")
