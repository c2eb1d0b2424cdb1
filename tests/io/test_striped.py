from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swapio.errors import ConfigError, StorageError
from swapio.io import DirectStorage, IOThreads, MemoryStorage, Storage, StripedStorage, WrapperStorage, measure_speeds
from swapio.spec import PAGE_NBYTES, Extent
from swapio.testing import FaultyStorage, GatedStorage, aligned_buffer

TIMEOUT_S = 30
STRIPE = 4 * PAGE_NBYTES


class Throttled(WrapperStorage):
    """A drive with a known speed in made-up time: what it moved tells how long it was busy."""

    def __init__(self, inner: Storage, *, speed: float) -> None:
        super().__init__(inner)
        self.speed = speed
        self.pieces: list[int] = []
        self._noting = threading.Lock()

    @property
    def busy_s(self) -> float:
        return sum(self.pieces) / self.speed

    def _note(self, nbytes: int) -> None:
        with self._noting:
            self.pieces.append(nbytes)

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        self._note(buffer.nbytes)
        return super()._read_some(offset, buffer, name)

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        self._note(buffer.nbytes)
        return super()._write_some(offset, buffer, name)


def drives(speeds: Sequence[float]) -> list[Throttled]:
    return [Throttled(MemoryStorage(), speed=speed) for speed in speeds]


def move_all(io: IOThreads, work: Sequence[tuple[str, int, memoryview]]) -> list[BaseException | None]:
    errors: list[BaseException | None] = []
    ended = threading.Semaphore(0)

    def done(error: BaseException | None) -> None:
        errors.append(error)
        ended.release()

    for action, offset, buffer in work:
        getattr(io, action)(offset, buffer, name="x", priority=0, done=done)
    for _ in work:
        assert ended.acquire(timeout=TIMEOUT_S)
    return errors


@pytest.mark.parametrize("speeds", [(3.0, 1.0), (1.0, 1.0), (5.0, 2.0, 1.0), (1.0, 10.0)])
@pytest.mark.parametrize("pages", [[257], [1] * 300, range(1, 40)], ids=["one", "tiny", "mixed"])
def test_unequal_drives_give_nine_tenths_of_their_sum(speeds: tuple[float, ...], pages: Sequence[int]) -> None:
    """All lanes work at once (the next test), so the slowest to end decides: it must not end later than 1/0.9 of the ideal."""
    members = drives(speeds)
    clock = lambda: sum(m.busy_s for m in members)  # noqa: E731 - one after another, as the measurement goes
    weights = measure_speeds(members, nbytes=STRIPE, clock=clock)
    for member in members:
        member.pieces.clear()
    with StripedStorage(members, weights=weights, stripe_nbytes=STRIPE) as storage:
        io = IOThreads(storage, block_nbytes=STRIPE, queue_depth=2)
        extents = [storage.reserve(number * PAGE_NBYTES, name="x") for number in pages]
        total = sum(e.nbytes for e in extents)
        assert move_all(io, [("write", e.offset, aligned_buffer(e.nbytes)) for e in extents]) == [None] * len(extents)
        assert io.close(TIMEOUT_S)
        assert sum(sum(m.pieces) for m in members) == total
        assert total / max(m.busy_s for m in members) >= 0.9 * sum(speeds)


@pytest.mark.parametrize("stuck", [0, 1])
def test_a_slow_drive_holds_up_only_its_own_share(stuck: int) -> None:
    members = [GatedStorage(MemoryStorage()), GatedStorage(MemoryStorage())]
    with StripedStorage(members, stripe_nbytes=STRIPE) as storage:
        extent = storage.reserve(32 * STRIPE, name="x")
        io = IOThreads(storage, block_nbytes=STRIPE, queue_depth=2)
        members[stuck].writes.clear()
        ended = threading.Semaphore(0)
        for start in range(0, extent.nbytes, STRIPE):
            io.write(extent.offset + start, aligned_buffer(STRIPE), name="x", priority=0, done=lambda error: ended.release())
        for _ in range(16):
            assert ended.acquire(timeout=TIMEOUT_S)
        assert not ended.acquire(blocking=False)
        members[stuck].writes.set()
        for _ in range(16):
            assert ended.acquire(timeout=TIMEOUT_S)
        assert io.close(TIMEOUT_S)


