"""What the control groups of this process, v2 or v1, let it have.

A limit holds for all groups below, so the own group and everything above it are read. In a container the path of the own group may be the
host's, of which only the upper end is mounted; what is not there is passed over.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["CgroupMemory", "cgroup_cpus", "cgroup_memory"]

_NO_LIMIT = 1 << 60  # v1 writes the largest number of pages
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupMemory:
    """A limit in bytes, and what is used of it; page cache that the kernel drops when it needs the room does not count as used."""

    folder: Path
    limit_nbytes: int
    used_nbytes: int

    @property
    def left_nbytes(self) -> int:
        return max(self.limit_nbytes - self.used_nbytes, 0)


def cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """The group with the least memory left, `None` where there is no limit. `root` is where `proc` and `sys` are."""
    found = []
    for folder in _folders("memory", root):
        for limit_file, used_file, cache in _MEMORY_FILES:
            with contextlib.suppress(OSError, ValueError):  # "max" is no number
                limit, used = (int((folder / name).read_text()) for name in (limit_file, used_file))
                if limit < _NO_LIMIT:
                    found.append(CgroupMemory(folder, limit, max(used - _stat(folder, cache), 0)))
    return min(found, key=lambda group: group.left_nbytes, default=None)


def cgroup_cpus(root: Path = Path("/")) -> float | None:
    """How many processors' time the groups let this process take, for example 1.5; `None` where there is no limit."""
    found = []
    for folder in _folders("cpu", root):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
                if quota > 0:
                    found.append(quota / period)
    return min(found, default=None)


def _folders(controller: str, root: Path) -> Iterator[Path]:
    mounts = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            path = PurePosixPath("/" if ".." in own else own).relative_to("/")  # ..: above what this namespace sees
            for base in [mounts / controller] if controllers else [mounts, mounts / "unified"]:
                yield from (base / part for part in (path, *path.parents))


def _stat(folder: Path, key: str) -> int:
    lines = (folder / "memory.stat").read_text().splitlines()
    return next((int(value) for name, value in map(str.split, lines) if name == key), 0)
