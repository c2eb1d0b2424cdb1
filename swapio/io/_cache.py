"""A file and the page cache: the proof that bytes came from the drive, and when they go there."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np

from ..spec import round_up

__all__ = ["cached_nbytes", "drop_cache", "read_as_told"]


def cached_nbytes(fd: int, nbytes: int) -> int | None:
    """How many of the first `nbytes` bytes of an open file are in memory, by `mincore(2)`; `None` where that cannot be told."""
    nbytes = min(nbytes, os.fstat(fd).st_size)
    if not nbytes:
        return 0
    with contextlib.suppress(OSError, AttributeError), mmap.mmap(fd, nbytes, prot=mmap.PROT_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        resident = np.zeros(round_up(nbytes, mmap.PAGESIZE) // mmap.PAGESIZE, np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data)
        )
        del view  # else the mapping cannot be closed
        return None if failed else int((resident & 1).sum()) * mmap.PAGESIZE
    return None


def drop_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Take a range of a file (of 0 bytes: to its end) out of the page cache.

    What is not yet durable stays, so sync before; the drive begins to write it, and nobody waits.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def read_as_told(fd: int) -> None:
    """Have the system read nothing of a file but what it is told to: for who skips large parts, and reads ahead himself."""
    with contextlib.suppress(OSError, AttributeError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
