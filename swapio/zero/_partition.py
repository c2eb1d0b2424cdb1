"""Which rank owns what of a unit. Pure functions.

[Note: Slices] Each segment's trained elements are cut into as many slices as there are ranks, and so are its frozen ones. Slices start at
multiples of 2048 elements from the part's start: whole pages of 16-bit weights, and whole vectors. The same slices say which rank sums
a gradient, which one steps it (stages 1 to 3) and which one keeps the weight (stage 3), so that all stages give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..optim import CHUNK_MULTIPLE
from ..spec import PAGE_NBYTES, round_up
from ._layout import Slot, UnitLayout

__all__ = ["Partition", "Piece"]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `stop` of a segment, owned by one rank.

    Attributes:
        offset, nbytes: where its weights lie in the unit.
        shard_offset: where they lie in the owner's shard.
        sum_start: where the sums of its gradients start among the owner's, in elements; -1: frozen.
    """

    segment: int
    start: int
    stop: int
    offset: int
    nbytes: int
    shard_offset: int
    sum_start: int

    @property
    def trained(self) -> bool:
        return self.sum_start >= 0

    def overlap(self, slot: Slot) -> tuple[int, int] | None:
        """First and past-the-last element of the segment that a parameter has in this piece."""
        first, last = max(slot.start, self.start), min(slot.start + slot.span, self.stop)
        return (first, last) if slot.segment == self.segment and first < last else None


class Partition:
    """The slices of one unit among `num_ranks` ranks.

    Attributes:
        pieces: of each rank, none of them empty.
        shard_nbytes: of each rank.
        sum_numel: trained elements of each rank, with the padding after them.
    """

    def __init__(self, layout: UnitLayout, num_ranks: int) -> None:
        self.pieces: list[list[Piece]] = []
        self.shard_nbytes: list[int] = []
        self.sum_numel: list[int] = []
        for rank in range(num_ranks):
            pieces: list[Piece] = []
            nbytes = numel = 0
            for segment, start, stop, trained in _parts(layout):
                each = round_up(-(-(stop - start) // num_ranks), CHUNK_MULTIPLE)
                first, last = min(start + rank * each, stop), min(start + (rank + 1) * each, stop)
                if first == last:
                    continue
                itemsize = layout.segments[segment].dtype.itemsize
                offset = layout.segments[segment].offset + first * itemsize
                pieces.append(Piece(segment, first, last, offset, (last - first) * itemsize, nbytes, numel if trained else -1))
                nbytes = round_up(nbytes + (last - first) * itemsize, PAGE_NBYTES)
                numel += last - first if trained else 0
            self.pieces.append(pieces)
            self.shard_nbytes.append(nbytes)
            self.sum_numel.append(numel)


def _parts(layout: UnitLayout) -> Iterator[tuple[int, int, int, bool]]:
    for number, segment in enumerate(layout.segments):
        yield number, 0, segment.num_trained, True
        yield number, segment.num_trained, segment.numel, False
