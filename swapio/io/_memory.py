"""Bytes in anonymous memory: the reference of the tests, and a store for machines with no drive to spare."""

from __future__ import annotations

import errno
import mmap

from ..errors import StorageError
from ..spec import PAGE_NBYTES, round_up
from ._storage import Storage

__all__ = ["MemoryStorage"]


class MemoryStorage(Storage):
    """RAM that is not counted in anybody's budget.

    Args:
        capacity: bytes; `None` for no limit.
    """

    kind = "memory"
    alignment = PAGE_NBYTES  # as files have it, so that one caller serves all
    path = "memory"

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self._slabs: list[tuple[int, mmap.mmap]] = []  # (first offset, bytes), ascending

    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        if self.capacity is not None and offset + nbytes > self.capacity:
            raise StorageError("reserve", name=name, path=self.path, offset=offset, wanted=nbytes, got=0, errno=errno.ENOSPC)
        if nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._slabs.append((offset, mmap.mmap(-1, round_up(nbytes, PAGE_NBYTES), flags=flags)))

    def _at(self, offset: int) -> memoryview:
        slabs = self._slabs
        for index in range(len(slabs) - 1, -1, -1):
            start, slab = slabs[index]
            if start <= offset:
                end = slabs[index + 1][0] if index + 1 < len(slabs) else self._extents.end
                return memoryview(slab)[offset - start : max(end - start, 0)]
        return memoryview(b"")

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        source = self._at(offset)[: buffer.nbytes]
        buffer[: source.nbytes] = source
        return source.nbytes

    def _write_some(self, offset: int, buffer: memoryview) -> int:
        target = self._at(offset)[: buffer.nbytes]
        target[:] = buffer[: target.nbytes]
        return target.nbytes

    def sync(self) -> None:
        pass

    def _release(self) -> None:
        self._slabs.clear()
