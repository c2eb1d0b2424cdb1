"""The conformance suite for every backend and wrapper, and what is special about files."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from swapio.errors import StorageError
from swapio.io import (
    FILE_BACKENDS,
    MAX_TRANSFER_NBYTES,
    AiofilesStorage,
    ChecksummedStorage,
    DirectStorage,
    FileStorage,
    MemoryStorage,
    MmapStorage,
    Storage,
    StripedStorage,
)
from swapio.spec import PAGE_NBYTES
from swapio.testing import StorageConformance, aligned_buffer

every_file = pytest.mark.parametrize("kind", FILE_BACKENDS.values(), ids=FILE_BACKENDS)


class _File(StorageConformance):
    def file(self, storage: Storage) -> Path | None:
        assert isinstance(storage, FileStorage)
        return storage.file


class TestDirect(_File):
    def open(self, directory: Path) -> Storage:
        return DirectStorage(directory)


class TestDirectNamed(_File):
    def open(self, directory: Path) -> Storage:
        return DirectStorage(directory, named=True)


class TestMmap(_File):
    def open(self, directory: Path) -> Storage:
        return MmapStorage(directory)


class TestAiofiles(_File):
    def open(self, directory: Path) -> Storage:
        return AiofilesStorage(directory)


class TestAiofilesNamed(_File):
    def open(self, directory: Path) -> Storage:
        return AiofilesStorage(directory, named=True)


class TestMemory(StorageConformance):
    def open(self, directory: Path) -> Storage:
        return MemoryStorage()


class TestChecksummed(StorageConformance):
    def open(self, directory: Path) -> Storage:
        return ChecksummedStorage(DirectStorage(directory))

    def file(self, storage: Storage) -> Path | None:
        assert isinstance(storage, ChecksummedStorage)
        assert isinstance(storage.inner, FileStorage)
        return storage.inner.file


class TestStriped(StorageConformance):
    def open(self, directory: Path) -> Storage:
        members = [DirectStorage(directory), ChecksummedStorage(MmapStorage(directory)), MemoryStorage()]
        return StripedStorage(members, weights=[3, 2, 1], stripe_nbytes=2 * PAGE_NBYTES)

    def test_offsets_above_two_gib(self, tmp_path: Path) -> None:
        with StripedStorage([DirectStorage(tmp_path), MemoryStorage()], stripe_nbytes=1 << 26) as storage:
            extent = storage.reserve(2**33, name="huge")
            data, back = aligned_buffer(2 * PAGE_NBYTES, b"over the edge"), aligned_buffer(2 * PAGE_NBYTES)
            for edge in (extent.offset + 2**26, extent.offset + 2**32, extent.end - PAGE_NBYTES):
                storage.write(edge - PAGE_NBYTES, data, name="huge")
                storage.read(edge - PAGE_NBYTES, back, name="huge")
                assert back == data


class _Counting(MemoryStorage):
    """Moves nothing, notes how much it was asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[int, int]] = []

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        self.asked.append((offset, buffer.nbytes))
        return buffer.nbytes

    _write_some = _read_some


@pytest.mark.parametrize("action", ["read", "write"])
def test_transfers_above_two_gib_are_split(action: str) -> None:
    """One system call of Linux moves at most 2,147,479,552 bytes."""
    nbytes = 2**31 + PAGE_NBYTES
    with _Counting() as storage:
        storage.reserve(nbytes, name="huge")
        getattr(storage, action)(0, aligned_buffer(nbytes), name="huge")
    assert storage.asked == [(0, 2**30), (2**30, 2**30), (2**31, PAGE_NBYTES)]
    assert MAX_TRANSFER_NBYTES < 2_147_479_552


@pytest.mark.slow
@every_file
def test_a_write_above_two_gib(tmp_path: Path, kind: type[FileStorage]) -> None:
    """Really moved once per backend; memory that was never touched costs none."""
    nbytes = 2**31 + PAGE_NBYTES
    with kind(tmp_path) as storage:
        extent = storage.reserve(nbytes, name="huge")
        data = aligned_buffer(nbytes)
        data[:4], data[-4:] = b"head", b"tail"
        storage.write(extent.offset, data, name="huge")
        back = aligned_buffer(PAGE_NBYTES)
        storage.read(extent.offset, back, name="huge")
        assert bytes(back[:4]) == b"head"
        storage.read(extent.end - PAGE_NBYTES, back, name="huge")
        assert bytes(back[-4:]) == b"tail"


