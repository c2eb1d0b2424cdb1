from __future__ import annotations

import contextlib
import errno
from pathlib import Path

import pytest

from swapio.errors import StorageError
from swapio.io import FILE_BACKENDS, ChecksummedStorage, FileStorage, MemoryStorage, StripedStorage
from swapio.spec import PAGE_NBYTES
from swapio.testing import FaultyStorage, aligned_buffer, nth


def flip(file: Path, offset: int) -> None:
    """One bit, past the storage."""
    with file.open("r+b") as raw:
        raw.seek(offset)
        byte = raw.read(1)[0]
        raw.seek(offset)
        raw.write(bytes([byte ^ 1]))


Opened = tuple[ChecksummedStorage | StripedStorage, FileStorage]


@pytest.fixture(params=[*FILE_BACKENDS, "named", "outside stripes", "inside stripes"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """A checked storage, and the file in which block 5 of the first extent lies at the same offset."""
    file = FILE_BACKENDS.get(request.param, FILE_BACKENDS["direct"])(tmp_path, named=request.param == "named")
    if request.param == "outside stripes":
        return ChecksummedStorage(StripedStorage([file, MemoryStorage()], weights=[1e6, 1])), file
    if request.param == "inside stripes":
        return StripedStorage([ChecksummedStorage(file), MemoryStorage()], weights=[1e6, 1]), file
    return ChecksummedStorage(file), file


def test_a_flipped_bit_is_an_error_that_names_the_block(opened: Opened) -> None:
    storage, file = opened
    with storage:
        extent = storage.reserve(9 * PAGE_NBYTES, name="weights")
        data, back = aligned_buffer(9 * PAGE_NBYTES, b"0123456789a"), aligned_buffer(9 * PAGE_NBYTES)
        storage.write(extent.offset, data, name="weights")
        storage.sync()
        flip(file.file, 5 * PAGE_NBYTES + 77)
        with pytest.raises(StorageError, match=r"'weights'.*first is block 5 at offset 20480: xxhash") as caught:
            storage.read(extent.offset, back, name="weights")
        assert (caught.value.errno, caught.value.got) == (errno.EIO, 5 * PAGE_NBYTES)
        assert file.path in caught.value.path
        storage.read(extent.offset, back[: 5 * PAGE_NBYTES], name="weights")  # the others are good
        storage.write(extent.offset + 5 * PAGE_NBYTES, data[5 * PAGE_NBYTES : 6 * PAGE_NBYTES], name="weights")
        storage.read(extent.offset, back, name="weights")
        assert back == data


def test_parts_are_checked_whatever_was_written_together() -> None:
    inner = MemoryStorage()
    with ChecksummedStorage(inner) as storage:
        extent = storage.reserve(8 * PAGE_NBYTES, name="x")
        storage.write(extent.offset, aligned_buffer(8 * PAGE_NBYTES, b"one"), name="x")
        storage.write(extent.offset + 2 * PAGE_NBYTES, aligned_buffer(3 * PAGE_NBYTES, b"another"), name="x")
        for first in range(8):
            for last in range(first, 8):
                storage.read(extent.offset + first * PAGE_NBYTES, aligned_buffer((last - first + 1) * PAGE_NBYTES), name="x")
        inner.write(extent.offset + 4 * PAGE_NBYTES, aligned_buffer(PAGE_NBYTES), name="x")
        for first in range(8):
            with pytest.raises(StorageError) if first <= 4 else contextlib.nullcontext():
                storage.read(extent.offset + first * PAGE_NBYTES, aligned_buffer((8 - first) * PAGE_NBYTES), name="x")


def test_what_was_never_written_is_not_checked() -> None:
    with ChecksummedStorage(MemoryStorage()) as storage:
        for number in range(3):
            extent = storage.reserve(5 * PAGE_NBYTES, name=str(number))
            content = aligned_buffer(5 * PAGE_NBYTES, b"before")
            storage.read(extent.offset, content, name=str(number))
            assert bytes(content) == bytes(5 * PAGE_NBYTES)


def test_a_write_that_failed_half_way_cannot_be_read() -> None:
    faulty = FaultyStorage(MemoryStorage(), most_nbytes=PAGE_NBYTES)
    with ChecksummedStorage(faulty) as storage:
        extent = storage.reserve(4 * PAGE_NBYTES, name="x")
        storage.write(extent.offset, aligned_buffer(4 * PAGE_NBYTES, b"old"), name="x")
        faulty.fail = nth("write", 3, errno.EIO)
        with pytest.raises(StorageError, match="write of 'x'"):
            storage.write(extent.offset, aligned_buffer(4 * PAGE_NBYTES, b"new"), name="x")
        with pytest.raises(StorageError, match="not what was written"):
            storage.read(extent.offset, aligned_buffer(4 * PAGE_NBYTES), name="x")
        storage.write(extent.offset, aligned_buffer(4 * PAGE_NBYTES, b"new"), name="x")
        storage.read(extent.offset, aligned_buffer(4 * PAGE_NBYTES), name="x")
