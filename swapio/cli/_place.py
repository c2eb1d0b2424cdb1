"""Where swap files may go when nobody said: the local drive with the most room."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import psutil

from ..errors import ConfigError
from ..spec import format_nbytes
from ._drive import drives_of

__all__ = ["KEPT_FREE_NBYTES", "NOT_A_DRIVE", "NOT_LOCAL", "STATE_NBYTES", "Place", "pick_directory", "places"]

KEPT_FREE_NBYTES = 1 << 30
"""What a run leaves free on the drive."""

STATE_NBYTES = 12
"""AdamW's per parameter, for both dtypes: weight 2 and lower half of the master 2, or fp32 weight 4; both moments 8."""

NOT_LOCAL = ("9p", "afs", "ceph", "cifs", "fuse", "gfs", "glusterfs", "gpfs", "lustre", "nfs", "smb", "virtiofs")
NOT_A_DRIVE = ("cgroup", "devpts", "devtmpfs", "efivarfs", "mqueue", "proc", "ramfs", "rootfs", "squashfs", "sysfs", "tmpfs", "vfat")


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A writable directory on a local filesystem."""

    path: Path
    filesystem: str
    free_nbytes: int
    spins: bool

    def __str__(self) -> str:
        return f"{self.path} ({self.filesystem}{', a spinning disk' if self.spins else ''}, {format_nbytes(self.free_nbytes)} free)"


def places(candidates: Iterable[Path] | None = None) -> list[Place]:
    """The first writable candidate on each local drive, best first: drives that do not spin, then by free space.

    Args:
        candidates: directories; default: the working directory, the temporary ones, the home directory and every mount point.
    """
    mounts = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    if candidates is None:
        names = (".", os.environ.get("TMPDIR", "/tmp"), "/var/tmp", os.path.expanduser("~"), *mounts)  # each may be full or not there
        candidates = map(Path, names)
    found: dict[int, Place] = {}
    for candidate in candidates:
        with contextlib.suppress(OSError):  # a mount may hang by a thread; it is not the one then
            path = candidate.resolve()
            device = _device(path)
            kind = next((mounts[str(p)] for p in (path, *path.parents) if str(p) in mounts), "unknown")
            if kind.startswith((*NOT_LOCAL, *NOT_A_DRIVE)) or not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
                continue
            if device not in found:
                found[device] = Place(path, kind, shutil.disk_usage(path).free, _spins(device))
    return sorted(found.values(), key=lambda p: (p.spins, -p.free_nbytes))


def pick_directory(nbytes: int, candidates: Iterable[Path] | None = None) -> tuple[Place, str]:
    """The best place with room for `nbytes`, and why it is the best.

    Raises:
        ConfigError: no local drive has the room.
    """
    found = places(candidates)
    fitting = [p for p in found if p.free_nbytes >= nbytes + KEPT_FREE_NBYTES]
    if not fitting:
        best = max(found, key=lambda p: p.free_nbytes, default=None)
        most = (
            f"the most free on a local drive is {format_nbytes(best.free_nbytes)}, in {best.path}" if best else "no local drive is writable"
        )
        raise ConfigError(
            f"--nvme-path: {format_nbytes(nbytes)} and {format_nbytes(KEPT_FREE_NBYTES)} to spare are needed, but {most}; "
            "free some space, use fewer --layers, or give a directory with --nvme-path",
            key="nvme_path",
        )
    others = len(found) - 1
    return fitting[0], f"of {others + 1} local drives the one with the most room" if others else "the only local drive that can be written"


def _device(path: Path) -> int:
    return path.stat().st_dev


def _spins(device: int) -> bool:
    return any(drive.spins for drive in drives_of(device))
