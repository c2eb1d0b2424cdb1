"""Files past the page cache: `O_DIRECT` with `preadv`/`pwritev`, which release the GIL."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from pathlib import Path

from ..errors import StorageError
from ..spec import PAGE_NBYTES
from ._scratch import make_scratch, remove_orphans, remove_scratch
from ._storage import Storage

__all__ = ["DirectStorage"]


class DirectStorage(Storage):
    """One scratch file in `directory`, unnamed (`O_TMPFILE`) where the filesystem can, so that no kind of death leaves it behind.

    Args:
        directory: an existing directory, or one whose parent exists.
        named: keep a name, in a folder of our own; for filesystems without `O_TMPFILE`, and for other processes to find.

    Raises:
        StorageError: the directory cannot be written, or does not take `O_DIRECT`.
    """

    kind = "direct"
    alignment = PAGE_NBYTES

    def __init__(self, directory: str | os.PathLike[str], *, named: bool = False) -> None:
        super().__init__()
        self.directory = Path(directory).absolute()
        self._scratch: Path | None = None
        self._fd = -1
        if not hasattr(os, "O_DIRECT"):
            raise self._refused(errno.EOPNOTSUPP, "this system has no O_DIRECT")
        try:
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            remove_orphans(self.directory)
            if not named:
                self._fd = self._open_unnamed()
            if self._fd < 0:
                self._scratch = make_scratch(self.directory)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW
                self._fd = os.open(self._scratch / "swap", flags, 0o600)
        except StorageError:
            raise
        except OSError as error:
            if self._scratch is not None:
                remove_scratch(self._scratch)
            raise self._refused(error.errno or errno.EIO, "") from error
        self.path = str(self._scratch / "swap") if self._scratch else f"{self.directory} (unnamed file)"
        try:
            self._probe()
        except BaseException:
            self.close()
            raise

    def _open_unnamed(self) -> int:
        try:
            return os.open(self.directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                if error.errno == errno.ENOENT and not self.directory.exists():
                    raise
                return -1
            raise

    def _refused(self, code: int, why: str) -> StorageError:
        hint = '; O_DIRECT is refused there, use backend="memory" or another drive' if code in (errno.EINVAL, errno.EOPNOTSUPP) else ""
        return StorageError(
            "opening", name="swap file", path=str(self.directory), offset=0, wanted=0, got=0, errno=code,
            why=(why or os.strerror(code)) + hint,
        )  # fmt: skip

    def _probe(self) -> None:
        """Write and read one page for real: opening alone proves nothing."""
        extent = self.reserve(PAGE_NBYTES, name="probe")
        page = mmap.mmap(-1, PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            with memoryview(page) as view:
                view[:] = b"\xa5" * PAGE_NBYTES
                self.write(extent.offset, view, name="probe")
                view[:] = bytes(PAGE_NBYTES)
                self.read(extent.offset, view, name="probe")
                if view[0] != 0xA5 or view[-1] != 0xA5:
                    raise self._refused(errno.EIO, "a page read back was not the page written")
        finally:
            page.close()
            self.free(extent)

    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        if not nbytes:
            return
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):  # what was allocated before it failed
                os.ftruncate(self._fd, offset)
            raise StorageError(
                "reserve", name=name, path=self.path, offset=offset, wanted=nbytes, got=0, errno=error.errno or errno.EIO
            ) from error

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        return os.preadv(self._fd, [buffer], offset)

    def _write_some(self, offset: int, buffer: memoryview) -> int:
        return os.pwritev(self._fd, [buffer], offset)

    def sync(self) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StorageError("sync", name="swap file", path=self.path, offset=0, wanted=0, got=0, errno=error.errno or errno.EIO) from error

    def fileno(self) -> int:
        """The descriptor; an unnamed file is reached as `/proc/self/fd/<fileno>`."""
        return self._fd

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if self._scratch is not None:
            remove_scratch(self._scratch)
