"""I/O worker threads: cut transfers into blocks and keep several in flight.

Measured on a virtual NVMe drive: 4 to 8 threads of `preadv` on blocks of 1 to 8 MiB reach what io_uring reaches.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from ..errors import ClosedError, ConfigError
from ..spec import PAGE_NBYTES
from ._storage import Storage

__all__ = ["Done", "IOThreads"]

_log = logging.getLogger("swapio")

Done = Callable[[BaseException | None], None]


class _Job:
    """One transfer: how many of its blocks are left, and its first error."""

    def __init__(self, num_blocks: int, done: Done) -> None:
        self._left = num_blocks
        self._error: BaseException | None = None
        self._done = done
        self._lock = threading.Lock()

    def block_ended(self, error: BaseException | None) -> None:
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        try:
            self._done(self._error)
        except Exception:  # the caller's; the thread has others to serve
            _log.exception("a callback of an I/O transfer failed")


@dataclasses.dataclass(order=True, slots=True)
class _Block:
    priority: int
    number: int
    action: str = dataclasses.field(compare=False)
    offset: int = dataclasses.field(compare=False)
    buffer: memoryview = dataclasses.field(compare=False)
    name: str = dataclasses.field(compare=False)
    job: _Job = dataclasses.field(compare=False)


class IOThreads:
    """`queue_depth` daemon threads for each lane (drive) of one storage, that move blocks between buffers and it.

    Args:
        block_nbytes: the largest single read or write, a multiple of 4096.
        queue_depth: how many are in flight at once on each lane.

    Attributes:
        moved_nbytes, busy_s: bytes moved and seconds spent (summed over threads), by `"read"` and `"write"`.
        in_flight: blocks that a thread is moving now.
    """

    def __init__(self, storage: Storage, *, block_nbytes: int = 4 << 20, queue_depth: int = 4) -> None:
        align = max(PAGE_NBYTES, storage.alignment)
        if block_nbytes < align or block_nbytes % align:
            raise ConfigError(
                f"aio.block_size: {block_nbytes} is no multiple of {align} bytes; use for example 4194304", key="aio.block_size"
            )
        if queue_depth < 1:
            wrong = f"aio.queue_depth: {queue_depth} moves nothing; use for example 4"
            raise ConfigError(wrong, key="aio.queue_depth", value=queue_depth)
        self.block_nbytes = block_nbytes
        self.storage = storage
        self.moved_nbytes = {"read": 0, "write": 0}
        self.busy_s = {"read": 0.0, "write": 0.0}
        self.in_flight = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards all of the above and below
        self._queues: list[list[_Block]] = [[] for _ in range(storage.num_lanes)]
        self._ready = [threading.Condition(self._lock) for _ in self._queues]
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(i % storage.num_lanes,), name=f"swapio-io-{i}", daemon=True)
            for i in range(queue_depth * storage.num_lanes)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, offset: int, buffer: memoryview, *, name: str, priority: int, done: Done) -> None:
        """Read into `buffer`; `done(error or None)` is called once, from a worker thread. Lower priorities go first. Does not block."""
        self._submit("read", offset, buffer, name, priority, done)

    def write(self, offset: int, buffer: memoryview, *, name: str, priority: int, done: Done) -> None:
        """Write from `buffer`, as `read`."""
        self._submit("write", offset, buffer, name, priority, done)

    def _submit(self, action: str, offset: int, buffer: memoryview, name: str, priority: int, done: Done) -> None:
        pieces = []
        start = 0
        while start < buffer.nbytes:
            lane, nbytes = self.storage.lane(offset + start)
            piece = buffer[start : start + min(nbytes, self.block_nbytes)]
            pieces.append((lane, start, piece))
            start += piece.nbytes
        with self._lock:
            closed = self._closed
            if pieces and not closed:
                job = _Job(len(pieces), done)
                for lane, start, piece in pieces:
                    block = _Block(priority, next(self._numbers), action, offset + start, piece, name, job)
                    heapq.heappush(self._queues[lane], block)
                    self._ready[lane].notify()
                return
        done(ClosedError(f"the I/O threads are closed; {name!r} was not moved") if closed else None)

    def _work(self, lane: int) -> None:
        queue, ready = self._queues[lane], self._ready[lane]
        while True:
            with ready:
                while not queue and not self._closed:
                    ready.wait()
                if not queue:
                    return
                block = heapq.heappop(queue)
                self.in_flight += 1
            start = time.perf_counter()
            error: BaseException | None = None
            try:
                getattr(self.storage, block.action)(block.offset, block.buffer, name=block.name)
            except BaseException as caught:
                error = caught
            spent = time.perf_counter() - start
            with self._lock:
                self.in_flight -= 1
                self.busy_s[block.action] += spent
                self.moved_nbytes[block.action] += 0 if error else block.buffer.nbytes
            block.job.block_ended(error)
            del block, error  # else the buffer lives until the next one comes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self, timeout: float = 30.0) -> bool:
        """Refuse new work, fail what is queued, let what is in flight end, join. False when one still hangs after `timeout` seconds."""
        with self._lock:
            self._closed = True
            dropped = [block for queue in self._queues for block in queue]
            for queue, ready in zip(self._queues, self._ready, strict=True):
                queue.clear()
                ready.notify_all()
        for block in dropped:
            block.job.block_ended(ClosedError(f"the I/O threads were closed before {block.name!r} was moved"))
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)
