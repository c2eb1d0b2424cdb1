"""A tiered store of tensors: records that rest on NVMe, in host memory or on the device and come when they are used."""

from ._auto import auto_host_memory
from ._manager import Acquisition, RecordLease, SwapManager
from ._record import MAY_START, Place, Record, Residency, TensorSpec
from ._transfer import Transfer

__all__ = [
    "MAY_START",
    "Acquisition",
    "Place",
    "Record",
    "RecordLease",
    "Residency",
    "SwapManager",
    "TensorSpec",
    "Transfer",
    "auto_host_memory",
]
