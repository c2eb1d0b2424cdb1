"""What all backends on a file share: the file itself, its growth, and a real write and read before anybody relies on it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from pathlib import Path

from ..errors import StorageError
from ..spec import PAGE_NBYTES
from ._buffers import aligned_buffer
from ._scratch import Scratch, remove_orphans
from ._storage import LocalStorage

__all__ = ["UNSUPPORTED", "FileStorage"]

_log = logging.getLogger("swapio")

UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a filesystem answers to a way of access that it does not have."""

_KEYS = "give a directory on a local drive that you may write to (nvme_path in a config, paths of a manager)"
_REMEDIES = {
    errno.ENOENT: f"no file can be made there: {_KEYS}",  # /proc says so of new files
    errno.ENOTDIR: f"that is no directory: {_KEYS}",
    errno.EACCES: f"you may not write there: {_KEYS}",
    errno.EPERM: f"you may not write there: {_KEYS}",
    errno.EROFS: f"it is mounted read-only: {_KEYS}",
}

_ZEROS_NBYTES = 1 << 20


class FileStorage(LocalStorage):
    """One scratch file in `directory`, unnamed (`O_TMPFILE`) where the filesystem can, so that no kind of death leaves it behind.

    Args:
        directory: an existing directory, or one whose parent exists.
        named: keep a name, in a folder of our own; for filesystems without `O_TMPFILE`, and for other processes to find.

    Raises:
        StorageError: the directory cannot be written, or does not take this backend's kind of access (errno in `UNSUPPORTED`).
    """

    flags: int = 0  # of open, beside those that all have
    hint: str = ""  # ends the message where the filesystem does not support this backend

    def __init__(self, directory: str | os.PathLike[str], *, named: bool = False) -> None:
        super().__init__()
        self.directory = Path(directory).absolute()
        self.path = str(self.directory)
        self._scratch: Scratch | None = None
        self._fd = -1
        try:
            if not self.directory.parent.is_dir():
                raise self._failed("opening", errno.ENOENT, f"{self.directory.parent} does not exist; make it, or give another directory")
            with contextlib.suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
                _log.warning(
                    "%s did not exist and was made, on the drive of %s; is a drive not mounted?", self.directory, self.directory.parent
                )
            remove_orphans(self.directory)
            if not named:
                self._fd = self._open_unnamed()
            if self._fd < 0:
                self._scratch = Scratch(self.directory)
                self._fd = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | self.flags, 0o600)
            self.path = f"{self.directory} (unnamed, {self.file})" if self._scratch is None else str(self.file)
            self._start()
            self._probe()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise self._refused(error.errno or errno.EIO) from error
            if isinstance(error, StorageError) and error.errno in UNSUPPORTED:
                raise self._refused(error.errno) from error
            raise

    @property
    def file(self) -> Path:
        """The file while it is open; an unnamed one is reached through its descriptor, in this process only."""
        return Path(f"/proc/self/fd/{self._fd}") if self._scratch is None else self._scratch.path / "swap"

    def fileno(self) -> int:
        return self._fd

    def sync(self) -> None:
        with self._open("swap file"):
            try:
                getattr(os, "fdatasync", os.fsync)(self._fd)
            except OSError as error:
                raise self._failed("sync", error.errno or errno.EIO) from error

    def _open_unnamed(self) -> int:
        """A descriptor, -1 where there are no unnamed files."""
        try:
            return os.open(self.directory, os.O_RDWR | os.O_TMPFILE | os.O_EXCL | os.O_CLOEXEC | self.flags, 0o600)
        except (OSError, AttributeError) as error:  # systems other than Linux have no O_TMPFILE
            code = getattr(error, "errno", errno.EOPNOTSUPP)
            if code in (*UNSUPPORTED, errno.EISDIR, errno.ENOENT) and self.directory.is_dir():
                return -1
            raise

    def _start(self) -> None:
        """What a backend needs beside the open file."""

    def _failed(self, action: str, code: int, why: str = "") -> StorageError:
        return StorageError(action, name="swap file", path=self.path, offset=0, wanted=0, got=0, errno=code, why=why)

    def _refused(self, code: int, why: str = "") -> StorageError:
        hint = self.hint if code in UNSUPPORTED else f"; {_REMEDIES[code]}" if code in _REMEDIES else ""
        return self._failed("opening", code, (why or os.strerror(code)) + hint)

    def _probe(self) -> None:
        """Write and read a page for real: opening alone proves nothing. Where that is too small for `O_DIRECT`, it is EINVAL."""
        page, want = aligned_buffer(PAGE_NBYTES, b"\xa5"), b"\xa5" * PAGE_NBYTES
        self._grow(0, PAGE_NBYTES, "probe")
        self.move("write", 0, page, name="probe")
        page[:] = bytes(PAGE_NBYTES)
        self.move("read", 0, page, name="probe")
        if page != want:
            raise self._refused(errno.EIO, "what was read back is not what was written")

    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        try:
            try:
                self._allocate(offset, nbytes)
            except (OSError, AttributeError) as error:  # not every filesystem and system can
                if getattr(error, "errno", errno.ENOSYS) not in UNSUPPORTED:
                    raise
                zeros = aligned_buffer(_ZEROS_NBYTES)
                for at in range(offset, offset + nbytes, _ZEROS_NBYTES):
                    self.move("reserve", at, zeros[: offset + nbytes - at], name=name)
        except OSError as error:
            with contextlib.suppress(OSError):  # give back what was allocated before it failed
                os.ftruncate(self._fd, offset)
            code = error.errno or errno.EIO
            raise StorageError("reserve", name=name, path=self.path, offset=offset, wanted=nbytes, got=0, errno=code) from error

    def _allocate(self, offset: int, nbytes: int) -> None:
        os.posix_fallocate(self._fd, offset, nbytes)

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        if self._scratch is not None:
            self._scratch.remove()
