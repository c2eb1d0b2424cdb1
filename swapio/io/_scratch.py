"""The folder for swap files that need a name, and its removal after any kind of death.

`<path>/swapio-<uid>/<pid>-<start time>-<n>/`: mode 0700, owned by us, never reached through a link. A later start by the same user removes
those whose owner is gone; the start time tells a dead owner from a new process with its number. Nothing else is ever removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import stat
from pathlib import Path

import psutil

from ..errors import StorageError

__all__ = ["make_scratch", "remove_orphans", "remove_scratch"]

_NAME = re.compile(r"(\d+)-(\d+)-(\d+)")
_counter = itertools.count()


def _start_time(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).create_time() * 1000)
    except psutil.Error:
        return None


def _checked_directory(path: Path, action: str) -> None:
    """Make `path` (0700) or check that it is ours."""
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        found = path.lstat()
    except OSError as error:
        raise StorageError(action, name=path.name, path=str(path), offset=0, wanted=0, got=0, errno=error.errno or 5) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StorageError(
            action, name=path.name, path=str(path), offset=0, wanted=0, got=0, why="it exists but is no folder of this user; remove or rename it"
        )


def make_scratch(directory: Path) -> Path:
    """A new folder of this process below `directory`.

    Raises:
        StorageError: `directory` cannot be written, or a name of ours is taken by something that is not ours.
    """
    root = directory / f"swapio-{os.getuid()}"
    _checked_directory(root, "making the swap folder")
    remove_orphans(directory)
    path = root / f"{os.getpid()}-{_start_time(os.getpid())}-{next(_counter)}"
    _checked_directory(path, "making the swap folder")
    return path


def remove_scratch(path: Path) -> None:
    """Remove a folder of `make_scratch` and the plain files in it; the root too when it is empty."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(path):
            if entry.is_file(follow_symlinks=False):
                os.unlink(entry.path)
        path.rmdir()
        path.parent.rmdir()


def remove_orphans(directory: Path) -> list[Path]:
    """Remove our user's folders below `directory` whose process is gone; returns them."""
    root = directory / f"swapio-{os.getuid()}"
    removed = []
    with contextlib.suppress(OSError):
        if root.is_symlink():
            return []
        for entry in sorted(root.iterdir()):
            match = _NAME.fullmatch(entry.name)
            if match and not entry.is_symlink() and entry.is_dir() and _start_time(int(match[1])) != int(match[2]):
                remove_scratch(entry)
                removed.append(entry)
    return removed
