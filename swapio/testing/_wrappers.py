"""Storages around a storage: failures and delays on command, in no need of patches."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from ..errors import StorageError
from ..io import Storage, WrapperStorage
from ..spec import Extent

__all__ = ["FaultyStorage", "GatedStorage", "nth"]


def nth(action: str, number: int, code: int) -> Callable[[str, str], int]:
    """A `FaultyStorage.fail` that answers `code` to the `number`-th call (from 1) of `"read"`, `"write"` or `"reserve"`."""
    calls = 0

    def fail(asked: str, name: str) -> int:
        nonlocal calls
        calls += asked == action
        return code if asked == action and calls == number else 0

    return fail


class FaultyStorage(WrapperStorage):
    """Fails single system calls of an inner storage.

    Attributes that may be changed at any time:
        fail: `(action, name) -> errno or 0`, asked for each call; `action` is "read", "write" or "reserve".
        most_nbytes: the largest transfer of one call; makes every longer one short.
        interrupt_every: every n-th call raises EINTR first.
        truncated_at: offset at which the file seems to end.
    """

    def __init__(
        self,
        inner: Storage,
        *,
        fail: Callable[[str, str], int] | None = None,
        most_nbytes: int | None = None,
        interrupt_every: int = 0,
        truncated_at: int | None = None,
    ) -> None:
        super().__init__(inner)
        self.fail = fail
        self.most_nbytes = most_nbytes
        self.interrupt_every = interrupt_every
        self.truncated_at = truncated_at
        self.num_calls = 0

    def reserve(self, nbytes: int, *, name: str) -> Extent:
        code = self.fail("reserve", name) if self.fail else 0
        if code:
            raise StorageError("reserve", name=name, path=self.path, offset=self.end, wanted=nbytes, got=0, errno=code)
        return super().reserve(nbytes, name=name)

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return super()._read_some(offset, self._cut("read", offset, buffer, name), name)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return super()._write_some(offset, self._cut("write", offset, buffer, name), name)

    def _cut(self, action: str, offset: int, buffer: memoryview, name: str) -> memoryview:
        self.num_calls += 1
        if self.interrupt_every and self.num_calls % self.interrupt_every == 0:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        code = self.fail(action, name) if self.fail else 0
        if code:
            raise OSError(code, os.strerror(code))
        if self.truncated_at is not None:
            buffer = buffer[: max(self.truncated_at - offset, 0)]
        return buffer[: self.most_nbytes]


class GatedStorage(WrapperStorage):
    """Holds reads or writes back until their gate is opened, or delays each.

    Attributes:
        reads, writes: `threading.Event` gates, open at first.
        read_latency_s, write_latency_s: added to each transfer.
        waiting: transfers that stand before a closed gate.
    """

    def __init__(self, inner: Storage, *, read_latency_s: float = 0.0, write_latency_s: float = 0.0) -> None:
        super().__init__(inner)
        self.reads = threading.Event()
        self.writes = threading.Event()
        self.reads.set()
        self.writes.set()
        self.read_latency_s = read_latency_s
        self.write_latency_s = write_latency_s
        self.waiting = threading.Semaphore(0)

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        self._pass(self.reads, self.read_latency_s)
        return super()._read_some(offset, buffer, name)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        self._pass(self.writes, self.write_latency_s)
        return super()._write_some(offset, buffer, name)

    def _pass(self, gate: threading.Event, latency_s: float) -> None:
        if not gate.is_set():
            self.waiting.release()
            gate.wait()
        if latency_s:
            time.sleep(latency_s)
