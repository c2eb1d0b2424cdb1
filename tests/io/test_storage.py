from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.errors import ClosedError, ConfigError, StorageError
from swapio.io import DirectStorage, ExtentAllocator, IOThreads, MemoryStorage, Storage, make_scratch, open_storage, remove_orphans
from swapio.spec import PAGE_NBYTES, Extent
from swapio.testing import GatedStorage, StorageConformance, aligned_buffer


class TestDirect(StorageConformance):
    def open(self, directory: Path) -> Storage:
        return DirectStorage(directory)

    def raw_read(self, storage: Storage, offset: int, nbytes: int) -> bytes:
        assert isinstance(storage, DirectStorage)
        with open(f"/proc/self/fd/{storage.fileno()}", "rb") as file:
            file.seek(offset)
            return file.read(nbytes)


class TestDirectNamed(StorageConformance):
    def open(self, directory: Path) -> Storage:
        return DirectStorage(directory, named=True)


class TestMemory(StorageConformance):
    def open(self, directory: Path) -> Storage:
        return MemoryStorage()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60))
def test_extents_never_overlap(steps: list[tuple[bool, int]]) -> None:
    allocator = ExtentAllocator()
    used: list[Extent] = []
    for take, number in steps:
        if take or not used:
            extent = allocator.take(number)
            assert all(extent.end <= u.offset or u.end <= extent.offset or not extent.nbytes or not u.nbytes for u in used)
            used.append(extent)
        else:
            allocator.give_back(used.pop(number % len(used)))
        assert allocator.end - allocator.free_nbytes == sum(u.nbytes for u in used)
    for extent in used:
        allocator.give_back(extent)
    assert allocator.free_nbytes == allocator.end


def test_an_extent_is_given_back_once() -> None:
    allocator = ExtentAllocator()
    extent = allocator.take(8)
    allocator.give_back(extent)
    with pytest.raises(ValueError, match="not in use"):
        allocator.give_back(extent)


@pytest.fixture
def file_limit() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 64 * PAGE_NBYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_limit_is_an_error_at_once(tmp_path: Path, file_limit: int) -> None:
    with DirectStorage(tmp_path) as storage:
        with pytest.raises(StorageError) as caught:
            storage.reserve(file_limit + PAGE_NBYTES, name="big")
        assert caught.value.errno == errno.EFBIG
        extent = storage.reserve(file_limit - PAGE_NBYTES, name="fits")
        storage.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="fits")


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    with DirectStorage(tmp_path) as storage:
        extent = storage.reserve(8 * PAGE_NBYTES, name="x")
        os.truncate(f"/proc/self/fd/{storage.fileno()}", extent.offset + 3 * PAGE_NBYTES)
        with pytest.raises(StorageError, match="truncated") as caught:
            storage.read(extent.offset, aligned_buffer(8 * PAGE_NBYTES), name="x")
        assert caught.value.got == 3 * PAGE_NBYTES


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="none/deeper") as caught:
        DirectStorage(tmp_path / "none" / "deeper")
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError):
        DirectStorage(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ConfigError, match="backend"):
        open_storage([tmp_path], backend="floppy")
    if Path("/proc/sys").is_dir():
        with pytest.raises(StorageError):
            DirectStorage("/proc/sys")


def test_files_are_ours_alone(tmp_path: Path) -> None:
    with DirectStorage(tmp_path, named=True) as storage:
        file = Path(storage.path)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert file.parent.parent.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_our_folder_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    (target / f"{os.getpid()}-1-0").mkdir()
    path = tmp_path / "drive"
    path.mkdir()
    (path / f"swapio-{os.getuid()}").symlink_to(target)
    assert remove_orphans(path) == []
    with pytest.raises(StorageError, match="no folder of this user"):
        make_scratch(path)
    assert len(list(target.iterdir())) == 1


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    root = tmp_path / f"swapio-{os.getuid()}"
    script = (
        "import sys, time; from swapio.io import DirectStorage\n"
        "a = DirectStorage(sys.argv[1], named=True); b = DirectStorage(sys.argv[1]); a.reserve(1 << 20, name='x'); b.reserve(1 << 20, name='x')\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with DirectStorage(tmp_path) as storage:
            storage.reserve(PAGE_NBYTES, name="mine")
            assert len(list(root.iterdir())) == 1, "the files of a living process were removed"
        child.send_signal(signal.SIGKILL)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("keep")
    (root / "stranger").mkdir()
    assert len(list(root.iterdir())) == 2
    DirectStorage(tmp_path).close()
    assert [p.name for p in root.iterdir()] == ["stranger"]
    assert foreign.read_text() == "keep"


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
            assert storage.waiting.acquire(timeout=10)
    storage.reads.set()
    for _ in range(4):
        assert ended.acquire(timeout=10)
    assert order == ["first", "soon", "late", "later"]
    assert io.close(10)


def test_closing_fails_what_is_queued_and_says_when_a_thread_hangs() -> None:
    storage = GatedStorage(MemoryStorage())
    extent = storage.reserve(PAGE_NBYTES, name="x")
    io = IOThreads(storage, queue_depth=1)
    storage.writes.clear()
    errors: list[BaseException | None] = []
    for name in "ab":
        io.write(extent.offset, aligned_buffer(PAGE_NBYTES), name=name, priority=0, done=errors.append)
    assert storage.waiting.acquire(timeout=10)
    assert not io.close(0.01)
    assert [type(e) for e in errors] == [ClosedError]
    io.read(extent.offset, aligned_buffer(PAGE_NBYTES), name="c", priority=0, done=errors.append)
    assert type(errors[-1]) is ClosedError
    storage.writes.set()
    assert io.close(10)
    assert errors[-1] is None


@pytest.mark.parametrize("wrong", [{"block_nbytes": 1000}, {"block_nbytes": 0}, {"queue_depth": 0}])
def test_io_threads_refuse_what_cannot_work(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="use for example"):
        IOThreads(MemoryStorage(), **wrong)
