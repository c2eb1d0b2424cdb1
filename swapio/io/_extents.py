"""Which ranges of a file are free: first fit, neighbours joined. Pure."""

from __future__ import annotations

from ..spec import Extent

__all__ = ["ExtentAllocator"]


class ExtentAllocator:
    """Hands out ranges of a growing space. Not thread-safe."""

    def __init__(self) -> None:
        self.end = 0  # of the space ever handed out
        self._free: list[Extent] = []  # by offset, never adjacent

    @property
    def free_nbytes(self) -> int:
        return sum(e.nbytes for e in self._free)

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
        if extent.end > self.end or any(e.offset < extent.end and extent.offset < e.end for e in self._free):
            raise ValueError(f"{extent} is not in use")
        joined: list[Extent] = []
        for hole in sorted([*self._free, extent], key=lambda e: e.offset):
            if joined and joined[-1].end == hole.offset:
                joined[-1] = Extent(joined[-1].offset, joined[-1].nbytes + hole.nbytes)
            else:
                joined.append(hole)
        self._free = joined
