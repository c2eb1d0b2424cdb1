"""The arena's budget, its size classes, and reuse."""

from __future__ import annotations

import gc
import os
import random
import resource
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swapio.errors import BudgetError, ClosedError, ConfigError
from swapio.memory import Arena, CpuDevice, Lease

PAGE = 4096
SIZES = [0, 1, 4095, 4096, 4097, 8191, 65537, 131072, 131073, 1_000_003, 2 * 2**20, 2 * 2**20 + 1]


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class PinLog(CpuDevice):
    """Remembers what is pinned, and checks it."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: dict[int, int] = {}
        self.num_pins = 0

    def pin(self, address: int, nbytes: int) -> None:
        assert address not in self.pinned
        assert address % PAGE == nbytes % PAGE == 0
        self.pinned[address] = nbytes
        self.num_pins += 1

    def unpin(self, address: int) -> None:
        del self.pinned[address]


def make(capacity: int | None) -> tuple[Arena, PinLog]:
    device = PinLog()
    return Arena(capacity, device=device), device


def take(arena: Arena, nbytes: int, name: str = "x") -> Lease:
    lease = arena.try_lease(nbytes, name=name)
    assert lease is not None
    return lease


@pytest.mark.parametrize("nbytes", SIZES)
def test_a_lease(nbytes: int) -> None:
    arena, device = make(None)
    lease = take(arena, nbytes, "layer.0")
    assert (lease.name, lease.nbytes) == ("layer.0", nbytes)
    tensor, buffer = lease.tensor, lease.buffer
    assert (tensor.dtype, list(tensor.shape)) == (torch.uint8, [nbytes])
    assert tensor.data_ptr() % PAGE == 0
    assert not buffer.readonly
    assert len(buffer) == -(-nbytes // PAGE) * PAGE
    assert (buffer.format, buffer.itemsize, buffer.ndim) == ("B", 1, 1)
    if nbytes:
        buffer[0], buffer[nbytes - 1] = 3, 5
        assert tensor[-1] == 5
        assert nbytes == 1 or tensor[0] == 3
        tensor.fill_(9)
        assert bytes(buffer[:nbytes]) == b"\x09" * nbytes
    cost = arena.block_nbytes(nbytes)
    assert (arena.leased_nbytes, arena.mapped_nbytes, arena.peak_nbytes, arena.num_leases) == (cost, cost, cost, 1)
    assert list(device.pinned.values()) == [cost]
    del tensor, buffer
    lease.release()
    assert (arena.leased_nbytes, arena.mapped_nbytes, arena.peak_nbytes, arena.num_leases) == (0, cost, cost, 0)
    arena.close()
    assert arena.mapped_nbytes == 0
    assert not device.pinned


@given(st.integers(0, 2**45))
def test_size_classes(nbytes: int) -> None:
    arena = Arena(None, device=CpuDevice())
    block = arena.block_nbytes(nbytes)
    assert block >= nbytes
    assert block % PAGE == 0
    assert block >= PAGE
    assert block - nbytes <= max(PAGE, nbytes / 32)
    assert arena.block_nbytes(block) == block
    assert arena.block_nbytes(nbytes + 1) >= block


def test_few_classes() -> None:
    arena = Arena(None, device=CpuDevice())
    assert len({arena.block_nbytes(n) for n in range(2**30, 2**31, 2**20)}) <= 33


def test_released_leases_refuse() -> None:
    arena, _ = make(None)
    lease = take(arena, 100, "gone")
    lease.release()
    with pytest.raises(ClosedError, match="'gone' was released"):
        _ = lease.tensor
    with pytest.raises(ClosedError, match="'gone' was released"):
        _ = lease.buffer
    assert not lease.held()


@pytest.mark.parametrize("capacity", [-1, 0, 1, 4095])
def test_capacity_below_a_page(capacity: int) -> None:
    with pytest.raises(ConfigError, match=f"host_memory: {capacity} bytes") as caught:
        Arena(capacity, device=CpuDevice())
    assert (caught.value.key, caught.value.value) == ("host_memory", capacity)


def test_negative_size() -> None:
    arena, _ = make(None)
    with pytest.raises(ValueError, match="-1 bytes"):
        arena.try_lease(-1, name="x")
    assert arena.num_leases == 0


@pytest.mark.parametrize("capacity", [PAGE, 3 * PAGE, 3 * PAGE + 1])
def test_capacity_is_hard(capacity: int) -> None:
    arena, _ = make(capacity)
    leases = [take(arena, 1) for _ in range(capacity // PAGE)]
    assert arena.try_lease(0, name="x") is None
    assert arena.try_lease(capacity + 1, name="x") is None
    leases.pop().release()
    take(arena, PAGE)


def test_reuse_keeps_the_mapping_and_the_pin() -> None:
    arena, device = make(4 * PAGE)
    lease = take(arena, PAGE)
    address = lease.tensor.data_ptr()
    for _ in range(5):
        lease.release()
        lease = take(arena, PAGE - 1)
        assert lease.tensor.data_ptr() == address
    assert device.num_pins == 1


def test_idle_blocks_make_room_for_other_classes() -> None:
    arena, device = make(8 * PAGE)
    for lease in [take(arena, n * PAGE) for n in (1, 2, 5)]:
        lease.release()
    assert (arena.leased_nbytes, arena.mapped_nbytes) == (0, 8 * PAGE)
    lease = take(arena, 2 * PAGE)  # one is there
    other = take(arena, 3 * PAGE)  # unmaps the one that is enough: 5
    assert arena.mapped_nbytes == (1 + 2 + 3) * PAGE
    assert sorted(n // PAGE for n in device.pinned.values()) == [1, 2, 3]
    assert arena.try_lease(4 * PAGE, name="x") is None
    assert arena.mapped_nbytes == (1 + 2 + 3) * PAGE, "what cannot fit must unmap nothing"
    lease.release()
    other.release()
    take(arena, 8 * PAGE)
    assert list(device.pinned.values()) == [8 * PAGE]


def test_a_forgotten_buffer_does_not_keep_bytes_from_others() -> None:
    arena, _ = make(4 * PAGE)
    lease = take(arena, 4 * PAGE)
    buffer = lease.buffer[PAGE:]
    buffer[:] = b"\x01" * len(buffer)
    lease.release()
    take(arena, 3 * PAGE)
    assert arena.mapped_nbytes == 3 * PAGE
    assert bytes(buffer) == bytes(3 * PAGE), "its pages went"


def test_without_a_limit_idle_blocks_stay_below_the_peak() -> None:
    arena, _ = make(None)
    for n in range(1, 30):
        take(arena, n * PAGE).release()
        assert arena.mapped_nbytes <= arena.peak_nbytes == n * PAGE


def test_on_release_is_told_after_the_bytes_are_back() -> None:
    arena, _ = make(2 * PAGE)
    lease, other = take(arena, 1), take(arena, 1)
    calls: list[str] = []
    arena.on_release = lambda: calls.append("x")
    view = lease.tensor
    lease.release()
    assert calls == []
    del view
    assert calls == ["x"]
    arena.on_release = None
    other.release()
    assert calls == ["x"]
    assert arena.num_leases == 0


def test_live_is_oldest_first() -> None:
    arena, _ = make(None)
    leases = [take(arena, n, f"layer.{n}") for n in (3, 1, 2)]
    names, sizes, ages = zip(*arena.live(), strict=True)
    assert (names, sizes) == (("layer.3", "layer.1", "layer.2"), (3, 1, 2))
    assert list(ages) == sorted(ages, reverse=True)
    assert min(ages) >= 0
    del leases


def test_close_keeps_what_is_alive() -> None:
    arena, device = make(None)
    lease, idle = take(arena, 100, "kept"), take(arena, 5000)
    idle.release()
    view = lease.tensor.fill_(5)
    arena.close()
    arena.close()
    assert list(device.pinned.values()) == [PAGE]
    with pytest.raises(ClosedError, match="'late'"):
        arena.try_lease(1, name="late")
    assert [n for n, _, _ in arena.live()] == ["kept"]
    lease.release()
    assert arena.mapped_nbytes == PAGE
    assert (view == 5).all()
    del view
    assert not device.pinned, "the finalizer itself must have unmapped it"
    assert (arena.mapped_nbytes, arena.num_leases) == (0, 0)


def test_close_within_a_method_of_another_thread() -> None:
    """A block that dies while another thread has the lock of a closed arena is unmapped by that thread."""
    arena, device = make(None)
    lease = take(arena, 1)
    arena.close()
    with arena._locked():
        thread = threading.Thread(target=lease.release)
        thread.start()
        thread.join()
        assert device.pinned
    assert not device.pinned


@pytest.fixture
def eager_collector() -> Iterator[None]:
    before = gc.get_threshold()
    gc.freeze()  # so that a collection looks at little and is quick
    gc.set_threshold(3, 2, 2)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("eager_collector")
def test_threads_never_exceed_the_capacity_nor_share_a_block() -> None:
    """With views that die in reference cycles, hence in collections, in any thread and at any point."""
    capacity = 64 * PAGE
    arena, device = make(capacity)
    wrong: list[str] = []
    released: deque[int] = deque()
    arena.on_release = lambda: released.append(1)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[Lease, list[Any], int]] = []
        num_taken = 0
        for i in range(300):
            lease = arena.try_lease(rng.randrange(12 * PAGE), name=f"{seed}")
            if lease is None:
                gc.collect()
            else:
                mark = (seed * 61 + i) % 251
                box: list[Any] = [lease.tensor.fill_(mark)]
                if rng.random() < 0.5:
                    box.append(box)
                held.append((lease, box, mark))
                del box
                num_taken += 1
            if held and (lease is None or rng.random() < 0.5):
                lease, box, mark = held.pop(rng.randrange(len(held)))
                if rng.random() < 0.5:
                    lease.release()  # before the view
                if not bool((box[0] == mark).all()):
                    wrong.append(f"{seed}: block shared")
                del box
                lease.release()
            if arena.mapped_nbytes > capacity or sum(list(device.pinned.values())) > capacity:
                wrong.append(f"{seed}: over capacity")
        taken.append(num_taken)

    taken: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,), name=f"swapio-test-{seed}") for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong
    assert len(released) == sum(taken) > 0
    assert (arena.num_leases, arena.leased_nbytes) == (0, 0)
    assert arena.mapped_nbytes == sum(device.pinned.values()) <= capacity
    assert arena.peak_nbytes <= capacity


def test_rss_stays_within_the_mapped_bytes() -> None:
    """Huge pages must not make a block cost more than its mapping, nor an unmapped one cost anything."""
    sizes = [3 * 2**20 + 4096, 2 * 2**20, 5 * 2**20 + 12288, 7 * 2**20, 4097] * 3
    arena, _ = make(None)
    warm = take(arena, 2**20)
    warm.tensor.fill_(1)
    base = rss()
    leases = [take(arena, n) for n in sizes]
    for lease in leases:
        lease.tensor.fill_(1)
    slack = 2 * 2**20
    grown = rss() - base
    assert sum(sizes) - slack <= grown <= arena.mapped_nbytes + slack
    for lease in leases:
        lease.release()
    warm.release()
    arena.close()
    assert rss() - base <= slack


def test_the_system_refuses() -> None:
    """RLIMIT_AS is for the whole process, so this needs one of its own."""
    code = """
        import resource
        from swapio.errors import BudgetError
        from swapio.memory import Arena, CpuDevice
        arena = Arena(2**40, device=CpuDevice())
        arena.try_lease(64 * 2**20, name="idle").release()
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 48 * 2**20,) * 2)
        lease = arena.try_lease(80 * 2**20, name="fits once the idle block went")
        assert arena.mapped_nbytes == 80 * 2**20
        try:
            arena.try_lease(256 * 2**20, name="layer.7")
        except BudgetError as error:
            assert isinstance(error, MemoryError) and error.name == "layer.7", error
            print(error)
        assert arena.num_leases == 1
    """
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    assert "refuses 256.0 MiB of memory for 'layer.7'" in run.stdout
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    assert issubclass(BudgetError, MemoryError)


def test_a_forked_child_and_an_exit_with_leases_out() -> None:
    """Nothing of this is torn down at exit, under views that daemon threads may still use."""
    code = """
        import os
        from swapio.memory import Arena, CpuDevice
        arena = Arena(None, device=CpuDevice())
        lease = arena.try_lease(2**22, name="out")
        view = lease.tensor.fill_(3)
        arena.on_release = lambda: print("released")
        child = os.fork()
        if child == 0:
            assert view[-1] == 3
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
