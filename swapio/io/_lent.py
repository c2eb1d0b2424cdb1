"""An extent that others read from, as long as they need it."""

from __future__ import annotations

from ..spec import Extent
from ._buffers import read_through_pages
from ._read_only import ReadOnlyStorage
from ._storage import Storage

__all__ = ["LentExtent"]


class LentExtent(ReadOnlyStorage):
    """The bytes of one extent of another storage, to be read from any byte on into any memory, at that storage's offsets.

    What is not aligned as the storage needs it is copied once more. Nothing writes to the extent meanwhile, nor frees it.
    """

    kind = "lent"

    def __init__(self, storage: Storage, extent: Extent) -> None:
        super().__init__()
        self.path = storage.path
        self._storage = storage
        self._extent = extent

    @property
    def end(self) -> int:
        return self._extent.end

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        def read(first: int, pages: memoryview) -> int:
            self._storage.read(first, pages, name=name)
            return pages.nbytes

        return read_through_pages(read, offset, buffer, alignment=self._storage.alignment)

    def _release(self) -> None:
        pass
