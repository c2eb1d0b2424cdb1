"""Bytes between buffers and files. No torch, no policy."""

from ._aiofiles import AiofilesStorage
from ._buffers import aligned_buffer
from ._cache import cached_nbytes, drop_cache, read_as_told
from ._checksum import ChecksummedStorage
from ._direct import DirectStorage
from ._extents import ExtentAllocator
from ._file import FileStorage
from ._filesystem import Filesystem, filesystem_of
from ._lent import LentExtent
from ._memory import MemoryStorage
from ._mmap import MmapStorage
from ._read_only import ReadOnlyFile
from ._scratch import Scratch, is_private_folder, remove_orphans, scratch_root
from ._select import BACKENDS, FILE_BACKENDS, open_storage
from ._storage import MAX_TRANSFER_NBYTES, Choice, LocalStorage, Some, Storage
from ._striped import StripedStorage, measure_speeds
from ._threads import Done, IOThreads
from ._wrapper import WrapperStorage

__all__ = [
    "BACKENDS",
    "FILE_BACKENDS",
    "MAX_TRANSFER_NBYTES",
    "AiofilesStorage",
    "ChecksummedStorage",
    "Choice",
    "DirectStorage",
    "Done",
    "ExtentAllocator",
    "FileStorage",
    "Filesystem",
    "IOThreads",
    "LentExtent",
    "LocalStorage",
    "MemoryStorage",
    "MmapStorage",
    "ReadOnlyFile",
    "Scratch",
    "Some",
    "Storage",
    "StripedStorage",
    "WrapperStorage",
    "aligned_buffer",
    "cached_nbytes",
    "drop_cache",
    "filesystem_of",
    "is_private_folder",
    "measure_speeds",
    "open_storage",
    "read_as_told",
    "remove_orphans",
    "scratch_root",
]
