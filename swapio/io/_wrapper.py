"""A storage around a storage: everything goes to the inner one until a subclass says otherwise."""

from __future__ import annotations

from ..spec import Extent
from ._storage import Storage

__all__ = ["WrapperStorage"]


class WrapperStorage(Storage):
    """Owns `inner`, and closes it with itself."""

    def __init__(self, inner: Storage) -> None:
        super().__init__()
        self.inner = inner
        self.kind = inner.kind
        self.alignment = inner.alignment
        self.path = inner.path
        self.choice = inner.choice
        self.num_lanes = inner.num_lanes

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        with self._open(name):
            return self.inner.reserve(nbytes, name=name)

    def free(self, extent: Extent) -> None:
        self.inner.free(extent)

    @property
    def reserved_nbytes(self) -> int:
        return self.inner.reserved_nbytes

    @property
    def end(self) -> int:
        return self.inner.end

    def lane(self, offset: int) -> tuple[int, int]:
        return self.inner.lane(offset)

    def sync(self) -> None:
        self.inner.sync()

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return self.inner._read_some(offset, buffer, name)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return self.inner._write_some(offset, buffer, name)

    def _release(self) -> None:
        self.inner.close()
