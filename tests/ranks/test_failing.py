"""An `initialize` that fails on some rank ends everywhere."""

from __future__ import annotations

from pathlib import Path

import swapio
from tests.engine.models import batch, config, make, smallest_budget, with_budget

from . import launch


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
    try:
        engine = swapio.initialize(model=make(), config=with_budget(settings, 4096 if rank else 1 << 30))[0]
        engine(*batch(0))
    except (swapio.BudgetError, swapio.RankError) as error:
        if not rank:
            engine.abandon()
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody noticed")


def test_a_budget_that_is_too_small_for_all(tmp_path: Path) -> None:
    """All ranks said goodbye at once, each waiting for the other to receive it: they hung."""
    one, two = launch.run("fail_everywhere", 2, str(tmp_path), module=__name__)
    assert one == two
    assert one[0] != one[1]


def test_a_budget_that_is_too_small_for_one(tmp_path: Path) -> None:
    one, two = launch.run("fail_on_one", 2, str(tmp_path), module=__name__)
    assert one.startswith("RankError: gathering 'wte': rank 1 could not read its slice")
    assert two.startswith("BudgetError: swapio.host_memory: 4096 bytes")