@pytest.fixture
def file_limit() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 64 * PAGE_NBYTES
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@every_file
def test_a_file_limit_is_an_error_at_once(tmp_path: Path, file_limit: int, kind: type[FileStorage]) -> None:
    with kind(tmp_path) as storage:
        first = storage.reserve(PAGE_NBYTES, name="first")
        storage.write(first.offset, aligned_buffer(PAGE_NBYTES, b"first"), name="first")
        with pytest.raises(StorageError, match="'big'") as caught:
            storage.reserve(file_limit, name="big")
        assert (caught.value.errno, caught.value.wanted) == (errno.EFBIG, file_limit)
        assert storage.reserved_nbytes == PAGE_NBYTES
        assert storage.file.stat().st_size == PAGE_NBYTES, "half a reservation was kept"
        rest = storage.reserve(file_limit - PAGE_NBYTES, name="fits")
        storage.write(rest.offset, aligned_buffer(PAGE_NBYTES), name="fits")
        back = aligned_buffer(PAGE_NBYTES)
        storage.read(first.offset, back, name="first")
        assert back == aligned_buffer(PAGE_NBYTES, b"first")


@every_file
def test_paths_that_cannot_be_used(tmp_path: Path, kind: type[FileStorage]) -> None:
    with pytest.raises(StorageError, match="none/deeper") as caught:
        kind(tmp_path / "none" / "deeper")
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError):
        kind(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(StorageError, match="/proc/sys"):
        kind("/proc/sys")


@every_file
def test_what_is_no_directory_for_files_says_what_is(tmp_path: Path, kind: type[FileStorage]) -> None:
    (tmp_path / "file").touch()
    for path, why in ((Path("/proc"), "no file can be made there"), (tmp_path / "file", "that is no directory")):
        with pytest.raises(StorageError, match=rf"{why}: give a directory .*nvme_path.*path {path}"):
            kind(path)


def test_a_new_directory_is_private(tmp_path: Path) -> None:
    with DirectStorage(tmp_path / "new"):
        assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


class _Coarse(DirectStorage):
    """A filesystem that wants larger blocks."""

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        if buffer.nbytes % 16384:
            raise OSError(errno.EINVAL, "misaligned")
        return super()._write_some(offset, buffer, name)


def test_a_refusal_says_what_would_work(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match='backend="mmap"') as caught:
        _Coarse(tmp_path)
    assert caught.value.errno == errno.EINVAL
    assert str(tmp_path) in str(caught.value)


class _NoFallocate(DirectStorage):
    """A filesystem that cannot reserve: zeros are written instead."""

    def _allocate(self, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")


def test_reserving_where_the_filesystem_cannot(tmp_path: Path, file_limit: int) -> None:
    with _NoFallocate(tmp_path) as storage:
        storage.reserve(5 * PAGE_NBYTES, name="x")
        assert storage.file.stat().st_blocks * 512 >= 5 * PAGE_NBYTES
        with pytest.raises(StorageError) as caught:
            storage.reserve(file_limit, name="big")
        assert (caught.value.action, caught.value.errno) == ("reserve", errno.EFBIG)
        assert storage.file.stat().st_size == 5 * PAGE_NBYTES


class _Shrinking(MmapStorage):
    """The file is truncated between the moment it was read and the moment it is mapped or touched."""

    shrink_to: int | None = None

    def _fill_cache(self, offset: int, nbytes: int) -> int:
        cached = super()._fill_cache(offset, nbytes)
        if self.shrink_to is not None:
            os.truncate(self.file, self.shrink_to)
        return cached


def test_truncation_in_the_middle_of_a_mapped_read(tmp_path: Path) -> None:
    with _Shrinking(tmp_path) as storage:
        extent = storage.reserve(8 * PAGE_NBYTES, name="x")
        storage.shrink_to = 2 * PAGE_NBYTES
        with pytest.raises(StorageError, match="truncated"):
            storage.read(extent.offset, aligned_buffer(8 * PAGE_NBYTES), name="x")


def test_a_forked_child_removes_nothing(tmp_path: Path) -> None:
    with DirectStorage(tmp_path, named=True) as storage:
        child = os.fork()
        if not child:
            storage.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert storage.file.exists()
        extent = storage.reserve(PAGE_NBYTES, name="x")
        storage.write(extent.offset, aligned_buffer(PAGE_NBYTES), name="x")
