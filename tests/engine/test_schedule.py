"""Where a use is in the expected order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swapio.swap import Place
from swapio.zero._schedule import Schedule


class Manager:
    """Notes where a prefetcher is told to be."""

    def __init__(self) -> None:
        self.position = 0

    def prefetcher(self) -> Any:
        return SimpleNamespace(move=self._move, follow=lambda order, base: None, close=lambda: None)

    def _move(self, position: int) -> None:
        self.position = position

    def place(self, place: Place) -> Place:
        return place


class Turns:
    """A schedule that has seen one turn."""

    def __init__(self, names: list[str]) -> None:
        self.manager = Manager()
        self.schedule = Schedule(self.manager)  # type: ignore[arg-type]
        self.records = {n: SimpleNamespace(home=Place.NVME, next_use=None) for n in names}
        self.use(names)
        self.schedule.end_turn()
        self.base = self.manager.position

    def use(self, names: list[str]) -> list[int]:
        """Where in the turn the next use is expected after each of these."""
        found = []
        for name in names:
            self.schedule.used(self.records[name], Place.HOST)  # type: ignore[arg-type]
            found.append(self.manager.position - getattr(self, "base", 0))
        return found


FORWARD = [f"unit {i}" for i in range(6)]
STEP = [name for unit in reversed(FORWARD) for name in (unit, f"state of {unit}")]


@pytest.fixture
def turns() -> Turns:
    return Turns(FORWARD + STEP[1:])  # the last unit is used once, at the end of forward


def test_as_before(turns: Turns) -> None:
    assert turns.use(FORWARD + STEP[1:]) == list(range(1, 18))


def test_what_is_left_out_is_skipped(turns: Turns) -> None:
    assert turns.use(["unit 0", "unit 2", "unit 3"]) == [1, 3, 4]


def test_evaluation_begins_the_order_again(turns: Turns) -> None:
    """The first use of forward was taken for that at the end of backward, far ahead, and a whole step was prefetched wrong."""
    turns.use(FORWARD)
    assert turns.use(FORWARD)[1:] == [2, 3, 4, 5, 6]
    assert turns.use(STEP[1:])[-1] == 17


def test_unknown_uses_move_nothing(turns: Turns) -> None:
    turns.records["other"] = SimpleNamespace(home=Place.NVME, next_use=3)
    assert turns.use(["unit 0", "other", "unit 1"]) == [1, 1, 2]
    assert turns.records["other"].next_use is None
