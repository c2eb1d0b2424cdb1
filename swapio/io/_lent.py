"""An extent that others read from, as long as they need it."""

from __future__ import annotations

import threading

from ..spec import Extent, round_up
from ._buffers import aligned_buffer, copy_bytes
from ._read_only import ReadOnlyStorage
from ._storage import Storage

__all__ = ["LentExtent"]

_PAGES_NBYTES = 1 << 20
_here = threading.local()  # each thread's own memory to copy from, small enough for its cache


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
        align = self._storage.alignment
        first = offset // align * align
        nbytes = min(buffer.nbytes, _PAGES_NBYTES - (offset - first))
        if not hasattr(_here, "pages"):
            _here.pages = aligned_buffer(_PAGES_NBYTES)
        self._storage.read(first, _here.pages[: round_up(offset + nbytes, align) - first], name=name)
        copy_bytes(buffer[:nbytes], _here.pages[offset - first :][:nbytes])
        return nbytes

    def _release(self) -> None:
        pass
