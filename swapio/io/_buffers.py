"""Bytes in memory, as transfers need them."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

import numpy as np

from ..spec import PAGE_NBYTES, round_up

__all__ = ["aligned_buffer", "copy_bytes", "read_through_pages"]

_PAGES_NBYTES = 4 << 20
_here = threading.local()  # each thread's own memory to copy from


def aligned_buffer(nbytes: int, fill: bytes = b"") -> memoryview:
    """Writable bytes at a page boundary, `nbytes` rounded up to a page: zeros, or `fill` repeated."""
    length = round_up(nbytes, PAGE_NBYTES)
    view = memoryview(mmap.mmap(-1, max(length, PAGE_NBYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:length]
    if fill:
        view[:] = (fill * (length // len(fill) + 1))[:length]
    return view


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """`target[:] = source` without the interpreter's lock."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def read_through_pages(read: Callable[[int, memoryview], int], offset: int, buffer: memoryview, *, alignment: int) -> int:
    """Fill the first bytes of `buffer` from any byte on of what is read in whole pages; how many, 0 at the end.

    Args:
        read: fills memory at a page boundary from a multiple of `alignment` on, and returns the bytes it read.
    """
    if not hasattr(_here, "pages"):
        _here.pages = aligned_buffer(_PAGES_NBYTES)
    first = offset // alignment * alignment
    nbytes = min(buffer.nbytes, _PAGES_NBYTES - (offset - first))
    found = min(read(first, _here.pages[: round_up(offset + nbytes, alignment) - first]) - (offset - first), nbytes)
    if found <= 0:
        return 0
    copy_bytes(buffer[:found], _here.pages[offset - first :][:found])
    return found
