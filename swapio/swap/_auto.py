"""How much host memory this process may take, from what the machine and its control group leave free."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch.distributed

from ..spec import format_nbytes, parse_nbytes
from ._cgroup import CgroupMemory, cgroup_memory

__all__ = ["HostMemory", "auto_host_memory", "host_capacity", "host_memory", "num_local_ranks"]

_log = logging.getLogger("swapio")

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
    def most_nbytes(self) -> int:
        """What this process could ever have, were nothing else there."""
        return min(self.total_nbytes, self.cgroup.limit_nbytes) if self.cgroup is not None else self.total_nbytes

    @property
    def auto_nbytes(self) -> int:
        """What `host_memory="auto"` takes for all ranks of this machine together: 0.8 of `free_nbytes`."""
        return int(self.free_nbytes * _SHARE)


def host_memory(root: Path = Path("/")) -> HostMemory:
    """The memory of this machine, with the control groups below `root`."""
    memory = psutil.virtual_memory()
    return HostMemory(int(memory.total), int(memory.available), cgroup_memory(root))


def num_local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """How many ranks share this machine, by what their launcher says; without its word all ranks there are, as if all were here."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):  # torchrun, Open MPI, MPICH
        if environ.get(name, "").isdecimal():
            return max(int(environ[name]), 1)
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def auto_host_memory() -> int:
    """Bytes: this rank's part of 0.8 of the smaller of available memory and what the control groups (v2 or v1) have left."""
    return host_memory().auto_nbytes // num_local_ranks()


def host_capacity(wanted: int | str, memory: HostMemory | None = None) -> int:
    """The bytes of a setting of `host_memory`, "auto" included; a warning if the machine, `memory`, has not so many.

    Raises:
        ConfigError: it is no size.
    """
    if wanted == "auto":
        return auto_host_memory()
    nbytes, memory = parse_nbytes(wanted, key="host_memory"), memory or host_memory()
    if nbytes > memory.most_nbytes:  # no error: memory is taken as it is used, and the records may be few
        whose = "the machine" if memory.cgroup is None or memory.most_nbytes == memory.total_nbytes else f"the group {memory.cgroup.folder}"
        works = memory.auto_nbytes // num_local_ranks() >> 20
        _log.warning(
            "host_memory: %s is more than %s of %s; the process may be killed. Use \"auto\", or now for example \"%dMiB\"",
            format_nbytes(nbytes), format_nbytes(memory.most_nbytes), whose, works,
        )  # fmt: skip
    return nbytes
