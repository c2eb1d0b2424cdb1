"""The contract between the store and whatever holds its bytes."""

from __future__ import annotations

import abc
import ctypes
import errno
import threading
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Self

from ..errors import ClosedError, StorageError
from ..spec import Extent, round_up
from ._extents import ExtentAllocator

__all__ = ["MAX_TRANSFER_NBYTES", "Storage", "transfer_all"]

MAX_TRANSFER_NBYTES = 1 << 30
"""One system call moves at most 2,147,479,552 bytes on Linux; transfers above this are split."""


class Storage(abc.ABC):
    """Reserved bytes at offsets, read and written from the caller's buffers. Blocking; any thread, several at once.

    Attributes:
        kind: the backend's name.
        alignment: of the address, the offset and the length of every transfer, in bytes.
        path: where the bytes are, for messages.

    Two transfers of the same bytes at once, one of them a write, are the caller's to avoid.
    """

    kind: ClassVar[str]
    alignment: int = 1
    path: str

    def __init__(self) -> None:
        self._extents = ExtentAllocator()
        self._lock = threading.Lock()
        self._closed = False

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        """Allocate at least `nbytes` (rounded up to the alignment) for real; the content is undefined.

        Raises:
            StorageError: no room (ENOSPC), above a limit (EFBIG) or the quota; nothing is reserved then.
        """
        nbytes = round_up(nbytes, self.alignment)
        with self._lock:
            self._check_open(name)
            end = self._extents.end
            extent = self._extents.take(nbytes)
            if self._extents.end > end:
                try:
                    self._grow(end, nbytes, name)
                except BaseException:
                    self._extents.end = end
                    raise
            return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back; later ones may reuse it."""
        with self._lock:
            if not self._closed:
                self._extents.give_back(extent)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes handed out and not given back."""
        with self._lock:
            return self._extents.end - self._extents.free_nbytes

    def read(self, offset: int, buffer: memoryview, *, name: str) -> None:
        """Fill the whole buffer from `offset`.

        Raises:
            StorageError: the read failed or came up short, with how far it got; ValueError: misaligned; ClosedError.
        """
        self._check(offset, buffer, name)
        transfer_all(self._read_some, "read", offset, buffer, name, self.path)

    def write(self, offset: int, buffer: memoryview, *, name: str) -> None:
        """Write the whole buffer at `offset`; errors as for `read`."""
        self._check(offset, buffer, name)
        transfer_all(self._write_some, "write", offset, buffer, name, self.path)

    @abc.abstractmethod
    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        """Allocate the range at the end of the space; StorageError if it cannot be had."""

    @abc.abstractmethod
    def _read_some(self, offset: int, buffer: memoryview) -> int:
        """One transfer; returns the bytes moved, 0 at the end of the file; OSError."""

    @abc.abstractmethod
    def _write_some(self, offset: int, buffer: memoryview) -> int:
        """One transfer; returns the bytes moved; OSError."""

    @abc.abstractmethod
    def sync(self) -> None:
        """Return when what was written before is durable."""

    def close(self) -> None:
        """Give everything up, the file included. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._release()

    @abc.abstractmethod
    def _release(self) -> None:
        """Close for real; called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_open(self, name: str) -> None:
        if self._closed:
            raise ClosedError(f"the storage at {self.path} is closed; {name!r} cannot be reached")

    def _check(self, offset: int, buffer: memoryview, name: str) -> None:
        self._check_open(name)
        if not buffer.contiguous or buffer.itemsize != 1:
            raise ValueError(f"{name!r}: the buffer must be contiguous bytes, not {buffer.format!r} with strides {buffer.strides}")
        align = self.alignment
        wrong = [f"{what} {n}" for what, n in (("offset", offset), ("length", buffer.nbytes)) if n % align or n < 0]
        if align > 1 and buffer.nbytes and not buffer.readonly:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            wrong += [f"address {address:#x}"] if address % align else []
        if wrong:
            raise ValueError(f"{name!r}: {' and '.join(wrong)} must be a multiple of {align} for the {self.kind} backend")


def transfer_all(some: Callable[[int, memoryview], int], action: str, offset: int, buffer: memoryview, name: str, path: str) -> None:
    """Repeat `some(offset, buffer) -> moved` until the buffer is done; short transfers go on where they ended.

    Raises:
        StorageError: `some` raised OSError, or moved nothing (the end of the file: EIO).
    """
    done = 0
    while done < buffer.nbytes:
        try:
            moved = some(offset + done, buffer[done : done + MAX_TRANSFER_NBYTES])
        except InterruptedError:
            continue
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(
                action, name=name, path=path, offset=offset, wanted=buffer.nbytes, got=done, errno=error.errno or errno.EIO
            ) from error
        if moved <= 0:
            raise StorageError(
                action, name=name, path=path, offset=offset, wanted=buffer.nbytes, got=done, why="the file ends here (was it truncated?)"
            )
        done += moved
