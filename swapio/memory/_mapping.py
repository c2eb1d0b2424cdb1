"""Page-aligned memory straight from the system, and tensors that tell when the last view of it is gone.

[Note: The life of a storage]
A tensor over a mapping is made with `torch.frombuffer` over an *exporter*, a small ctypes array at the mapping's address. PyTorch keeps
the exporter alive exactly as long as the storage, and everything that can reach the bytes keeps the storage: views, `.data`, what a graph
saved, NumPy arrays made from a tensor, DLPack capsules, `untyped_storage()`. So `weakref.finalize` on the exporter is the moment when
nobody can reach the bytes any more.

The exporter itself must not hold the mapping (a view of the mmap's buffer would, and make `mmap.close` fail while the exporter is still
being torn down, just after the finalizer ran). The finalizer's argument holds it instead: the registry of `weakref` keeps the mapping
until the exporter is dead.

PyTorch's reference to the exporter is invisible to the garbage collector, so the collector never takes the exporter apart early; it dies
by reference count when the storage does. That can be in any thread and inside a collection, so a finalizer takes no lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Callable

import torch

__all__ = ["Mapping"]

_HUGE_NBYTES = 2 * 2**20


class Mapping:
    """`nbytes` bytes, a multiple of 4096, zeroed and private to the process; unmapped when nobody refers to it or by `close`.

    Raises:
        OSError: the system refuses.
    """

    __slots__ = ("address", "memory", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if nbytes >= _HUGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)

    def tensor(self, nbytes: int, died: Callable[[Mapping], None]) -> torch.Tensor:
        """A new tensor over the first `nbytes` bytes, uint8 `[nbytes]`, with a storage of its own.

        `died(self)` is called once, when that storage is gone: from any thread, also inside a garbage collection, never at exit.
        """
        exporter = (ctypes.c_ubyte * self.nbytes).from_address(self.address)
        weakref.finalize(exporter, died, self).atexit = False
        with torch.inference_mode(False):
            if nbytes == 0:  # frombuffer refuses
                return torch.frombuffer(exporter, dtype=torch.uint8)[:0]
            return torch.frombuffer(exporter, dtype=torch.uint8, count=nbytes)

    def close(self) -> None:
        """Give the bytes back to the system. No tensor over them may be alive."""
        try:
            self.memory.close()
        except BufferError:
            # Somebody still refers to a memoryview of it (a traceback, a thread's last job): the pages go now, the addresses with it.
            self.memory.madvise(mmap.MADV_DONTNEED)
