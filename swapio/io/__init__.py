"""Bytes between buffers and files. No torch, no policy."""

from ._direct import DirectStorage
from ._extents import ExtentAllocator
from ._memory import MemoryStorage
from ._scratch import make_scratch, remove_orphans, remove_scratch
from ._select import BACKENDS, open_storage
from ._storage import MAX_TRANSFER_NBYTES, Storage, transfer_all
from ._threads import Done, IOThreads

__all__ = [
    "BACKENDS",
    "MAX_TRANSFER_NBYTES",
    "DirectStorage",
    "Done",
    "ExtentAllocator",
    "IOThreads",
    "MemoryStorage",
    "Storage",
    "make_scratch",
    "open_storage",
    "remove_orphans",
    "remove_scratch",
    "transfer_all",
]
