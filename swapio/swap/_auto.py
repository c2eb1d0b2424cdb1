"""How much host memory this process may take, from what the machine and its control group leave free."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import psutil

from ._cgroup import CgroupMemory, cgroup_memory

__all__ = ["HostMemory", "auto_host_memory", "host_memory"]

_SHARE = 0.8  # the rest is for activations, the allocator and other programs


@dataclasses.dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory that the machine has, that are available now, and the tightest control group's limit."""

    total_nbytes: int
    available_nbytes: int
    cgroup: CgroupMemory | None

    @property
    def free_nbytes(self) -> int:
        """What this process can still take."""
        return min(self.available_nbytes, self.cgroup.left_nbytes) if self.cgroup is not None else self.available_nbytes

    @property
    def auto_nbytes(self) -> int:
        """What `host_memory="auto"` takes: 0.8 of `free_nbytes`."""
        return int(self.free_nbytes * _SHARE)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The memory of this machine, with the control groups below `root`."""
    memory = psutil.virtual_memory()
    return HostMemory(int(memory.total), int(memory.available), cgroup_memory(root))


def auto_host_memory() -> int:
    """Bytes: 0.8 of the smaller of available memory and what the control groups (v2 or v1) have left."""
    return host_memory().auto_nbytes
