"""Which ranges of a file are free: first fit, neighbours joined. Pure."""

from __future__ import annotations

import bisect

from ..spec import Extent

__all__ = ["ExtentAllocator"]


class ExtentAllocator:
    """Hands out ranges of a growing space. Not thread-safe."""

    def __init__(self) -> None:
        self.end = 0  # of the space ever handed out
        self._free: list[Extent] = []  # by offset, never adjacent

    @property
    def free_nbytes(self) -> int:
        return sum(hole.nbytes for hole in self._free)

    def take(self, nbytes: int) -> Extent:
        """The first free range that fits, else new space at the end; `end` grows then."""
        for i, hole in enumerate(self._free):
            if hole.nbytes >= nbytes > 0:
                rest = Extent(hole.offset + nbytes, hole.nbytes - nbytes)
                self._free[i : i + 1] = [rest] if rest.nbytes else []
                return Extent(hole.offset, nbytes)
        extent = Extent(self.end, nbytes)
        self.end += nbytes
        return extent

    def give_back(self, extent: Extent) -> None:
        """Undo a `take`.

        Raises:
            ValueError: the range overlaps one that is free: it was given back before.
        """
        if not extent.nbytes:
            return
        at = bisect.bisect(self._free, extent.offset, key=lambda hole: hole.offset)
        left = self._free[at - 1] if at else Extent(0, 0)
        right = self._free[at] if at < len(self._free) else Extent(self.end, 0)
        if left.end > extent.offset or extent.end > right.offset:
            raise ValueError(f"{extent} is not in use")
        joins_left, joins_right = bool(at) and left.end == extent.offset, bool(right.nbytes) and extent.end == right.offset
        offset, end = left.offset if joins_left else extent.offset, right.end if joins_right else extent.end
        self._free[at - joins_left : at + joins_right] = [Extent(offset, end - offset)]
