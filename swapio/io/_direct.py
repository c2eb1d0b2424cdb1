"""Files past the page cache: `O_DIRECT` with `preadv`/`pwritev`, which release the interpreter's lock."""

from __future__ import annotations

import errno
import os

from ._file import FileStorage

__all__ = ["DirectStorage"]


class DirectStorage(FileStorage):
    """A file opened with `O_DIRECT`. A filesystem that wants more than 4096-byte alignment is refused: buffers and extents have no more."""

    kind = "direct"
    flags = getattr(os, "O_DIRECT", 0)
    hint = '; O_DIRECT is refused there, use backend="mmap" or "aiofiles"'

    def _start(self) -> None:
        if not self.flags:
            raise OSError(errno.EOPNOTSUPP, "this system has no O_DIRECT")

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return os.preadv(self._fd, [buffer], offset)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return os.pwritev(self._fd, [buffer], offset)
