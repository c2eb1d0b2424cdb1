"""The contract between the store and whatever holds its bytes."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import errno
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import ClosedError, StorageError
from ..spec import PAGE_NBYTES, Extent, round_up
from ._extents import ExtentAllocator

__all__ = ["MAX_TRANSFER_NBYTES", "Choice", "LocalStorage", "Some", "Storage"]

MAX_TRANSFER_NBYTES = 1 << 30
"""One system call moves at most 2,147,479,552 bytes on Linux; transfers above this are split."""

Some = Callable[[int, memoryview, str], int]
"""One attempt of a transfer: `(offset, buffer, name) -> bytes moved`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which backend serves a storage, why, and on what filesystem (its type, for example `"ext4"`; `"memory"` for none)."""

    backend: str
    reason: str
    filesystem: str


class Storage(abc.ABC):
    """Reserved bytes at offsets, read and written from the caller's buffers. Blocking; any thread, several at once.

    Attributes:
        kind: the backend's name.
        alignment: of the address, the offset and the length of every transfer, in bytes.
        path: where the bytes are, for messages.
        choice: set by `open_storage`.
        num_lanes: how many drives work side by side; `IOThreads` gives each its own queue.

    Two transfers of the same bytes at once, one of them a write, are the caller's to avoid.
    """

    kind: str
    alignment: int = PAGE_NBYTES
    path: str
    choice: Choice | None = None
    num_lanes: int = 1

    def __init__(self) -> None:
        self._state = threading.Lock()  # guards the two below; never held while anything blocks
        self._closed = False
        self._in_flight = 0

    @abc.abstractmethod
    def reserve(self, nbytes: int, *, name: str) -> Extent:
        """Allocate at least `nbytes` (rounded up to the alignment) for real; the content is undefined.

        Raises:
            StorageError: no room (ENOSPC), above a limit (EFBIG) or the quota; nothing is reserved then.
        """

    @abc.abstractmethod
    def free(self, extent: Extent) -> None:
        """Give an extent back; later ones may reuse it."""

    @property
    @abc.abstractmethod
    def reserved_nbytes(self) -> int:
        """Bytes handed out and not given back."""

    @property
    @abc.abstractmethod
    def end(self) -> int:
        """One past the last byte that was ever reserved; nothing is transferred beyond."""

    def read(self, offset: int, buffer: memoryview, *, name: str) -> None:
        """Fill the whole buffer from `offset`.

        Raises:
            StorageError: the read failed or came up short, with how far it got; ValueError: misaligned; ClosedError.
        """
        self._whole("read", offset, buffer, name)

    def write(self, offset: int, buffer: memoryview, *, name: str) -> None:
        """Write the whole buffer at `offset`; errors as for `read`."""
        self._whole("write", offset, buffer, name)

    def begin(self, action: str, offset: int, buffer: memoryview, *, name: str) -> None:
        """First of the three steps of a `read` or `write`, for those who `move` parts of it in several threads; errors as theirs.

        Once per transfer, since for each block it would cost what a small block costs. Does not block. Until `finish`, which must be called
        once if this raises nothing, the storage is not released.
        """
        self._enter(name)
        try:
            self._check(action, offset, buffer, name)
        except BaseException:
            self.finish()
            raise

    def move(self, action: str, offset: int, buffer: memoryview, *, name: str) -> None:
        """Second step: an aligned part of what began. A short transfer goes on at the last aligned byte that it reached.

        Raises:
            StorageError: it failed or came up short, with how far it got.
        """
        some = self._read_some if action == "read" else self._write_some
        done, nbytes = 0, buffer.nbytes
        while done < nbytes:
            code, why = errno.EIO, "the file ends here (was it truncated?)"
            cause = None
            try:
                moved = some(offset + done, buffer[done : done + MAX_TRANSFER_NBYTES], name)
            except InterruptedError:
                continue
            except StorageError:
                raise
            except OSError as error:
                moved, code, why, cause = 0, error.errno or errno.EIO, "", error
            moved -= moved % self.alignment
            if moved <= 0:
                raise StorageError(
                    action, name=name, path=self.path, offset=offset, wanted=nbytes, got=done, errno=code, why=why
                ) from cause
            done += moved

    def finish(self) -> None:
        """Third step: nothing moves any more; releases the storage if it was closed meanwhile."""
        with self._state:
            self._in_flight -= 1
            last = self._closed and not self._in_flight
        if last:
            self._release()

    @abc.abstractmethod
    def sync(self) -> None:
        """Return when what was written before is durable."""

    def close(self) -> None:
        """Give everything up, the file included. Idempotent.

        A transfer that is still in flight keeps the file open and closes it when it ends, so that it never meets another file under
        the same descriptor.
        """
        with self._state:
            if self._closed:
                return
            self._closed = True
            idle = not self._in_flight
        if idle:
            self._release()

    def lane(self, offset: int) -> tuple[int, int]:
        """Which lane holds `offset`, and how many bytes from there on."""
        return 0, MAX_TRANSFER_NBYTES

    @abc.abstractmethod
    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        """One attempt; returns the bytes moved, 0 at the end of the file; OSError."""

    @abc.abstractmethod
    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        """One attempt; returns the bytes moved; OSError."""

    @abc.abstractmethod
    def _release(self) -> None:
        """Close for real; called once, when nothing is in flight."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[None]:
        """Inside, the storage is not released."""
        self._enter(name)
        try:
            yield
        finally:
            self.finish()

    def _enter(self, name: str) -> None:
        with self._state:
            if self._closed:
                raise ClosedError(f"the storage at {self.path} is closed; {name!r} cannot be reached")
            self._in_flight += 1

    def _whole(self, action: str, offset: int, buffer: memoryview, name: str) -> None:
        self.begin(action, offset, buffer, name=name)
        try:
            self.move(action, offset, buffer, name=name)
        finally:
            self.finish()

    def _check(self, action: str, offset: int, buffer: memoryview, name: str) -> None:
        if action == "read" and buffer.readonly:
            raise ValueError(f"{name!r}: the buffer to read into is read-only")
        if not buffer.contiguous or buffer.itemsize != 1:
            raise ValueError(f"{name!r}: the buffer must be contiguous bytes, not {buffer.format!r} with strides {buffer.strides}")
        if not buffer.nbytes:
            return
        address = int(np.frombuffer(buffer, np.uint8).__array_interface__["data"][0])
        places = {"offset": offset, "length": buffer.nbytes, "address": address}
        wrong = [f"{what} {n}" for what, n in places.items() if n % self.alignment or n < 0]
        if wrong:
            raise ValueError(f"{name!r}: {' and '.join(wrong)} must be a multiple of {self.alignment} for the {self.kind} backend")
        if offset + buffer.nbytes > self.end:  # a write there would make the file longer, on nobody's account
            why = f"only {self.end} bytes are reserved"
            raise StorageError(action, name=name, path=self.path, offset=offset, wanted=buffer.nbytes, got=0, why=why)


class LocalStorage(Storage):
    """A storage with one space of its own, that grows at the end and reuses what was freed."""

    def __init__(self) -> None:
        super().__init__()
        self._extents = ExtentAllocator()
        self._space = threading.Lock()  # held while the file grows

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        nbytes = round_up(nbytes, self.alignment)
        with self._open(name), self._space:
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
        with self._space:
            self._extents.give_back(extent)

    @property
    def reserved_nbytes(self) -> int:
        with self._space:
            return self._extents.end - self._extents.free_nbytes

    @property
    def end(self) -> int:
        return self._extents.end

    @abc.abstractmethod
    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        """Allocate the range at the end of the space; StorageError if it cannot be had."""
