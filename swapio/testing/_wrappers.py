"""Storages around a storage: failures and delays on command, in no need of patches."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from ..errors import StorageError
from ..io import Storage, transfer_all
from ..spec import Extent

__all__ = ["FaultyStorage", "GatedStorage"]


class _Wrapper(Storage):
    kind = "wrapper"

    def __init__(self, inner: Storage) -> None:
        super().__init__()
        self.inner = inner
        self.alignment = inner.alignment
        self.path = inner.path

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        return self.inner.reserve(nbytes, name=name)

    def free(self, extent: Extent) -> None:
        self.inner.free(extent)

    @property
    def reserved_nbytes(self) -> int:
        return self.inner.reserved_nbytes

    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        raise NotImplementedError("reserve is the inner storage's")

    def _read_some(self, offset: int, buffer: memoryview) -> int:
        return self.inner._read_some(offset, buffer)

    def _write_some(self, offset: int, buffer: memoryview) -> int:
        return self.inner._write_some(offset, buffer)

    def sync(self) -> None:
        self.inner.sync()

    def _release(self) -> None:
        self.inner.close()


class FaultyStorage(_Wrapper):
    """Fails single system calls of an inner storage.

    Attributes that may be changed at any time:
        fail: `(action, name) -> errno or 0`, asked for each call; `action` is "read", "write" or "reserve".
        most_nbytes: the largest transfer of one call; makes every longer one short.
        interrupt_every: every n-th call raises EINTR first.
    """

    kind = "faulty"

    def __init__(
        self, inner: Storage, *, fail: Callable[[str, str], int] | None = None, most_nbytes: int | None = None, interrupt_every: int = 0
    ) -> None:
        super().__init__(inner)
        self.fail = fail
        self.most_nbytes = most_nbytes
        self.interrupt_every = interrupt_every
        self.num_calls = 0

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        code = self.fail("reserve", name) if self.fail else 0
        if code:
            raise StorageError("reserve", name=name, path=self.path, offset=0, wanted=nbytes, got=0, errno=code)
        return super().reserve(nbytes, name=name)

    def read(self, offset: int, buffer: memoryview, *, name: str) -> None:
        self._check(offset, buffer, name)
        transfer_all(lambda o, b: self._call("read", name, self.inner._read_some, o, b), "read", offset, buffer, name, self.path)

    def write(self, offset: int, buffer: memoryview, *, name: str) -> None:
        self._check(offset, buffer, name)
        transfer_all(lambda o, b: self._call("write", name, self.inner._write_some, o, b), "write", offset, buffer, name, self.path)

    def _call(self, action: str, name: str, move: Callable[[int, memoryview], int], offset: int, buffer: memoryview) -> int:
        self.num_calls += 1
        if self.interrupt_every and self.num_calls % self.interrupt_every == 0:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        code = self.fail(action, name) if self.fail else 0
        if code:
            raise OSError(code, os.strerror(code))
        return move(offset, buffer[: self.most_nbytes] if self.most_nbytes else buffer)


class GatedStorage(_Wrapper):
    """Holds reads or writes back until their gate is opened, or delays each.

    Attributes:
        reads, writes: `threading.Event` gates, open at first.
        read_latency_s, write_latency_s: added to each transfer.
        waiting: transfers that stand before a closed gate.
    """

    kind = "gated"

    def __init__(self, inner: Storage, *, read_latency_s: float = 0.0, write_latency_s: float = 0.0) -> None:
        super().__init__(inner)
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.reads.set()
        self.writes.set()
        self.read_latency_s = read_latency_s
        self.write_latency_s = write_latency_s
        self.waiting = threading.Semaphore(0)

    def read(self, offset: int, buffer: memoryview, *, name: str) -> None:
        self._pass(self.reads, self.read_latency_s)
        self.inner.read(offset, buffer, name=name)

    def write(self, offset: int, buffer: memoryview, *, name: str) -> None:
        self._pass(self.writes, self.write_latency_s)
        self.inner.write(offset, buffer, name=name)

    def _pass(self, gate: threading.Event, latency_s: float) -> None:
        if not gate.is_set():
            self.waiting.release()
            gate.wait()
        if latency_s:
            time.sleep(latency_s)
