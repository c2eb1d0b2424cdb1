"""Bytes in memory, as transfers need them."""

from __future__ import annotations

import mmap

import numpy as np

from ..spec import PAGE_NBYTES, round_up

__all__ = ["aligned_buffer", "copy_bytes"]


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
