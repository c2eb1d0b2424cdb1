"""The store alone, in both styles."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio.io import DirectStorage, MemoryStorage
from swapio.swap import MAY_START, Place, Record, Residency, TensorSpec
from swapio.testing import FaultyStorage, GatedStorage

MIB = 2**20


@pytest.fixture(params=["cpu", "simulated"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manager(tmp_path: Path, device: str) -> Iterator[swapio.SwapManager]:
    with swapio.SwapManager(paths=[str(tmp_path)], host_memory="1MiB", device=device, timeout_s=20) as manager:
        yield manager


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(t: torch.Tensor) -> bytes:
        return t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""

    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def test_the_readme_example(tmp_path: Path) -> None:
    tensor = torch.randn(100, 100)
    with swapio.SwapManager(paths=[tmp_path], host_memory="1GiB", device="cpu") as manager:
        manager.put("layer.0", tensor)
        manager.prefetch(["layer.0"])
        with manager.acquire("layer.0") as lease:
            lease.tensor.mul_(0.5)
            lease.mark_dirty()
        manager.evict(["layer.0"])
        manager.flush().wait()
        with manager.acquire("layer.0") as lease:
            assert torch.equal(lease.tensor, tensor * 0.5)
        stats = manager.stats()
    assert stats["bytes_on_nvme"] == tensor.nbytes
    assert stats["hits"] + stats["misses"] == 3


async def test_the_same_in_async(tmp_path: Path, device: str) -> None:
    tensor = torch.randn(100, 100)
    async with swapio.SwapManager(paths=[tmp_path], host_memory="64KiB", device=device, timeout_s=20) as manager:
        await manager.put("a", tensor)
        assert await manager.prefetch(["a"]) == 1
        async with manager.acquire("a") as lease:
            lease.tensor.add_(1)
            lease.mark_dirty()
        await manager.evict(["a"])
        await manager.flush()
        lease = await manager.acquire("a")
        assert torch.equal(lease.tensor, tensor + 1)
        lease.release()


async def test_tasks_share_a_small_budget(tmp_path: Path) -> None:
    async with swapio.SwapManager(paths=[tmp_path], host_memory="40KiB", device="cpu", timeout_s=20) as manager:
        for i in range(6):
            await manager.put(str(i), torch.zeros(2048))  # 8 KiB each

        async def add(i: int) -> None:
            for _ in range(10):
                async with manager.acquire(str(i)) as lease:
                    lease.tensor.add_(1)
                    lease.mark_dirty()
                    await asyncio.sleep(0)

        await asyncio.gather(*(add(i % 6) for i in range(6)))
        for i in range(6):
            async with manager.acquire(str(i)) as lease:
                assert torch.equal(lease.tensor, torch.full((2048,), 10.0))


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bytes(manager: swapio.SwapManager, dtype: torch.dtype) -> None:
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (7, 9, 16), dtype=torch.uint8)
    tensor = raw.view(dtype) if dtype is not torch.bool else raw.bool()
    shapes: list[torch.Tensor] = [
        tensor, tensor[0, 0, 0], tensor[:0], tensor.transpose(0, 2), tensor[:, ::2], tensor[1:2].expand(5, -1, -1), tensor[2:, 3:, 1:],
    ]  # fmt: skip
    for i, value in enumerate(shapes):
        manager.put(str(i), value)
    manager.evict(manager.keys()).wait()
    for i, value in enumerate(shapes):
        with manager.acquire(str(i)) as lease:
            assert lease.tensor.stride() == value.stride()
            assert same_bytes(lease.tensor, value)


def test_nan_payloads_and_negative_zero(manager: swapio.SwapManager) -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800001, -0x00400000 + 5, -0x80000000, 1, 0], dtype=torch.int32)
    manager.put("x", bits.view(torch.float32)).wait()
    manager.evict(["x"]).wait()
    with manager.acquire("x") as lease:
        assert torch.equal(lease.tensor.view(torch.int32), bits)


def test_tensors_that_cannot_be_stored(manager: swapio.SwapManager) -> None:
    with pytest.raises(swapio.UsageError, match="to_dense"):
        manager.put("x", torch.eye(3).to_sparse())
    with pytest.raises(KeyError, match="put it first"):
        manager.acquire("nothing").wait()
    with pytest.raises(swapio.ConfigError, match="home"):
        manager.put("x", torch.ones(1), home="floppy")


def test_fifteen_hundred_tensors_of_one_element(manager: swapio.SwapManager) -> None:
    for i in range(1500):
        manager.put(f"t{i}", torch.tensor(float(i)))
    for i in range(1500):
        with manager.acquire(f"t{i}") as lease:
            assert lease.tensor.item() == i
    assert manager.stats()["host_memory_peak"] <= MIB


def test_putting_again_replaces(manager: swapio.SwapManager) -> None:
    manager.put("x", torch.ones(10))
    manager.put("x", torch.zeros(2000, dtype=torch.int16))
    with manager.acquire("x") as lease:
        assert same_bytes(lease.tensor, torch.zeros(2000, dtype=torch.int16))
        with pytest.raises(swapio.UsageError, match="in use"):
            manager.put("x", torch.ones(1))
    manager.delete("x")
    assert "x" not in manager


def test_a_tensor_beyond_the_budget_is_an_error_at_once(manager: swapio.SwapManager) -> None:
    with pytest.raises(swapio.BudgetError, match="'big' needs") as caught:
        manager.put("big", torch.zeros(MIB))
    assert caught.value.works_nbytes is not None
    assert caught.value.works_nbytes >= 4 * MIB
    assert "big" not in manager
    manager.put("small", torch.ones(4))


def test_the_budget_that_is_named_works(tmp_path: Path) -> None:
    def run(budget: int) -> None:
        with swapio.SwapManager(paths=[tmp_path], host_memory=budget, timeout_s=20) as manager:
            for key in "abc":
                manager.put(key, torch.zeros(10_000))
            with manager.acquire("a"), manager.acquire("b"), manager.acquire("c") as lease:
                assert lease.tensor.sum() == 0

    with pytest.raises(swapio.BudgetError, match=r"a \(in use\)") as caught:
        run(100_000)
    assert caught.value.works_nbytes is not None
    run(caught.value.works_nbytes)


def test_what_others_hold_is_waited_for(tmp_path: Path) -> None:
    with swapio.SwapManager(paths=[tmp_path], host_memory=48 * 1024, timeout_s=20) as manager:
        for key in "ab":
            manager.put(key, torch.zeros(8 * 1024))  # 32 KiB each: one at a time
        manager.flush().wait()
        lease = manager.acquire("a").wait()
        got = threading.Event()

        def other() -> None:
            with manager.acquire("b"):
                got.set()

        thread = threading.Thread(target=other, name="other")
        thread.start()
        assert not got.wait(0.05)
        lease.release()
        assert got.wait(10)
        thread.join()


def test_two_who_wait_for_each_other_get_an_error(tmp_path: Path) -> None:
    with swapio.SwapManager(paths=[tmp_path], host_memory=64 * 1024, timeout_s=20) as manager:
        for key in "abcd":
            manager.put(key, torch.zeros(8 * 1024))
        barrier = threading.Barrier(2)
        errors: list[BaseException] = []

        def take_two(first: str, second: str) -> None:
            with manager.acquire(first):
                barrier.wait(10)
                try:
                    with manager.acquire(second):
                        pass
                except swapio.BudgetError as error:
                    errors.append(error)

        threads = [threading.Thread(target=take_two, args=pair, name=f"taker-{pair}") for pair in ("ab", "cd")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
            assert not thread.is_alive()
        assert errors


def test_clean_data_is_never_written_and_zeros_are_not_read(manager: swapio.SwapManager) -> None:
    events: list[tuple[str, str]] = []
    manager.mover.on_event = lambda kind, key: events.append((kind, key))
    manager.create("zeros", 100_000)
    for _ in range(3):
        with manager.acquire("zeros") as lease:
            assert not lease.tensor.any()
        manager.evict(["zeros"]).wait()
    assert not {kind for kind, _ in events} & {"read", "write"}
    with manager.acquire("zeros") as lease:
        lease.tensor.fill_(3)
        lease.mark_dirty()
    manager.flush().wait()
    manager.evict(["zeros"]).wait()
    for _ in range(2):
        with manager.acquire("zeros") as lease:
            assert lease.tensor.eq(3).all()
    assert [kind for kind, _ in events].count("write") == 1


def test_a_part_of_a_record_can_be_stored(manager: swapio.SwapManager) -> None:
    """The rest is zeros, also in memory that was used before."""
    manager.put("junk", torch.full((50_000,), 7, dtype=torch.uint8))
    manager.delete("junk")
    record = manager.create("part", 50_000)
    with manager.acquire("part", on="host") as lease:
        lease.tensor[:5000] = 1
        lease.mark_dirty(nbytes=5000)
    manager.flush().wait()
    manager.evict(["part"]).wait()
    assert record.stored_nbytes == 5000
    with manager.acquire("part") as lease:
        assert lease.tensor[:5000].eq(1).all()
        assert not lease.tensor[5000:].any()


SPANS = [(0, 0), (0, 1), (0, 4095), (1, 4096), (4096, 8192), (4095, 4097), (8191, 20011), (49_999, 50_000), (0, 50_000)]


@pytest.mark.parametrize("stored", [0, 1, 4096, 5000, 50_000])
@pytest.mark.parametrize("spans", [SPANS[i : i + 2] for i in range(len(SPANS))])
def test_only_changed_bytes_are_written_back(manager: swapio.SwapManager, stored: int, spans: list[tuple[int, int]]) -> None:
    """Whole pages around them, and what lies between them and what was stored before."""
    want = torch.zeros(50_000, dtype=torch.uint8)
    record = manager.create("key", 50_000)
    with manager.acquire("key", on="host") as lease:
        lease.tensor[:stored] = want[:stored] = 1
        lease.mark_dirty(nbytes=stored)
    manager.flush().wait()
    for value, (start, stop) in enumerate(spans, start=2):
        before, stored = manager.stats()["bytes_written"], record.stored_nbytes
        with manager.acquire("key", on="host") as lease:
            lease.tensor[start:stop] = want[start:stop] = value
            lease.mark_dirty(span=slice(start, stop))
        manager.flush().wait()
        first = min(start, stored) // 4096
        assert manager.stats()["bytes_written"] - before == 4096 * max(-(-stop // 4096) - first if stop > min(start, stored) else 0, 0)
        manager.evict(["key"]).wait()
        with manager.acquire("key") as lease:
            assert torch.equal(lease.tensor, want)


def test_a_part_that_could_not_be_written_is_written_with_the_next() -> None:
    storage = FaultyStorage(MemoryStorage())
    with swapio.SwapManager(storage=storage, host_memory="1MiB", timeout_s=20) as manager:
        want = torch.full((50_000,), 1, dtype=torch.uint8)
        manager.put("key", want.clone())
        manager.flush().wait()
        for span, code in ((slice(0, 10), errno.EIO), (slice(40_000, 40_010), 0)):
            storage.fail = lambda action, name, code=code: code if action == "write" else 0
            with manager.acquire("key", on="host") as lease:
                lease.tensor[span] = want[span] = 2
                lease.mark_dirty(span=span)
            with pytest.raises(swapio.StorageError) if code else contextlib.nullcontext():
                manager.flush().wait()
        manager.evict(["key"]).wait()
        with manager.acquire("key") as lease:
            assert torch.equal(lease.tensor, want)


def test_a_view_keeps_its_bytes(manager: swapio.SwapManager) -> None:
    manager.put("x", torch.arange(1000.0)).wait()
    with manager.acquire("x") as lease:
        view = lease.tensor[10:20]
    for i in range(40):
        manager.put(f"other{i}", torch.full((20_000,), float(i)))
    assert torch.equal(view, torch.arange(10.0, 20.0))
    del view
    gc.collect()
    manager.flush().wait()


def test_threads_at_once(manager: swapio.SwapManager) -> None:
    num_keys, rounds = 10, 20
    for i in range(num_keys):
        manager.put(str(i), torch.zeros(30_000, dtype=torch.int32))  # 1.2 MB in all, over 1 MiB of memory
    locks = [threading.Lock() for _ in range(num_keys)]
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(rounds):
                key = (seed * 7 + i * 3) % num_keys
                with locks[key], manager.acquire(str(key)) as lease:
                    lease.tensor.add_(1)
                    lease.mark_dirty()
                if i % 5 == 0:
                    manager.prefetch([str((key + 1) % num_keys)])
                if i % 7 == 0:
                    manager.evict([str(key)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s,), name=f"worker-{s}") for s in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    total = 0
    for i in range(num_keys):
        with manager.acquire(str(i)) as lease:
            assert lease.tensor.eq(lease.tensor[0]).all()
            total += int(lease.tensor[0])
    assert total == 4 * rounds
    assert manager.stats()["host_memory_peak"] <= MIB


# --- failures ---


def faulty(storage: Any, **kwargs: Any) -> swapio.SwapManager:
    return swapio.SwapManager(storage=storage, host_memory=kwargs.pop("host_memory", "100KiB"), timeout_s=20, **kwargs)


def test_a_failed_read_reaches_whoever_waits(device: str) -> None:
    storage = FaultyStorage(MemoryStorage())
    with faulty(storage, device=device) as manager:
        manager.put("x", torch.ones(1000)).wait()
        manager.flush().wait()
        manager.evict(["x"]).wait()
        storage.fail = lambda action, name: errno.EIO if action == "read" else 0
        with pytest.raises(swapio.StorageError, match="'x'"), manager.acquire("x"):
            pass
        assert manager.prefetch(["x"]).__class__ is swapio.Transfer
        with pytest.raises(swapio.StorageError):
            manager.prefetch(["x"]).wait()
        storage.fail = None
        with manager.acquire("x") as lease:
            assert lease.tensor.eq(1).all()


def test_a_failed_write_keeps_the_only_copy(device: str) -> None:
    storage = FaultyStorage(MemoryStorage(), fail=lambda action, name: errno.ENOSPC if action == "write" else 0)
    with faulty(storage, device=device) as manager:
        manager.put("x", torch.arange(1000.0))
        with pytest.raises(swapio.StorageError, match="ENOSPC"):
            manager.flush().wait()
        record = manager.record("x")
        assert record.dirty
        assert record.residency is Residency.FAILED
        with pytest.raises(swapio.StorageError, match="ENOSPC"):
            for i in range(5):
                manager.put(f"y{i}", torch.zeros(10_000))
        storage.fail = None
        manager.flush().wait()
        manager.evict(["x"]).wait()
        with manager.acquire("x") as lease:
            assert torch.equal(lease.tensor, torch.arange(1000.0))


def test_a_wait_has_a_limit_and_says_what_is_pending() -> None:
    storage = GatedStorage(MemoryStorage())
    with swapio.SwapManager(storage=storage, host_memory="1MiB", timeout_s=0.2) as manager:
        manager.put("slow", torch.ones(10))
        manager.flush().wait()
        manager.evict(["slow"]).wait()
        storage.reads.clear()
        with pytest.raises(swapio.TransferTimeoutError, match=r"acquire of 'slow'.*slow READING for"):
            manager.acquire("slow").wait()
        transfer = manager.prefetch(["slow"])
        assert not transfer.done()
        with pytest.raises(swapio.TransferTimeoutError):
            transfer.wait(0.05)
        storage.reads.set()
        transfer.wait(10)
        with manager.acquire("slow") as lease:
            assert lease.tensor.eq(1).all()
        manager.evict(["slow"]).wait()
        assert not manager.record("slow").pins


def test_fetching_during_a_write_back_joins_the_host_copy() -> None:
    storage = GatedStorage(MemoryStorage())
    with swapio.SwapManager(storage=storage, host_memory="1MiB", timeout_s=20) as manager:
        events: list[tuple[str, str]] = []
        manager.put("x", torch.zeros(1000))
        storage.writes.clear()
        manager.mover.on_event = lambda kind, key: events.append((kind, key))
        flush = manager.flush()
        assert storage.waiting.acquire(timeout=10)
        with manager.acquire("x") as lease:
            lease.tensor.add_(1)
            lease.mark_dirty()
        storage.writes.set()
        flush.wait()
        manager.evict(["x"]).wait()
        assert ("read", "x") not in events
        with manager.acquire("x") as lease:
            assert lease.tensor.eq(1).all()
        assert events.count(("write", "x")) == 2


@pytest.mark.parametrize("gate", ["reads", "writes"])
def test_closing_while_bytes_are_in_flight(gate: str) -> None:
    storage = GatedStorage(MemoryStorage())
    manager = swapio.SwapManager(storage=storage, host_memory="1MiB", timeout_s=20)
    manager.put("x", torch.ones(1000))
    if gate == "reads":
        manager.flush().wait()
        manager.evict(["x"]).wait()
    getattr(storage, gate).clear()
    transfer = manager.prefetch(["x"]) if gate == "reads" else manager.flush()
    assert storage.waiting.acquire(timeout=10)
    closer = threading.Thread(target=manager.close, name="closer")
    closer.start()
    closer.join(6)
    assert not closer.is_alive()
    with pytest.raises(swapio.ClosedError):
        transfer.wait(1)
    with pytest.raises(swapio.ClosedError):
        manager.put("y", torch.ones(1))
    getattr(storage, gate).set()
    manager.close()


def test_a_full_drive_is_an_error_of_put(tmp_path: Path) -> None:
    with swapio.SwapManager(storage=MemoryStorage(capacity=100_000), host_memory="1MiB", timeout_s=20) as manager:
        manager.put("fits", torch.zeros(20_000))
        with pytest.raises(swapio.StorageError, match="'more'") as caught:
            manager.put("more", torch.zeros(20_000))
        assert caught.value.errno == errno.ENOSPC


def test_an_unflushed_failure_is_heard_at_the_next_call(tmp_path: Path) -> None:
    storage = FaultyStorage(DirectStorage(tmp_path), fail=lambda action, name: errno.EIO if action == "write" else 0)
    with faulty(storage, host_memory="40KiB") as manager, pytest.raises(swapio.StorageError, match="EIO"):
        for i in range(4):
            manager.put(str(i), torch.zeros(5000))


def test_a_forked_child_is_told(manager: swapio.SwapManager) -> None:
    manager.put("x", torch.ones(4)).wait()
    pid = os.fork()
    if pid == 0:
        try:
            manager.acquire("x").wait(1)
        except swapio.ForkError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with manager.acquire("x") as lease:
        assert lease.tensor.eq(1).all()


def test_nothing_is_left_when_construction_fails(tmp_path: Path) -> None:
    before = {t.name for t in threading.enumerate()}
    with pytest.raises(swapio.ConfigError, match=r"aio\.block_size"):
        swapio.SwapManager(paths=[tmp_path], block_nbytes=1000)
    with pytest.raises(swapio.ConfigError, match="host_memory"):
        swapio.SwapManager(paths=[tmp_path], host_memory="much")
    with pytest.raises(swapio.ConfigError, match="timeout_s"):
        swapio.SwapManager(paths=[tmp_path], timeout_s=0)
    assert {t.name for t in threading.enumerate()} == before
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_deleting_and_putting_one_key_from_many_threads(tmp_path: Path) -> None:
    """Two removals of one record once freed its extent twice, and two other records then shared it."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    wrong: list[str] = []

    def churn(manager: swapio.SwapManager, put: bool) -> None:
        for i in range(150):
            with contextlib.suppress(KeyError, swapio.UsageError):
                if put:
                    manager.put("shared", torch.full((4096,), float(i)))
                else:
                    manager.delete("shared")

    def own(manager: swapio.SwapManager, number: int) -> None:
        keys = [f"{number}.{j}" for j in range(3)]
        for i in range(40):
            for j, key in enumerate(keys):
                manager.put(key, torch.full((4096,), float(i * 10 + j)))
            manager.evict(keys).wait()
            for j, key in enumerate(keys):
                with manager.acquire(key) as lease:
                    if not lease.tensor.eq(float(i * 10 + j)).all():
                        wrong.append(key)
            for key in keys:
                manager.delete(key)

    try:
        with swapio.SwapManager([tmp_path], host_memory=20 * 16384, timeout_s=20) as manager, ThreadPoolExecutor(6, "churn") as pool:
            jobs = [pool.submit(churn, manager, put) for put in (True, True, False, False)]
            jobs += [pool.submit(own, manager, number) for number in (1, 2)]
            for job in jobs:
                job.result()
            with contextlib.suppress(KeyError):
                manager.delete("shared")
            gc.collect()
            assert manager.stats()["host_memory_used"] == 0
            assert manager.stats()["bytes_on_nvme"] == manager.mover.room.nvme_nbytes == 0
    finally:
        sys.setswitchinterval(switch)
    assert wrong == []


