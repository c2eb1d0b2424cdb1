"""What every storage must do; a backend's tests are a subclass.

    class TestMine(StorageConformance):
        def open(self, directory):
            return MyStorage(directory)
"""

from __future__ import annotations

import errno
import mmap
import threading
from pathlib import Path

import pytest

from ..errors import ClosedError, StorageError
from ..io import IOThreads, Storage
from ..spec import PAGE_NBYTES, round_up
from ._wrappers import FaultyStorage

__all__ = ["StorageConformance", "aligned_buffer"]

SIZES = (0, 1, 4095, 4096, 4097, 4099 * PAGE_NBYTES + 1)


def aligned_buffer(nbytes: int, fill: bytes = b"") -> memoryview:
    """Page-aligned bytes, `nbytes` rounded up to a page; `fill` repeated."""
    length = round_up(max(nbytes, 1), PAGE_NBYTES)
    view = memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if fill:
        view[:] = (fill * (length // len(fill) + 1))[:length]
    return view[: round_up(nbytes, PAGE_NBYTES)]


class StorageConformance:
    """Subclass, and say how to open a storage in an empty directory."""

    def open(self, directory: Path) -> Storage:
        raise NotImplementedError

    def raw_read(self, storage: Storage, offset: int, nbytes: int) -> bytes:
        """Bytes past the storage's own code, where there is a way; override for files."""
        view = aligned_buffer(nbytes)
        storage.read(offset, view, name="raw")
        return bytes(view[:nbytes])

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_what_is_written_is_read(self, tmp_path: Path, nbytes: int) -> None:
        with self.open(tmp_path) as storage:
            first = storage.reserve(nbytes, name="first")
            second = storage.reserve(nbytes, name="second")
            assert first.nbytes >= nbytes
            assert first.end <= second.offset
            one, two = aligned_buffer(nbytes, b"one~"), aligned_buffer(nbytes, b"two: ")
            storage.write(first.offset, one, name="first")
            storage.write(second.offset, two, name="second")
            back = aligned_buffer(nbytes)
            storage.read(first.offset, back, name="first")
            assert back == one
            storage.read(second.offset, back, name="second")
            assert back == two
            assert self.raw_read(storage, second.offset, nbytes) == bytes(two[:nbytes])

    def test_above_two_gib_in_one_transfer(self, tmp_path: Path) -> None:
        """One call of Linux moves at most 2,147,479,552 bytes. The middle of the buffer is never touched memory."""
        nbytes = 2**31 + PAGE_NBYTES
        with self.open(tmp_path) as storage:
            extent = storage.reserve(nbytes, name="huge")
            view = aligned_buffer(nbytes)
            view[:4], view[-4:] = b"head", b"tail"
            storage.write(extent.offset, view, name="huge")
            view[:4], view[-4:] = bytes(4), bytes(4)
            storage.read(extent.offset, view, name="huge")
            assert (bytes(view[:4]), bytes(view[-4:])) == (b"head", b"tail")

    def test_freed_extents_are_used_again(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            before = storage.reserved_nbytes
            for _ in range(10):
                extent = storage.reserve(5 * PAGE_NBYTES, name="again")
                storage.free(extent)
            assert storage.reserved_nbytes == before
            assert extent.offset <= before + 5 * PAGE_NBYTES

    def test_misalignment_is_named(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            storage.reserve(4 * PAGE_NBYTES, name="x")
            if storage.alignment == 1:
                return
            view = aligned_buffer(4 * PAGE_NBYTES)
            with pytest.raises(ValueError, match="offset 512"):
                storage.read(512, view[:PAGE_NBYTES], name="x")
            with pytest.raises(ValueError, match="length 100"):
                storage.write(0, view[:100], name="x")
            with pytest.raises(ValueError, match="address"):
                storage.write(0, view[512 : 512 + PAGE_NBYTES], name="x")

    def test_reading_past_the_end_is_short(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            extent = storage.reserve(PAGE_NBYTES, name="x")
            with pytest.raises(StorageError) as caught:
                storage.read(extent.end + (1 << 30), aligned_buffer(PAGE_NBYTES), name="lost")
            error = caught.value
            assert (error.name, error.wanted, error.got, error.errno) == ("lost", PAGE_NBYTES, 0, errno.EIO)
            assert "lost" in str(error)
            assert isinstance(error, OSError)

    def test_short_transfers_and_interrupts_are_completed(self, tmp_path: Path) -> None:
        with FaultyStorage(self.open(tmp_path), most_nbytes=PAGE_NBYTES, interrupt_every=3) as storage:
            extent = storage.reserve(9 * PAGE_NBYTES, name="x")
            data = aligned_buffer(9 * PAGE_NBYTES, b"0123456789a")
            storage.write(extent.offset, data, name="x")
            back = aligned_buffer(9 * PAGE_NBYTES)
            storage.read(extent.offset, back, name="x")
            assert back == data
            assert storage.num_calls > 18

    @pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EFBIG])
    @pytest.mark.parametrize("action", ["read", "write"])
    def test_errors_say_what_and_how_far(self, tmp_path: Path, action: str, code: int) -> None:
        calls = 0

        def fail_third(asked: str, name: str) -> int:
            nonlocal calls
            calls += asked == action
            return code if asked == action and calls == 3 else 0

        with FaultyStorage(self.open(tmp_path), fail=fail_third, most_nbytes=PAGE_NBYTES) as storage:
            extent = storage.reserve(5 * PAGE_NBYTES, name="w")
            with pytest.raises(StorageError) as caught:
                getattr(storage, action)(extent.offset, aligned_buffer(5 * PAGE_NBYTES), name="w")
            error = caught.value
            assert (error.name, error.offset, error.wanted, error.got) == ("w", extent.offset, 5 * PAGE_NBYTES, 2 * PAGE_NBYTES)
            assert (error.errno, error.path) == (code, storage.path)

    def test_threads_at_once(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            io = IOThreads(storage, block_nbytes=2 * PAGE_NBYTES, queue_depth=4)
            extents = [storage.reserve(7 * PAGE_NBYTES, name=str(i)) for i in range(8)]
            sources = [aligned_buffer(7 * PAGE_NBYTES, bytes([i + 1, 7])) for i in range(8)]
            targets = [aligned_buffer(7 * PAGE_NBYTES) for _ in range(8)]
            errors: list[BaseException | None] = []
            for move, buffers in ((io.write, sources), (io.read, targets)):
                ended = threading.Semaphore(0)

                def done(error: BaseException | None, ended: threading.Semaphore = ended) -> None:
                    errors.append(error)
                    ended.release()

                for number, (extent, buffer) in enumerate(zip(extents, buffers, strict=True)):
                    move(extent.offset, buffer, name=str(number), priority=number % 3, done=done)
                for _ in extents:
                    assert ended.acquire(timeout=30)
            assert io.close(10)
            assert errors == [None] * 16
            assert sources == targets

    def test_closing_twice_and_using_after(self, tmp_path: Path) -> None:
        storage = self.open(tmp_path)
        extent = storage.reserve(PAGE_NBYTES, name="x")
        storage.sync()
        storage.close()
        storage.close()
        with pytest.raises(ClosedError):
            storage.read(extent.offset, aligned_buffer(PAGE_NBYTES), name="x")
        with pytest.raises(ClosedError):
            storage.reserve(1, name="y")
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
