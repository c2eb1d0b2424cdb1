"""A record that begins with bytes of others, which it reads where they are until it is written."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import swapio
from swapio.io import MemoryStorage
from swapio.swap import Record
from swapio.testing import FaultyStorage, GatedStorage

PARTS = ((0, 1, 128), (4000, 4097, 333), (4333, 20_000, 10_007))
"""Byte of the borrower, of the lender, and how many."""


@pytest.fixture(params=["cpu", "simulated"])
def manager(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[swapio.SwapManager]:
    with swapio.SwapManager([tmp_path], host_memory="1MiB", device=str(request.param), timeout_s=20) as manager:
        yield manager


def borrow(manager: swapio.SwapManager) -> tuple[Record, torch.Tensor]:
    """A borrower whose lender was deleted, and its content."""
    values = torch.randint(0, 256, (50_000,), dtype=torch.uint8)
    manager.put("lender", values)
    manager.evict(["lender"]).wait()
    lender, record = manager.record("lender"), manager.create("borrower", 20_000)
    record.borrowed = [(at, manager.lend(lender, start, nbytes)) for at, start, nbytes in PARTS]
    manager.delete("lender")
    want = torch.zeros(20_000, dtype=torch.uint8)
    for at, start, nbytes in PARTS:
        want[at : at + nbytes] = values[start : start + nbytes]
    return record, want


def check(manager: swapio.SwapManager, want: torch.Tensor) -> None:
    manager.evict(["borrower"]).wait()
    with manager.acquire("borrower") as lease:
        assert torch.equal(lease.tensor, want)


def test_bytes_stay_as_long_as_they_are_read(manager: swapio.SwapManager) -> None:
    record, want = borrow(manager)
    written, reserved = manager.stats()["bytes_written"], manager.storage.reserved_nbytes
    manager.put("junk", torch.zeros(60_000, dtype=torch.uint8))
    manager.evict(["junk"]).wait()
    manager.delete("junk")
    for _ in range(2):
        check(manager, want)
    assert manager.prefetch(["borrower"]).wait() == 1
    assert manager.stats()["bytes_written"] - written == 61_440
    with manager.acquire("borrower", on="host") as lease:
        lease.tensor[5000:5003] = want[5000:5003] = 9
        lease.mark_dirty(span=slice(5000, 5003))
    check(manager, want)
    assert not record.borrowed
    gc.collect()
    manager.flush().wait()
    assert manager.storage.reserved_nbytes == reserved - 53_248
    check(manager, want)


def test_an_end_gives_all_back(manager: swapio.SwapManager) -> None:
    borrow(manager)
    manager.delete("borrower")
    gc.collect()
    manager.flush().wait()
    assert manager.storage.reserved_nbytes == 0
    record, _ = borrow(manager)
    manager.discard(record)
    check(manager, torch.zeros(20_000, dtype=torch.uint8))


def test_newer_bytes_are_not_lent(manager: swapio.SwapManager) -> None:
    record = manager.create("lender", 5000)
    with manager.acquire("lender", on="host") as lease:
        lease.mark_dirty()
        lease.publish()
        with pytest.raises(swapio.UsageError, match="evict"):
            manager.lend(record, 0, 10)


def test_errors() -> None:
    storage = FaultyStorage(MemoryStorage())
    with swapio.SwapManager(storage=storage, host_memory="1MiB", timeout_s=20) as manager:
        _, want = borrow(manager)
        storage.fail = lambda action, name: errno.EIO if action == "read" else 0
        with pytest.raises(swapio.StorageError, match="EIO"), manager.acquire("borrower"):
            pass
        storage.fail = None
        check(manager, want)
        storage.fail = lambda action, name: errno.EIO if action == "write" else 0
        with manager.acquire("borrower") as lease:
            lease.tensor[0] = want[0] = 3
            lease.mark_dirty(span=slice(0, 1))
        with pytest.raises(swapio.StorageError, match="EIO"):
            manager.flush().wait()
        storage.fail = None
        manager.flush().wait()
        check(manager, want)


def test_closing_while_it_is_read() -> None:
    storage = GatedStorage(MemoryStorage())
    manager = swapio.SwapManager(storage=storage, host_memory="1MiB", timeout_s=20)
    borrow(manager)
    storage.reads.clear()
    transfer = manager.prefetch(["borrower"])
    assert storage.waiting.acquire(timeout=20)
    manager.close()
    storage.reads.set()
    with pytest.raises(swapio.ClosedError):
        transfer.wait()
