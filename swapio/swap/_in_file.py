"""Tensors over the bytes of a file, and where those bytes are.

[Note: Mapped until taken over] A mapped tensor costs memory only while it is looked at, and can be used, written (the pages written are
this process's own) and wrapped in parameters like any other. Who takes it over reads the file itself, past the mapping: a page behind the
end of a file that became shorter is SIGBUS, a read of it is an error.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from ..io import ReadOnlyFile, Storage
from ..spec import PAGE_NBYTES, round_up

__all__ = ["FileMap", "FilePart", "file_part"]

_PARTS: dict[int, FilePart] = {}  # by the address of the storage
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # else the system refuses a file that is larger than the memory


@dataclasses.dataclass(frozen=True, slots=True)
class FilePart:
    """The bytes of a tensor in a file."""

    file: Storage
    offset: int
    nbytes: int
    name: str

    def slice(self, start: int, nbytes: int) -> FilePart:
        return dataclasses.replace(self, offset=self.offset + start, nbytes=nbytes)


class FileMap:
    """A file of `nbytes`, mapped privately as long as one of its tensors is alive.

    Raises:
        StorageError: it cannot be opened; OSError: or not be mapped.
    """

    def __init__(self, path: Path) -> None:
        self._file = ReadOnlyFile(path)
        self._memory = mmap.mmap(self._file.fileno(), 0, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        self.nbytes = len(self._memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int], *, name: str) -> torch.Tensor:
        """The tensor at byte `offset`, of at least one element, with a storage of its own: one at a time of the same bytes."""
        nbytes = math.prod(shape) * dtype.itemsize
        address = self._address + offset
        exporter = (ctypes.c_ubyte * nbytes).from_address(address)  # lives as the storage does, see [Note: The life of a storage]
        _PARTS[address] = FilePart(self._file, offset, nbytes, name)
        first, last = round_up(offset, PAGE_NBYTES), (offset + nbytes) // PAGE_NBYTES * PAGE_NBYTES
        weakref.finalize(exporter, _unmap, address, self._memory, first, last - first).atexit = False
        with torch.inference_mode(False):
            return torch.frombuffer(exporter, dtype=dtype).view(tuple(shape))


def _unmap(address: int, memory: mmap.mmap, start: int, nbytes: int) -> None:
    """Nobody looks at these bytes any more: the pages that are only theirs go."""
    _PARTS.pop(address, None)
    if nbytes > 0:
        memory.madvise(mmap.MADV_DONTNEED, start, nbytes)


def file_part(tensor: torch.Tensor) -> FilePart | None:
    """Where the bytes of a tensor came from, if it shows all of a mapped one; some of them may have been written since."""
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.storage_offset():
        return None
    part = _PARTS.get(tensor.untyped_storage().data_ptr())
    return part if part is not None and part.nbytes == tensor.nbytes else None
