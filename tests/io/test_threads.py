from __future__ import annotations

import errno
import logging
import threading

import pytest

from swapio.errors import ClosedError, ConfigError, StorageError
from swapio.io import IOThreads, MemoryStorage, Storage, WrapperStorage
from swapio.spec import PAGE_NBYTES
from swapio.testing import FaultyStorage, GatedStorage, aligned_buffer, nth

TIMEOUT_S = 30


class Outcome:
    """A `done` that can be waited for."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self._called = threading.Semaphore(0)

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self._called.release()

    def wait(self) -> BaseException | None:
        assert self._called.acquire(timeout=TIMEOUT_S)
        return self.errors[-1]


def test_lower_priorities_go_first() -> None:
    storage = GatedStorage(MemoryStorage())
    extent = storage.reserve(PAGE_NBYTES, name="x")
    io = IOThreads(storage, queue_depth=1)
    storage.reads.clear()
    order: list[str] = []
    ended = threading.Semaphore(0)

    def done(name: str) -> None:
        order.append(name)
        ended.release()

    for name, priority in (("first", 9), ("late", 5), ("soon", 1), ("later", 5)):
        io.read(extent.offset, aligned_buffer(PAGE_NBYTES), name=name, priority=priority, done=lambda e, n=name: done(n))  # type: ignore[misc]
        if name == "first":
            assert storage.waiting.acquire(timeout=TIMEOUT_S)
            assert io.in_flight == 1
    storage.reads.set()
    for _ in range(4):
        assert ended.acquire(timeout=TIMEOUT_S)
    assert order == ["first", "soon", "late", "later"]
    assert io.close(TIMEOUT_S)
    assert io.in_flight == 0


class _Noting(WrapperStorage):
    """Notes the name of each block."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.moved: list[str] = []

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        self.moved.append(name)
        return super()._read_some(offset, buffer, name)


def test_a_demand_waits_for_one_block_of_a_prefetch() -> None:
    storage = _Noting(gate := GatedStorage(MemoryStorage()))
    extent = storage.reserve(5 * PAGE_NBYTES, name="x")
    io = IOThreads(storage, block_nbytes=PAGE_NBYTES, queue_depth=1)
    gate.reads.clear()
    ahead, now = Outcome(), Outcome()
    io.read(extent.offset, aligned_buffer(5 * PAGE_NBYTES), name="ahead", priority=2, done=ahead)
    assert gate.waiting.acquire(timeout=TIMEOUT_S)
    io.read(extent.offset, aligned_buffer(2 * PAGE_NBYTES), name="now", priority=0, done=now)
    gate.reads.set()
    assert now.wait() is None
    assert ahead.wait() is None
    assert storage.moved == ["ahead", "now", "now", "ahead", "ahead", "ahead", "ahead"]
    assert io.close(TIMEOUT_S)


def test_one_transfer_keeps_the_whole_depth_in_flight() -> None:
    storage = GatedStorage(MemoryStorage())
    extent = storage.reserve(8 * PAGE_NBYTES, name="x")
    io = IOThreads(storage, block_nbytes=PAGE_NBYTES, queue_depth=3)
    storage.reads.clear()
    outcome = Outcome()
    io.read(extent.offset, aligned_buffer(8 * PAGE_NBYTES), name="x", priority=0, done=outcome)
    for _ in range(3):
        assert storage.waiting.acquire(timeout=TIMEOUT_S)
    assert io.in_flight == 3
    storage.reads.set()
    assert outcome.wait() is None
    assert io.close(TIMEOUT_S)


def test_a_storage_that_closes_in_the_middle_is_released_at_the_end() -> None:
    storage = GatedStorage(inner := MemoryStorage())
    extent = storage.reserve(3 * PAGE_NBYTES, name="x")
    io = IOThreads(storage, block_nbytes=PAGE_NBYTES, queue_depth=1)
    storage.writes.clear()
    running, refused = Outcome(), Outcome()
    io.write(extent.offset, aligned_buffer(3 * PAGE_NBYTES), name="x", priority=0, done=running)
    assert storage.waiting.acquire(timeout=TIMEOUT_S)
    storage.close()
    io.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="y", priority=0, done=refused)
    assert isinstance(refused.wait(), ClosedError)
    inner.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="still open")
    storage.writes.set()
    assert running.wait() is None
    with pytest.raises(ClosedError):
        inner.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="released")
    assert io.close(TIMEOUT_S)