def test_a_put_that_fails_leaves_the_old_tensor(manager: swapio.SwapManager) -> None:
    manager.put("x", torch.ones(10))
    with pytest.raises(swapio.BudgetError):
        manager.put("x", torch.zeros(MIB))
    with manager.acquire("x") as lease:
        assert lease.tensor.eq(1).all()


@pytest.mark.parametrize("call", ["acquire", "evict"])
def test_two_who_wait_for_one_record_get_an_error(tmp_path: Path, call: str) -> None:
    """The second waits for the movement that the first began, and holds what the first needs: once a wait of timeout_s."""
    with swapio.SwapManager([tmp_path], host_memory=2 * 16384 + 4096, timeout_s=60) as manager:
        for key in "xyz":
            manager.put(key, torch.ones(4096)).wait()
        manager.flush().wait()
        manager.evict("xyz").wait()
        held = [manager.acquire(key).wait() for key in "yz"]
        errors: list[BaseException] = []

        def first() -> None:
            try:
                manager.acquire("x").wait()
            except swapio.BudgetError as error:
                errors.append(error)

        thread = threading.Thread(target=first, name="first")
        thread.start()
        while not manager.record("x").busy.locked():
            time.sleep(0.001)
        with contextlib.suppress(swapio.BudgetError):
            manager.acquire("x").wait(20) if call == "acquire" else manager.evict(["x"]).wait(20)
        thread.join(20)
        assert not thread.is_alive()
        assert errors
        for lease in held:
            lease.release()


