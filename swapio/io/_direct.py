"""Files past the page cache: `O_DIRECT` with `preadv`/`pwritev`, which release the interpreter's lock."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from ..spec import PAGE_NBYTES
from ._buffers import read_through_pages
from ._cache import read_as_told
from ._file import FileStorage

__all__ = ["DirectFile", "DirectStorage"]


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


class DirectFile:
    """A file to read from, past the page cache where the filesystem lets that be. From any thread; it keeps nothing of its own."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._direct: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        read_as_told(self._file.fileno())

    def read(self, offset: int, buffer: memoryview) -> int:
        """Fill the buffer; returns its bytes, or fewer where the file ends."""
        done = 0
        while done < buffer.nbytes and (more := self._read_some(offset + done, buffer[done:])):
            done += more
        return done

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        direct = self._direct
        if direct is not None:
            try:
                return read_through_pages(lambda first, pages: os.preadv(direct, [pages], first), offset, buffer, alignment=PAGE_NBYTES)
            except OSError as error:
                if error.errno != errno.EINVAL:  # opening alone proves nothing
                    raise
        return os.preadv(self._file.fileno(), [buffer], offset)

    def close(self) -> None:
        """Idempotent; nobody reads meanwhile."""
        self._file.close()
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
