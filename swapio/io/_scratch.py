"""The folder for swap files that need a name, and its removal after any kind of death.

`<path>/swapio-<uid>/<pid>-<start time>-<n>/`: mode 0700, owned by us, never reached through a link, with a file `lock` that its process
keeps locked. A later start by the same user removes those whose owner is gone: no process has that number and start time (one in another
container or on another host cannot be seen), and nobody holds the lock (which can be seen from there). Nothing else is ever removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
from pathlib import Path

import psutil

from ..errors import StorageError

__all__ = ["Scratch", "is_private_folder", "remove_orphans", "scratch_root"]

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)")
_counter = itertools.count()
_LOCK_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class Scratch:
    """A new folder of this process below `directory`, at `path`.

    Raises:
        StorageError: a name of ours is taken by something that is not ours; OSError: `directory` cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        root = scratch_root(directory)
        while True:
            with contextlib.suppress(FileExistsError):
                root.mkdir(mode=0o700)
            if is_private_folder(root) is False:
                why = "it exists but is no folder of this user alone; remove or rename it"
                raise StorageError("opening", name="swap folder", path=str(root), offset=0, wanted=0, got=0, errno=errno.EEXIST, why=why)
            self.path = root / f"{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"
            with contextlib.suppress(FileNotFoundError):  # somebody just removed the empty root
                self.path.mkdir(mode=0o700)
                break
        self._owner = os.getpid()
        try:
            self._lock = os.open(self.path / "lock", _LOCK_FLAGS | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            _remove(self.path)
            raise
        with contextlib.suppress(OSError):  # a filesystem without locks: the process tells alone
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove the folder and the plain files in it; the root too when it is empty. In a forked child only let go of it."""
        os.close(self._lock)
        if os.getpid() == self._owner:
            _remove(self.path)


def remove_orphans(directory: Path) -> list[Path]:
    """Remove our user's folders below `directory` whose process is gone; returns them."""
    removed = []
    with contextlib.suppress(OSError):
        root = scratch_root(directory)
        for entry in sorted(root.iterdir()) if is_private_folder(root) else []:
            match = _NAME.fullmatch(entry.name)
            if match and is_private_folder(entry) and _start_time(int(match[1])) != int(match[2]) and not _is_locked(entry / "lock"):
                _remove(entry)
                removed.append(entry)
    return removed


def scratch_root(directory: Path) -> Path:
    """The folder of this user below `directory`, in which each process makes its own. It need not exist."""
    return directory / f"swapio-{os.getuid()}"


def is_private_folder(path: Path) -> bool | None:
    """A folder, no link, that nobody else can write to: what is below it cannot change under us. `None` when there is nothing."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return None


def _start_time(pid: int) -> int | None:
    """When a process started, in a unit that does not change with the clock; `None` when it is gone."""
    if not os.path.isdir("/proc/self"):
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(pid).create_time())
        return None
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        status, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[18]) if status not in "ZX" else None
    return None


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, _LOCK_FLAGS)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(fd)
    return False


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        path.rmdir()
        path.parent.rmdir()