# --- the table ---


@pytest.mark.parametrize(("movement", "start"), list(itertools.product(MAY_START, Residency)))
def test_movements_start_only_where_the_table_says(movement: Residency, start: Residency) -> None:
    spec = TensorSpec(torch.uint8, (4,), (1,))
    record = Record("x", 4, Place.NVME, spec, None, asyncio.Lock())
    if start in MAY_START:
        record.movement = start
    elif start is Residency.FAILED:
        record.error = OSError()
    else:
        record.current = [start is Residency.ON_NVME, start is Residency.ON_HOST, start is Residency.ON_DEVICE]
    assert record.residency is start
    if start in MAY_START[movement]:
        with record.moving(movement):
            assert record.residency is movement
        assert record.residency is start
    else:
        with pytest.raises(RuntimeError, match="cannot start"), record.moving(movement):
            pass


@pytest.mark.parametrize("backend", ["direct", "mmap", "aiofiles", "memory"])
def test_every_backend_with_checksums(tmp_path: Path, backend: str) -> None:
    tensors = {str(i): torch.randn(3000) for i in range(8)}
    with swapio.SwapManager(paths=[tmp_path], backend=backend, checksums=True, host_memory="40KiB", timeout_s=20) as manager:
        for key, tensor in tensors.items():
            manager.put(key, tensor)
        for key, tensor in tensors.items():
            with manager.acquire(key) as lease:
                assert torch.equal(lease.tensor, tensor)
        assert manager.stats()["bytes_read"] > 0
        assert manager.stats()["backend_reason"]