def test_what_cannot_begin_fails_through_the_callback() -> None:
    storage = MemoryStorage()
    storage.reserve(PAGE_NBYTES, name="x")
    io = IOThreads(storage)
    outcome = Outcome()
    io.read(512, aligned_buffer(PAGE_NBYTES), name="x", priority=0, done=outcome)
    io.read(0, aligned_buffer(2 * PAGE_NBYTES), name="x", priority=0, done=outcome)
    assert [type(e) for e in outcome.errors] == [ValueError, StorageError]
    assert io.close(TIMEOUT_S)


def test_closing_fails_what_is_queued_and_says_when_a_thread_hangs() -> None:
    storage = GatedStorage(MemoryStorage())
    extent = storage.reserve(PAGE_NBYTES, name="x")
    io = IOThreads(storage, queue_depth=1)
    storage.writes.clear()
    running, queued, refused = Outcome(), Outcome(), Outcome()
    io.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="a", priority=0, done=running)
    assert storage.waiting.acquire(timeout=TIMEOUT_S)
    io.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="b", priority=0, done=queued)
    assert not io.close(0.01)
    assert [type(e) for e in queued.errors] == [ClosedError]
    io.read(extent.offset, aligned_buffer(PAGE_NBYTES), name="c", priority=0, done=refused)
    io.read(extent.offset, aligned_buffer(0), name="d", priority=0, done=refused)
    assert [type(e) for e in refused.errors] == [ClosedError, ClosedError]
    storage.writes.set()
    assert io.close(TIMEOUT_S)
    assert running.errors == [None]


def test_one_failed_block_fails_the_transfer_once() -> None:
    storage = FaultyStorage(MemoryStorage(), fail=nth("write", 2, errno.EIO))
    extent = storage.reserve(5 * PAGE_NBYTES, name="x")
    io = IOThreads(storage, block_nbytes=PAGE_NBYTES, queue_depth=1)
    outcome = Outcome()
    io.write(extent.offset, aligned_buffer(5 * PAGE_NBYTES), name="x", priority=0, done=outcome)
    error = outcome.wait()
    assert isinstance(error, StorageError)
    assert (error.offset, error.wanted) == (PAGE_NBYTES, PAGE_NBYTES)
    assert io.close(TIMEOUT_S)
    assert outcome.errors == [error]
    assert io.moved_nbytes == {"read": 0, "write": 4 * PAGE_NBYTES}


def test_an_empty_transfer_succeeds_at_once() -> None:
    io = IOThreads(MemoryStorage())
    outcome = Outcome()
    io.read(0, aligned_buffer(0), name="x", priority=0, done=outcome)
    assert outcome.errors == [None]
    assert io.close(TIMEOUT_S)


def test_a_failing_callback_does_not_stop_the_thread(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    extent = storage.reserve(PAGE_NBYTES, name="x")
    io = IOThreads(storage, queue_depth=1)

    def broken(error: BaseException | None) -> None:
        raise RuntimeError("the loop is closed")

    outcome = Outcome()
    with caplog.at_level(logging.ERROR, "swapio"):
        io.read(extent.offset, aligned_buffer(PAGE_NBYTES), name="x", priority=0, done=broken)
        io.read(extent.offset, aligned_buffer(PAGE_NBYTES), name="x", priority=0, done=outcome)
        assert outcome.wait() is None
    assert "the loop is closed" in caplog.text
    assert io.close(TIMEOUT_S)


@pytest.mark.parametrize("wrong", [{"block_nbytes": 1000}, {"block_nbytes": 0}, {"block_nbytes": 1 << 31}, {"queue_depth": 0}])
def test_what_cannot_work_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="use for example"):
        IOThreads(MemoryStorage(), **wrong)
