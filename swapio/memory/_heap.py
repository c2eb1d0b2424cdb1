"""The C library's heap."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["trim_heap"]


def trim_heap() -> None:
    """Give the pages of values just dropped back to the system: glibc keeps what lies between blocks in use."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
