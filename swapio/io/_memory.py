"""Bytes in anonymous memory: the reference of the tests, and a store for machines with no drive to spare."""

from __future__ import annotations

import bisect
import errno

from ..errors import StorageError
from ._buffers import aligned_buffer, copy_bytes
from ._storage import LocalStorage

__all__ = ["MemoryStorage"]


class MemoryStorage(LocalStorage):
    """RAM that is not counted in anybody's budget.

    Args:
        capacity: bytes; `None` for no limit.
    """

    kind = "memory"
    path = "memory"

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = capacity
        self._starts: list[int] = []  # of the slabs, ascending; a slab is there before its start
        self._slabs: list[memoryview] = []

    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        if self.capacity is not None and offset + nbytes > self.capacity:
            raise StorageError("reserve", name=name, path=self.path, offset=offset, wanted=nbytes, got=0, errno=errno.ENOSPC)
        self._slabs.append(aligned_buffer(nbytes))
        self._starts.append(offset)

    def _at(self, offset: int, nbytes: int) -> memoryview:
        """From `offset` to the end of its slab, at most `nbytes`."""
        slab = bisect.bisect(self._starts, offset) - 1
        start = offset - self._starts[slab]
        return self._slabs[slab][start : start + nbytes]

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        source = self._at(offset, buffer.nbytes)
        copy_bytes(buffer[: source.nbytes], source)
        return source.nbytes

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        target = self._at(offset, buffer.nbytes)
        copy_bytes(target, buffer[: target.nbytes])
        return target.nbytes

    def sync(self) -> None:
        pass

    def _release(self) -> None:
        self._slabs.clear()
        self._starts.clear()
