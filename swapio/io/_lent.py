"""An extent that others read from, as long as they need it."""

from __future__ import annotations

import errno

from ..errors import StorageError
from ..spec import Extent, round_up
from ._buffers import aligned_buffer, copy_bytes
from ._storage import Storage

__all__ = ["LentExtent"]


class LentExtent(Storage):
    """The bytes of one extent of another storage, to be read from any byte on into any memory, at that storage's offsets.

    What is not aligned as the storage needs it is copied once more. Nothing writes to the extent meanwhile, nor frees it.
    """

    kind = "lent"
    alignment = 1

    def __init__(self, storage: Storage, extent: Extent) -> None:
        super().__init__()
        self.path = storage.path
        self._storage = storage
        self._extent = extent

    @property
    def end(self) -> int:
        return self._extent.end

    @property
    def reserved_nbytes(self) -> int:
        return self._extent.nbytes

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        raise StorageError("reserve", name=name, path=self.path, offset=self.end, wanted=nbytes, got=0, errno=errno.EROFS)

    def free(self, extent: Extent) -> None:
        pass

    def sync(self) -> None:
        pass

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        align = self._storage.alignment
        first = offset // align * align
        pages = aligned_buffer(round_up(offset + buffer.nbytes, align) - first)
        self._storage.read(first, pages, name=name)
        copy_bytes(buffer, pages[offset - first :][: buffer.nbytes])
        return buffer.nbytes

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        raise OSError(errno.EROFS, "lent")

    def _release(self) -> None:
        pass
