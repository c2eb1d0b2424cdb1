"""I/O worker threads: cut transfers into blocks and keep several in flight.

Measured on a virtual NVMe drive: 4 to 8 threads of `preadv` on blocks of 1 to 8 MiB reach what io_uring reaches.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import threading
import time
from collections.abc import Callable

from ..errors import ClosedError, ConfigError
from ..spec import PAGE_NBYTES
from ._storage import Storage

__all__ = ["Done", "IOThreads"]

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
        self._done(self._error)


@dataclasses.dataclass(order=True, slots=True)
class _Block:
    priority: int
    number: int
    move: Callable[..., None] = dataclasses.field(compare=False)
    offset: int = dataclasses.field(compare=False)
    buffer: memoryview = dataclasses.field(compare=False)
    name: str = dataclasses.field(compare=False)
    job: _Job = dataclasses.field(compare=False)


class IOThreads:
    """`queue_depth` daemon threads that move blocks between buffers and one storage.

    Args:
        block_nbytes: the largest single read or write, a multiple of 4096.
        queue_depth: how many are in flight at once.
    """

    def __init__(self, storage: Storage, *, block_nbytes: int = 4 << 20, queue_depth: int = 4) -> None:
        if block_nbytes < PAGE_NBYTES or block_nbytes % max(PAGE_NBYTES, storage.alignment):
            raise ConfigError(f"aio.block_size: {block_nbytes} is no multiple of {PAGE_NBYTES} bytes; use for example 4194304", key="aio.block_size")
        if queue_depth < 1:
            raise ConfigError(f"aio.queue_depth: {queue_depth} moves nothing; use for example 4", key="aio.queue_depth")
        self.block_nbytes = block_nbytes
        self.storage = storage
        self.busy_s = 0.0  # summed over threads
        self._queue: list[_Block] = []
        self._numbers = itertools.count()
        self._ready = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._work, name=f"swapio-io-{i}", daemon=True) for i in range(queue_depth)]
        for thread in self._threads:
            thread.start()

    def read(self, offset: int, buffer: memoryview, *, name: str, priority: int, done: Done) -> None:
        """Read into `buffer`; `done(error or None)` is called once, from a worker thread. Lower priorities go first. Does not block."""
        self._submit(self.storage.read, offset, buffer, name, priority, done)

    def write(self, offset: int, buffer: memoryview, *, name: str, priority: int, done: Done) -> None:
        """Write from `buffer`, as `read`."""
        self._submit(self.storage.write, offset, buffer, name, priority, done)

    def _submit(self, move: Callable[..., None], offset: int, buffer: memoryview, name: str, priority: int, done: Done) -> None:
        starts = range(0, buffer.nbytes, self.block_nbytes)
        with self._ready:
            if not self._closed and starts:
                job = _Job(len(starts), done)
                for start in starts:
                    piece = buffer[start : start + self.block_nbytes]
                    heapq.heappush(self._queue, _Block(priority, next(self._numbers), move, offset + start, piece, name, job))
                self._ready.notify(len(starts))
                return
        done(ClosedError(f"the I/O threads are closed; {name!r} was not moved") if self._closed else None)

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._closed:
                    self._ready.wait()
                if not self._queue:
                    return
                block = heapq.heappop(self._queue)
            start = time.perf_counter()
            error: BaseException | None = None
            try:
                block.move(block.offset, block.buffer, name=block.name)
            except BaseException as caught:
                error = caught
            spent = time.perf_counter() - start
            with self._ready:
                self.busy_s += spent
            block.job.block_ended(error)
            del block, error  # else the buffer lives until the next one comes

    def close(self, timeout: float) -> bool:
        """Refuse new work, fail what is queued, let what is in flight end, join. False when a thread still hangs after `timeout` seconds."""
        with self._ready:
            self._closed = True
            dropped, self._queue = self._queue, []
            self._ready.notify_all()
        for block in dropped:
            block.job.block_ended(ClosedError(f"the I/O threads were closed before {block.name!r} was moved"))
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)
