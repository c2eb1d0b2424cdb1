"""What a path lies on."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import psutil

__all__ = ["Filesystem", "filesystem_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Filesystem:
    """A mount: its type (`"ext4"`), device, mount point and options as the kernel gives them."""

    type: str
    device: str
    mount_point: str
    options: tuple[str, ...]

    @property
    def is_memory(self) -> bool:
        """Files there are RAM, so they count against it."""
        return self.type in ("tmpfs", "ramfs", "devtmpfs")


def filesystem_of(path: str | os.PathLike[str]) -> Filesystem:
    """The mount that holds `path`, or would: it need not exist. The type is `"unknown"` where the system does not tell."""
    real = Path(path).resolve()
    found = Filesystem("unknown", "", "/", ())
    for mount in psutil.disk_partitions(all=True):
        deeper = len(Path(mount.mountpoint).parts) >= len(Path(found.mount_point).parts)  # the later of two on one place is on top
        if deeper and real.is_relative_to(mount.mountpoint):
            found = Filesystem(mount.fstype, mount.device, mount.mountpoint, tuple(mount.opts.split(",")))
    return found
