"""What every storage must do."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ..errors import ClosedError, StorageError
from ..io import IOThreads, Storage, aligned_buffer
from ..spec import PAGE_NBYTES
from ._wrappers import FaultyStorage, GatedStorage, nth

__all__ = ["StorageConformance"]

SIZES = (0, 1, 4095, 4096, 4097, 7 * PAGE_NBYTES, 1031 * PAGE_NBYTES + 1)
"""Transfers are rounded up to whole pages, as all callers do."""

TIMEOUT_S = 30


class StorageConformance:
    """The contract of `swapio.io.Storage` as tests. A backend's test file is a subclass that says how to open one:

        class TestMine(StorageConformance):
            def open(self, directory: Path) -> Storage:
                return MyStorage(directory)

            def file(self, storage: Storage) -> Path | None:    # where there is one: it is read and truncated past the storage
                return storage.path

    Overridden methods of the same name as a test replace it.
    """

    def open(self, directory: Path) -> Storage:
        """A storage in an empty directory."""
        raise NotImplementedError

    def file(self, storage: Storage) -> Path | None:
        """The file that holds the bytes, at the offsets of the storage."""
        return None

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
            file = self.file(storage)
            if file is not None:
                with file.open("rb") as raw:
                    raw.seek(second.offset)
                    content = raw.read(two.nbytes)
                    assert content == two

    def test_offsets_above_two_gib(self, tmp_path: Path) -> None:
        """The file is reserved, not written, so this is cheap."""
        with self.open(tmp_path) as storage:
            extent = storage.reserve(2**31 + PAGE_NBYTES, name="huge")
            places = (0, 2**31 - 2 * PAGE_NBYTES, extent.nbytes - 2 * PAGE_NBYTES)
            for number, place in enumerate(places):
                storage.write(extent.offset + place, aligned_buffer(2 * PAGE_NBYTES, bytes([number + 1])), name="huge")
            back = aligned_buffer(2 * PAGE_NBYTES)
            for place, want in zip(places, (b"\1\1", b"\2\3", b"\3\3"), strict=True):
                storage.read(extent.offset + place, back, name="huge")
                assert (bytes(back[:PAGE_NBYTES]), bytes(back[PAGE_NBYTES:])) == tuple(bytes([n]) * PAGE_NBYTES for n in want)

    def test_freed_extents_are_used_again(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            before = storage.reserved_nbytes
            for _ in range(10):
                extent = storage.reserve(5 * PAGE_NBYTES, name="again")
                assert storage.reserved_nbytes == before + 5 * PAGE_NBYTES
                storage.free(extent)
            assert storage.reserved_nbytes == before
            assert extent.offset <= before + 5 * PAGE_NBYTES

    def test_misalignment_is_named(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            storage.reserve(4 * PAGE_NBYTES, name="x")
            view = aligned_buffer(4 * PAGE_NBYTES)
            if storage.alignment > 1:
                with pytest.raises(ValueError, match="offset 512"):
                    storage.read(512, view[:PAGE_NBYTES], name="x")
                with pytest.raises(ValueError, match="length 100"):
                    storage.write(0, view[:100], name="x")
                with pytest.raises(ValueError, match="address"):
                    storage.write(0, view[512 : 512 + PAGE_NBYTES], name="x")
                with pytest.raises(ValueError, match="address"):
                    storage.write(0, view[512 : 512 + PAGE_NBYTES].toreadonly(), name="x")
            with pytest.raises(ValueError, match="offset -4096"):
                storage.read(-PAGE_NBYTES, view, name="x")
            with pytest.raises(ValueError, match="read-only"):
                storage.read(0, view.toreadonly(), name="x")
            with pytest.raises(ValueError, match="contiguous"):
                storage.read(0, view[::2], name="x")
            storage.write(0, view.toreadonly(), name="x")

    @pytest.mark.parametrize("action", ["read", "write"])
    def test_nothing_moves_where_nothing_is_reserved(self, tmp_path: Path, action: str) -> None:
        with self.open(tmp_path) as storage:
            extent = storage.reserve(PAGE_NBYTES, name="x")
            for offset, nbytes in ((extent.offset + 2**30, PAGE_NBYTES), (extent.offset, 2 * PAGE_NBYTES)):
                with pytest.raises(StorageError, match="lost") as caught:
                    getattr(storage, action)(offset, aligned_buffer(nbytes), name="lost")
                error = caught.value
                assert (error.name, error.offset, error.wanted, error.got, error.errno) == ("lost", offset, nbytes, 0, errno.EIO)
                assert isinstance(error, OSError)

    def test_a_truncated_file_is_an_error(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            extent = storage.reserve(8 * PAGE_NBYTES, name="x")
            storage.write(extent.offset, aligned_buffer(8 * PAGE_NBYTES, b"full"), name="x")
            file = self.file(storage)
            if file is None:
                pytest.skip("there is no one file to truncate")
            os.truncate(file, extent.offset + 3 * PAGE_NBYTES + 100)
            with pytest.raises(StorageError, match="truncated") as caught:
                storage.read(extent.offset, aligned_buffer(8 * PAGE_NBYTES), name="x")
            assert caught.value.got == 3 * PAGE_NBYTES
            with pytest.raises(StorageError, match="truncated"):
                storage.read(extent.offset + 6 * PAGE_NBYTES, aligned_buffer(PAGE_NBYTES), name="x")

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
        with FaultyStorage(self.open(tmp_path), fail=nth(action, 3, code), most_nbytes=PAGE_NBYTES) as storage:
            extent = storage.reserve(5 * PAGE_NBYTES, name="w")
            storage.write(extent.offset, aligned_buffer(2 * PAGE_NBYTES), name="w")
            data = aligned_buffer(5 * PAGE_NBYTES)
            storage.fail = nth(action, 3, code)
            if action == "read":
                storage.write(extent.offset, data, name="w")
            with pytest.raises(StorageError) as caught:
                getattr(storage, action)(extent.offset, data, name="w")
            error = caught.value
            assert (error.action, error.name, error.offset, error.wanted) == (action, "w", extent.offset, 5 * PAGE_NBYTES)
            assert (error.got, error.errno, error.path) == (2 * PAGE_NBYTES, code, storage.path)
            getattr(storage, action)(extent.offset, data, name="w")  # the next one is not affected

    def test_threads_at_once(self, tmp_path: Path) -> None:
        with self.open(tmp_path) as storage:
            io = IOThreads(storage, block_nbytes=2 * PAGE_NBYTES, queue_depth=4)
            extents = [storage.reserve(7 * PAGE_NBYTES, name=str(i)) for i in range(8)]
            sources = [aligned_buffer(7 * PAGE_NBYTES, bytes([i + 1, 7])) for i in range(8)]
            targets = [aligned_buffer(7 * PAGE_NBYTES) for _ in range(8)]
            errors: list[BaseException | None] = []
            ended = threading.Semaphore(0)

            def done(error: BaseException | None) -> None:
                errors.append(error)
                ended.release()

            for move, buffers in ((io.write, sources), (io.read, targets)):
                for number, (extent, buffer) in enumerate(zip(extents, buffers, strict=True)):
                    move(extent.offset, buffer, name=str(number), priority=number % 3, done=done)
                for _ in extents:
                    in_time = ended.acquire(timeout=TIMEOUT_S)
                    assert in_time
            joined = io.close(TIMEOUT_S)
            assert joined
            assert errors == [None] * 16
            assert sources == targets
            assert io.moved_nbytes == {"read": 56 * PAGE_NBYTES, "write": 56 * PAGE_NBYTES}

    def test_two_in_one_directory_and_a_stranger(self, tmp_path: Path) -> None:
        stranger = tmp_path / "notes.txt"
        stranger.write_text("keep")
        with self.open(tmp_path) as one:
            mine = one.reserve(PAGE_NBYTES, name="x")
            one.write(mine.offset, aligned_buffer(PAGE_NBYTES, b"one"), name="x")
            with self.open(tmp_path) as two:
                theirs = two.reserve(PAGE_NBYTES, name="x")
                two.write(theirs.offset, aligned_buffer(PAGE_NBYTES, b"two"), name="x")
            back = aligned_buffer(PAGE_NBYTES)
            one.read(mine.offset, back, name="x")
            assert back == aligned_buffer(PAGE_NBYTES, b"one")
        assert stranger.read_text() == "keep"
        assert [p for p in tmp_path.rglob("*") if p.is_file()] == [stranger]

    def test_closing_twice_and_using_after(self, tmp_path: Path) -> None:
        descriptors = _descriptors()
        storage = self.open(tmp_path)
        extent = storage.reserve(PAGE_NBYTES, name="x")
        storage.sync()
        storage.close()
        storage.close()
        with pytest.raises(ClosedError, match="'x'"):
            storage.read(extent.offset, aligned_buffer(PAGE_NBYTES), name="x")
        with pytest.raises(ClosedError):
            storage.write(extent.offset, aligned_buffer(0), name="x")
        with pytest.raises(ClosedError):
            storage.reserve(1, name="y")
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]
        assert _descriptors() == descriptors

    def test_closing_in_flight_lets_the_transfer_end(self, tmp_path: Path) -> None:
        descriptors = _descriptors()
        inner = self.open(tmp_path)
        storage = GatedStorage(inner)
        extent = storage.reserve(PAGE_NBYTES, name="x")
        data, back = aligned_buffer(PAGE_NBYTES, b"late"), aligned_buffer(PAGE_NBYTES)
        storage.write(extent.offset, data, name="x")
        storage.reads.clear()
        reader = threading.Thread(target=storage.read, args=(extent.offset, back), kwargs={"name": "x"}, name="reader")
        reader.start()
        waiting = storage.waiting.acquire(timeout=TIMEOUT_S)
        assert waiting
        storage.close()
        with pytest.raises(ClosedError):
            storage.read(extent.offset, back, name="y")
        storage.reads.set()
        reader.join(TIMEOUT_S)
        assert back == data
        with pytest.raises(ClosedError):
            inner.reserve(1, name="z")
        assert _descriptors() == descriptors


def _descriptors() -> list[str]:
    """What is open in this process."""
    path = Path("/proc/self/fd")
    return sorted(os.readlink(entry) for entry in path.iterdir() if entry.is_symlink()) if path.is_dir() else []