@pytest.mark.parametrize("block", [PAGE_NBYTES, STRIPE, 3 * STRIPE])
def test_each_block_lands_on_one_drive(block: int) -> None:
    members = drives([2.0, 1.0])
    with StripedStorage(members, weights=[2, 1], stripe_nbytes=STRIPE) as storage:
        extent = storage.reserve(31 * STRIPE + PAGE_NBYTES, name="x")
        io = IOThreads(storage, block_nbytes=block, queue_depth=1)
        data, back = aligned_buffer(extent.nbytes, b"0123456789a"), aligned_buffer(extent.nbytes)
        assert move_all(io, [("write", extent.offset, data)]) == [None]
        assert max(max(m.pieces) for m in members) <= min(block, STRIPE)
        assert sum(len(m.pieces) for m in members) == -(-extent.nbytes // min(block, STRIPE))
        start = 5 * PAGE_NBYTES  # in the middle of a stripe
        assert move_all(io, [("read", extent.offset + start, back[start:])]) == [None]
        assert back[start:] == data[start:]
        assert io.close(TIMEOUT_S)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30)), max_size=30), st.integers(1, 3), st.integers(1, 5))
def test_extents_are_apart_through_any_reuse(steps: list[tuple[bool, int]], num_drives: int, stripe: int) -> None:
    members: list[Storage] = [MemoryStorage() for _ in range(num_drives)]
    with StripedStorage(members, weights=range(1, num_drives + 1), stripe_nbytes=stripe * PAGE_NBYTES) as storage:
        used: list[tuple[Extent, memoryview]] = []
        for number, (take, value) in enumerate(steps):
            if take or not used:
                extent = storage.reserve(value * PAGE_NBYTES, name=str(number))
                content = aligned_buffer(extent.nbytes, str(number).encode())
                storage.write(extent.offset, content, name=str(number))
                used.append((extent, content))
            else:
                storage.free(used.pop(value % len(used))[0])
            for extent, content in used:
                back = aligned_buffer(extent.nbytes)
                storage.read(extent.offset, back, name="back")
                assert back == content
        assert storage.reserved_nbytes == sum(extent.nbytes for extent, _ in used)


def test_a_full_drive_leaves_its_share_to_the_others() -> None:
    small, large = MemoryStorage(capacity=6 * STRIPE), MemoryStorage(capacity=40 * STRIPE)
    with StripedStorage([small, large], stripe_nbytes=STRIPE) as storage:
        for _ in range(8):
            extent = storage.reserve(4 * STRIPE, name="x")
            storage.write(extent.offset, aligned_buffer(4 * STRIPE, b"x"), name="x")
        assert (small.reserved_nbytes, large.reserved_nbytes) == (6 * STRIPE, 26 * STRIPE)
        before = storage.reserved_nbytes
        with pytest.raises(StorageError) as caught:
            storage.reserve(20 * STRIPE, name="big")
        assert caught.value.errno == errno.ENOSPC
        assert storage.reserved_nbytes == before
        storage.reserve(14 * STRIPE, name="fits")


def test_errors_name_the_drive(tmp_path: Path) -> None:
    faulty = FaultyStorage(DirectStorage(tmp_path), fail=lambda action, name: errno.EIO if action == "read" else 0)
    with StripedStorage([MemoryStorage(), faulty], stripe_nbytes=STRIPE) as storage:
        extent = storage.reserve(8 * STRIPE, name="x")
        with pytest.raises(StorageError, match="'x'") as caught:
            storage.read(extent.offset, aligned_buffer(8 * STRIPE), name="x")
        assert (caught.value.path, caught.value.errno) == (faulty.path, errno.EIO)
        assert storage.path == f"memory, {faulty.path}"


def test_speeds_are_measured_in_turns_and_the_best_round_counts() -> None:
    """Another process that takes half of the drive for a while does not decide."""
    members = drives([4.0, 1.0])
    now, last = 0.0, 0.0

    def clock() -> float:
        nonlocal now, last
        busy = sum(m.busy_s for m in members)
        disturbed = len(members[0].pieces) == 4 or len(members[1].pieces) == 2
        now, last = now + (busy - last) * (2 if disturbed else 1), busy
        return now

    assert measure_speeds(members, nbytes=STRIPE, clock=clock) == pytest.approx([4.0, 1.0])
    assert [len(m.pieces) for m in members] == [6, 6]
    assert [m.reserved_nbytes for m in members] == [0, 0]


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, 1.0, 1.0]])
def test_weights_that_cannot_work(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="one positive number for each"):
        StripedStorage([MemoryStorage(), MemoryStorage()], weights=weights)
