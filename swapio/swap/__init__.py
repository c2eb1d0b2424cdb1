"""A tiered store of tensors: records that rest on NVMe, in host memory or on the device and come when they are used."""

from ._ahead import Prefetcher
from ._aside import Kept
from ._auto import HostMemory, auto_host_memory, host_memory
from ._cgroup import CgroupMemory, cgroup_cpus, cgroup_memory
from ._in_file import FileMap, FilePart, file_part
from ._manager import Acquisition, RecordLease, SwapManager
from ._open import manager_arguments, open_manager
from ._record import MAY_START, Place, Record, Residency, TensorSpec
from ._transfer import Transfer

__all__ = [
    "MAY_START",
    "Acquisition",
    "CgroupMemory",
    "FileMap",
    "FilePart",
    "HostMemory",
    "Kept",
    "Place",
    "Prefetcher",
    "Record",
    "RecordLease",
    "Residency",
    "SwapManager",
    "TensorSpec",
    "Transfer",
    "auto_host_memory",
    "cgroup_cpus",
    "cgroup_memory",
    "file_part",
    "host_memory",
    "manager_arguments",
    "open_manager",
]
