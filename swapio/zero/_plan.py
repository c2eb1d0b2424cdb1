"""What stays in host memory for good, when not all that rests on NVMe fits. Pure functions.

[Note: A fixed resident set] The uses of a training step are cyclic: whatever is dropped on the way is needed again just before the next
turn, so caching what was used last would miss every time. Keeping the same records always saves all their traffic. Worth most per
byte of memory are 16-bit weights (read for forward and for backward, written once), then gradients that would be written and read, and
state (read and written once). What is left for the rest is a window: what is in use, what is written back and what is read ahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

__all__ = ["Kept", "Movable", "resident_set"]


class Kept(NamedTuple):
    """What may stay in host memory: the `"weights"` or `"gradients"` of a unit, or a chunk of its `"state"`."""

    kind: Literal["weights", "gradients", "state"]
    unit: int
    chunk: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Movable:
    """Something that rests on NVMe unless it is kept in host memory.

    Attributes:
        key: what it is.
        cost: bytes of host memory that keeping it takes.
        saved: bytes of traffic per step that keeping it saves.
    """

    key: Kept
    cost: int
    saved: int

    @property
    def density(self) -> float:
        """Bytes saved per byte of memory, to three digits: what is nearly equal counts as equal."""
        return float(f"{self.saved / self.cost:.3g}") if self.cost else math.inf


def resident_set(movables: Sequence[Movable], room: int) -> set[Kept]:
    """Which of `movables`, given in the order in which a step uses them, are kept in `room` bytes.

    By bytes saved per byte, and among equals spread evenly over the order: so that at each moment of a step the same part of what is used
    is there, and neither the drive nor the computing waits long for the other.
    """
    kept: set[Kept] = set()
    classes: dict[float, list[Movable]] = {}
    for movable in movables:
        classes.setdefault(movable.density, []).append(movable)
    for density in sorted(classes, reverse=True):
        for movable in _spread(classes[density]):
            if movable.cost <= room and movable.saved:
                room -= movable.cost
                kept.add(movable.key)
    return kept


def _spread(items: Sequence[Movable]) -> Iterable[Movable]:
    """In an order of which every beginning is spread evenly: by the fractional parts of multiples of the golden ratio.

    Source: D. E. Knuth, The Art of Computer Programming, volume 3, section 6.4, exercise 9 (the three-distance theorem).
    """
    golden = (math.sqrt(5) - 1) / 2
    count = len(items)
    places = sorted(range(count), key=lambda i: i * golden % 1.0)  # places[k]: which of the multiples comes k-th
    by_rank = sorted(range(count), key=lambda k: places[k])
    return (items[k] for k in by_rank)