_OTHER = """
import sys, torch, swapio
with swapio.SwapManager(paths=[sys.argv[1]], host_memory="1MiB", checksums=True) as manager:
    for i in range(8):
        manager.put(str(i), torch.full((100_000,), 100.0 + i))
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(8):
        with manager.acquire(str(i)) as lease:
            assert (lease.tensor == 100.0 + i).all(), i
print("good", flush=True)
"""


def test_managers_on_one_path_never_meet(tmp_path: Path) -> None:
    """Two in this process, one in another, and a stranger's file between them."""
    stranger = tmp_path / "notes.txt"
    stranger.write_text("keep")
    other = subprocess.Popen([sys.executable, "-c", _OTHER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with contextlib.ExitStack() as stack:
            managers = [
                stack.enter_context(swapio.SwapManager(paths=[tmp_path], host_memory="1MiB", backend=backend, checksums=True))
                for backend in ("direct", "aiofiles")
            ]
            for i in range(8):
                for number, manager in enumerate(managers):
                    manager.put(str(i), torch.full((100_000,), 10.0 * number + i))
            assert other.stdout is not None
            assert other.stdout.readline() == "ready\n"
            for i in range(8):
                for number, manager in enumerate(managers):
                    with manager.acquire(str(i)) as lease:
                        assert (lease.tensor == 10.0 * number + i).all()
        output, _ = other.communicate("go\n", timeout=60)
        assert output == "good\n"
    finally:
        other.kill()
    assert stranger.read_text() == "keep"
    assert list(tmp_path.iterdir()) == [stranger]
