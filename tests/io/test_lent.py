from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable
from pathlib import Path

import pytest

from swapio.errors import ClosedError, StorageError
from swapio.io import ChecksummedStorage, DirectStorage, IOThreads, LentExtent, MemoryStorage, Storage, StripedStorage, aligned_buffer
from swapio.spec import PAGE_NBYTES
from swapio.testing import FaultyStorage

NBYTES = 6 * PAGE_NBYTES
SIZES = (0, 1, PAGE_NBYTES - 1, PAGE_NBYTES, PAGE_NBYTES + 1, 10_007)

STORAGES: dict[str, Callable[[Path], Storage]] = {
    "memory": lambda path: MemoryStorage(),
    "direct": lambda path: DirectStorage(path),
    "checksummed": lambda path: ChecksummedStorage(MemoryStorage()),
    "striped": lambda path: StripedStorage([MemoryStorage(), MemoryStorage()], stripe_nbytes=PAGE_NBYTES),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_any_bytes_into_any_memory(tmp_path: Path, kind: str) -> None:
    with STORAGES[kind](tmp_path) as storage:
        storage.reserve(PAGE_NBYTES, name="before")
        extent = storage.reserve(NBYTES, name="lent")
        content = aligned_buffer(NBYTES, os.urandom(NBYTES))
        storage.write(extent.offset, content, name="lent")
        lent = LentExtent(storage, extent)
        for start in (0, 1, 128, PAGE_NBYTES - 1, PAGE_NBYTES, 5003):
            for nbytes in SIZES:
                for at in (0, 1, 64):
                    into = aligned_buffer(NBYTES)
                    lent.read(extent.offset + start, into[at : at + nbytes], name="part")
                    assert into[at : at + nbytes] == content[start : start + nbytes]
                    assert not any(into[:at]) and not any(into[at + nbytes :])
        with IOThreads(storage, block_nbytes=PAGE_NBYTES) as threads:
            ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            into = aligned_buffer(NBYTES)
            threads.read(extent.offset + 7, into[3 : NBYTES - 7], name="part", priority=0, done=ended.put, storage=lent)
            assert ended.get(timeout=20) is None
        assert into[3 : NBYTES - 7] == content[7 : NBYTES - 3]


def test_errors() -> None:
    storage = FaultyStorage(MemoryStorage())
    extent = storage.reserve(NBYTES, name="lent")
    lent = LentExtent(storage, extent)
    page = aligned_buffer(PAGE_NBYTES)
    with pytest.raises(StorageError, match="reserved"):
        lent.read(extent.end - 10, page[:11], name="behind the end")
    with pytest.raises(StorageError, match="EROFS"):
        lent.write(extent.offset, page, name="x")
    with pytest.raises(StorageError, match="EROFS"):
        lent.reserve(1, name="x")
    storage.fail = lambda action, name: errno.EIO
    with pytest.raises(StorageError, match="EIO"):
        lent.read(extent.offset + 1, page[:5], name="x")
    storage.close()
    with pytest.raises(ClosedError):
        lent.read(extent.offset, page, name="x")
