"""What is only read: bytes that others wrote, and that stay as they are."""

from __future__ import annotations

import errno
import os
import weakref
from pathlib import Path

from ..errors import StorageError
from ..spec import Extent
from ._cache import drop_cache
from ._storage import Storage

__all__ = ["ReadOnlyFile", "ReadOnlyStorage"]


class ReadOnlyStorage(Storage):
    """Bytes at any offset, into any memory; nothing is reserved or written."""

    alignment = 1

    @property
    def reserved_nbytes(self) -> int:
        return self.end

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        raise StorageError("reserve", name=name, path=self.path, offset=self.end, wanted=nbytes, got=0, errno=errno.EROFS)

    def free(self, extent: Extent) -> None:
        pass

    def sync(self) -> None:
        pass

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class ReadOnlyFile(ReadOnlyStorage):
    """A whole file to read from, any bytes of it; what was read leaves the page cache. Open until nobody refers to it.

    A file that is moved, removed or replaced under its name can still be read. One that is written to is an error.

    Raises:
        StorageError: it cannot be opened.
    """

    kind = "read-only"

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = str(path)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                "opening", name=path.name, path=self.path, offset=0, wanted=0, got=0, errno=error.errno or errno.EIO
            ) from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # threads may still read
        self._known = self._look()

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._fd)
        return found.st_size, found.st_mtime_ns

    def fileno(self) -> int:
        return self._fd

    @property
    def end(self) -> int:
        return self._known[0]

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        nbytes = os.preadv(self._fd, [buffer], offset)
        drop_cache(self._fd, offset, nbytes)
        now = self._look()  # after the read: what is in the buffer was there before
        if now != self._known:
            why = f"the file was changed while it was in use: it has {now[0]} bytes, and had {self._known[0]}"
            if now[0] == self._known[0]:
                why = "the file was changed while it was in use: its time of modification is another"
            raise StorageError("read", name=name, path=self.path, offset=offset, wanted=buffer.nbytes, got=0, why=why)
        return nbytes

    def _release(self) -> None:
        self._close()
