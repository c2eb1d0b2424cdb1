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
from ._storage import MAX_TRANSFER_NBYTES, Storage

__all__ = ["Done", "IOThreads"]

_log = logging.getLogger("swapio")

Done = Callable[[BaseException | None], None]


class _Job:
    """One transfer: how many of its blocks are left, and its first error. Guarded by the lock of the threads."""

    __slots__ = ("action", "done", "error", "left", "name", "storage")

    def __init__(self, storage: Storage, action: str, name: str, num_blocks: int, done: Done) -> None:
        self.storage = storage
        self.action = action
        self.name = name
        self.left = num_blocks
        self.error: BaseException | None = None
        self.done = done


@dataclasses.dataclass(order=True, slots=True)
class _Run:
    """The blocks of a transfer on one lane that no thread has taken yet, as offset and buffer, the last first. Never empty in a queue."""

    priority: int
    number: int
    job: _Job = dataclasses.field(compare=False)
    blocks: list[tuple[int, memoryview]] = dataclasses.field(compare=False)


class IOThreads:
    """`queue_depth` daemon threads for each lane (drive) of one storage, that move blocks between buffers and it.

    Args:
        block_nbytes: the largest single read or write, a multiple of 4096.
        queue_depth: how many are in flight at once on each lane.

    Attributes:
        moved_nbytes: bytes moved, by `"read"` and `"write"`.
        in_flight: blocks that a thread is moving now.
    """

    def __init__(self, storage: Storage, *, block_nbytes: int = 4 << 20, queue_depth: int = 4) -> None:
        align = max(PAGE_NBYTES, storage.alignment)
        if block_nbytes < align or block_nbytes % align:
            raise ConfigError(
                f"aio.block_size: {block_nbytes} is no multiple of {align} bytes; use for example 4194304", key="aio.block_size"
            )
        if block_nbytes > MAX_TRANSFER_NBYTES:
            raise ConfigError(
                f"aio.block_size: one transfer of {block_nbytes} bytes is more than {MAX_TRANSFER_NBYTES}; use for example 4194304",
                key="aio.block_size",
            )
        if queue_depth < 1:
            wrong = f"aio.queue_depth: {queue_depth} moves nothing; use for example 4"
            raise ConfigError(wrong, key="aio.queue_depth", value=queue_depth)
        self.block_nbytes = block_nbytes
        self.storage = storage
        self.moved_nbytes = {"read": 0, "write": 0}
        self.in_flight = 0
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # guards all of the above and below
        self._queues: list[list[_Run]] = [[] for _ in range(storage.num_lanes)]
        self._ready = [threading.Condition(self._lock) for _ in self._queues]
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(i % storage.num_lanes,), name=f"swapio-io-{i}", daemon=True)
            for i in range(queue_depth * storage.num_lanes)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, offset: int, buffer: memoryview, *, name: str, priority: int, done: Done, storage: Storage | None = None) -> None:
        """Read into `buffer`; `done(error or None)` is called once, from a worker thread. Lower priorities go first. Does not block.

        Args:
            storage: of one lane, to read from in place of the threads' own.
        """
        self._submit("read", offset, buffer, name, priority, done, storage or self.storage)

    def write(self, offset: int, buffer: memoryview, *, name: str, priority: int, done: Done) -> None:
        """Write from `buffer`, as `read`."""
        self._submit("write", offset, buffer, name, priority, done, self.storage)

    def _submit(self, action: str, offset: int, buffer: memoryview, name: str, priority: int, done: Done, storage: Storage) -> None:
        try:
            storage.begin(action, offset, buffer, name=name)
        except Exception as error:  # the caller's to see, where it sees those of the drive
            done(error)
            return
        lanes = self._cut(offset, buffer, storage)
        job = _Job(storage, action, name, sum(map(len, lanes)), done)
        with self._lock:
            if self._closed:
                job.error = ClosedError(f"the I/O threads are closed; {name!r} was not moved")
                job.left = 0
            for queue, ready, blocks in zip(self._queues, self._ready, lanes, strict=True):
                if blocks and job.left:
                    ready.notify(len(blocks))
                    heapq.heappush(queue, _Run(priority, next(self._numbers), job, blocks))
            running = job.left > 0
        if not running:
            self._report(job)

    def _cut(self, offset: int, buffer: memoryview, storage: Storage) -> list[list[tuple[int, memoryview]]]:
        """For each lane the offsets and buffers of its blocks, the last first."""
        lanes: list[list[tuple[int, memoryview]]] = [[] for _ in self._queues]
        start, nbytes, most = 0, buffer.nbytes, self.block_nbytes
        while start < nbytes:
            lane, there = storage.lane(offset + start)
            end = start + min(there, most)
            lanes[lane].append((offset + start, buffer[start:end]))
            start = end
        for blocks in lanes:
            blocks.reverse()
        return lanes

    def _work(self, lane: int) -> None:
        queue, ready = self._queues[lane], self._ready[lane]
        while True:
            with self._lock:
                while not queue:
                    if self._closed:
                        return
                    ready.wait()
                job, offset, buffer = self._take(queue)
            while True:
                error: BaseException | None = None
                try:
                    job.storage.move(job.action, offset, buffer, name=job.name)
                except BaseException as caught:
                    error = caught
                with self._lock:  # once per block: what ended and what comes next
                    self.in_flight -= 1
                    ended = self._count(job, 1, buffer.nbytes, error)
                    if ended or not queue:
                        break
                    job, offset, buffer = self._take(queue)
            if ended:
                self._report(job)
            del job, buffer, error  # else the buffer lives until the next one comes

    # what holds the lock

    def _take(self, queue: list[_Run]) -> tuple[_Job, int, memoryview]:
        """The next block of the run that goes first."""
        run = queue[0]
        offset, buffer = run.blocks.pop()
        if not run.blocks:
            heapq.heappop(queue)
        self.in_flight += 1
        return run.job, offset, buffer

    def _count(self, job: _Job, num_blocks: int, nbytes: int, error: BaseException | None) -> bool:
        """Note that blocks of a transfer ended; whether they were its last."""
        if error is None:
            self.moved_nbytes[job.action] += nbytes
        elif job.error is None:
            job.error = error
        job.left -= num_blocks
        return not job.left

    # what does not

    def _report(self, job: _Job) -> None:
        try:
            try:
                job.storage.finish()
            finally:
                job.done(job.error)
        except Exception:  # the caller's; the thread has others to serve
            _log.exception("a callback of an I/O transfer failed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self, timeout: float = 30.0) -> bool:
        """Refuse new work, fail what is queued, let what is in flight end, join. False when one still hangs after `timeout` seconds."""
        with self._lock:
            self._closed = True
            dropped: list[_Job] = []
            for queue, ready in zip(self._queues, self._ready, strict=True):
                for run in queue:
                    error = ClosedError(f"the I/O threads were closed before {run.job.name!r} was moved")
                    if self._count(run.job, len(run.blocks), 0, error):
                        dropped.append(run.job)
                queue.clear()
                ready.notify_all()
        for job in dropped:
            self._report(job)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)
