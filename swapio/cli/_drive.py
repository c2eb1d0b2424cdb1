"""The drives below a filesystem, as `/sys` shows them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Drive", "drives_of"]

_VIRTUAL_PATHS = ("/virtio", "/vbd-", "/devices/virtual/")
_VIRTUAL_MODELS = ("qemu", "virtual", "vbox", "msft", "persistentdisk", "persistent_disk", "elastic block store")


@dataclasses.dataclass(frozen=True, slots=True)
class Drive:
    """A whole drive: its name (`"nvme0n1"`) and model, empty where it does not tell, and whether it is one that software makes."""

    name: str
    model: str
    rotational: bool
    is_virtual: bool

    @property
    def spins(self) -> bool | None:
        """Whether it is a spinning disk; `None` for a virtual drive, whose word means nothing."""
        return None if self.is_virtual else self.rotational

    @property
    def is_memory(self) -> bool:
        """It is a part of RAM."""
        return self.name.startswith(("zram", "ram"))


def drives_of(device: int, *, root: Path = Path("/")) -> list[Drive]:
    """The drives that a block device (as in `st_dev`) lies on, through partitions, LVM, encryption and RAID.

    Empty where there are none: filesystems of a network or in memory, and those that have no single device, like btrfs and overlay.
    `root` is where `sys` is.
    """
    return [_drive(block) for block in _wholes(root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}")]


def _wholes(block: Path) -> Iterator[Path]:
    block = block.resolve()
    if (block / "partition").exists():
        block = block.parent
    below = sorted((block / "slaves").glob("*"))
    for other in below:
        yield from _wholes(other)
    if not below and (block / "queue").is_dir():
        yield block


def _drive(block: Path) -> Drive:
    model = _read(block / "device/model") or _read(block / "device/name")  # name: memory cards
    path = str(block)
    virtual = any(part in path for part in _VIRTUAL_PATHS) and "/nvme-subsystem/" not in path  # where real ones with several paths are
    virtual = virtual or any(word in model.lower() for word in _VIRTUAL_MODELS)
    return Drive(block.name, model, _read(block / "queue/rotational") == "1", virtual)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
