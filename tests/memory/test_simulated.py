"""The simulated accelerator shows every mistake in the order of copies and compute."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch

from swapio.memory import Arena, CpuDevice, Event, SimulatedDevice

NBYTES = 4096
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def filled(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def poisoned(tensor: torch.Tensor) -> bool:
    return bool((tensor == 0xFF).all())


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fresh_memory_is_nan(device: SimulatedDevice, dtype: torch.dtype) -> None:
    assert device.empty(NBYTES).view(dtype).float().isnan().all()


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 65537])
def test_there_and_back(device: SimulatedDevice, nbytes: int) -> None:
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    above, back = device.empty(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    assert (above.dtype, list(above.shape)) == (torch.uint8, [nbytes])
    device.wait(device.upload(source, above))
    assert torch.equal(above, source)
    assert device.download(above, back, after=device.record()).synchronize(10)
    assert torch.equal(back, source)
    assert (device.num_uploads, device.num_downloads) == (1, 1)
    assert (device.uploaded_nbytes, device.downloaded_nbytes) == (nbytes, nbytes)


def test_catches_a_use_before_the_wait(device: SimulatedDevice) -> None:
    weight = device.empty(NBYTES)
    event = device.upload(torch.ones(1024).view(torch.uint8), weight)
    assert torch.ones(1024).dot(weight.view(torch.float32)).isnan(), "the copy was early"
    device.wait(event)
    assert torch.ones(1024).dot(weight.view(torch.float32)) == 1024


def test_catches_a_use_before_the_wait_of_memory_used_before(device: SimulatedDevice) -> None:
    weight = device.empty(NBYTES)
    device.wait(device.upload(filled(1), weight))
    event = device.upload(filled(2), weight, after=device.record())
    assert poisoned(weight), "the bytes of before must not help"
    device.wait(event)
    assert torch.equal(weight, filled(2))


def test_catches_a_source_reused_before_the_uploads_event(device: SimulatedDevice) -> None:
    host, weight = filled(1), device.empty(NBYTES)
    event = device.upload(host, weight)
    host.fill_(2)
    device.wait(event)
    assert torch.equal(weight, filled(2)), "the copy was early"


def test_catches_a_source_reused_before_the_downloads_event(device: SimulatedDevice) -> None:
    grad, host = device.empty(NBYTES).fill_(1), torch.empty(NBYTES, dtype=torch.uint8)
    event = device.download(grad, host, after=device.record())
    grad.fill_(2)
    assert event.synchronize(None)
    assert torch.equal(host, filled(2)), "the copy was early"


def test_catches_a_read_of_a_downloads_target_before_its_event(device: SimulatedDevice) -> None:
    grad, host = device.empty(NBYTES).fill_(1), filled(1)
    event = device.download(grad, host)
    assert poisoned(host)
    assert event.synchronize(None)
    assert torch.equal(host, filled(1))


@pytest.mark.parametrize("kind", ["upload", "download"])
def test_catches_a_target_reused_before_the_event(device: SimulatedDevice, kind: str) -> None:
    above, host = device.empty(NBYTES).fill_(1), filled(1)
    target = above if kind == "upload" else host
    event = device.upload(host, above) if kind == "upload" else device.download(above, host)
    target.fill_(2)
    event.synchronize(None)
    assert torch.equal(target, filled(1)), "the copy was early"


def test_catches_a_dead_storage(device: SimulatedDevice) -> None:
    weight = device.empty(NBYTES).fill_(1)
    address = weight.data_ptr()
    view = weight[10:]
    del weight
    assert ctypes.string_at(address, NBYTES) == b"\x01" * NBYTES
    del view
    assert ctypes.string_at(address, NBYTES) == b"\xff" * NBYTES
    again = device.empty(NBYTES)
    assert again.data_ptr() == address, "memory is given out again at once, as by a real allocator"


def test_a_wait_lands_what_came_before_and_nothing_after(device: SimulatedDevice) -> None:
    targets = [device.empty(NBYTES) for _ in range(4)]
    events = [device.upload(filled(i), t) for i, t in enumerate(targets)]
    device.wait(events[1])
    assert [poisoned(t) for t in targets] == [False, False, True, True]
    assert device.num_pending == 2
    assert events[0].done()
    device.synchronize()
    assert [int(t[0]) for t in targets] == [0, 1, 2, 3]
    assert device.num_pending == 0


def test_copies_are_performed_in_order(device: SimulatedDevice) -> None:
    """Down and up again through one buffer, all queued before any lands: the stream orders them."""
    first, second, host = device.empty(NBYTES).fill_(1), device.empty(NBYTES), filled(9)
    device.download(first, host)
    device.upload(filled(2), first)
    event = device.upload(host, second)
    assert torch.equal(first, filled(1)), "poison must not destroy what a queued copy has to read"
    assert poisoned(host)
    device.wait(event)
    assert torch.equal(second, filled(1))
    assert torch.equal(first, filled(2))


def test_after_lands_first() -> None:
    one, other = SimulatedDevice(), SimulatedDevice()
    middle, end = filled(0), other.empty(NBYTES)
    down = one.download(one.empty(NBYTES).fill_(5), middle)
    up = other.upload(middle, end, after=down)
    assert poisoned(middle)
    other.wait(up)
    assert down.done()
    assert torch.equal(end, filled(5))


@pytest.mark.parametrize("polls", [0, 1, 5])
def test_done_says_no_a_few_times_then_lands(polls: int) -> None:
    device = SimulatedDevice(polls=polls)
    target = device.empty(NBYTES)
    event = device.upload(filled(1), target)
    assert [event.done() for _ in range(polls)] == [False] * polls
    assert poisoned(target)
    assert event.done()
    assert event.done()
    assert torch.equal(target, filled(1))


def test_nothing_else_lands_a_copy(device: SimulatedDevice) -> None:
    target = device.empty(NBYTES)
    event = device.upload(filled(1), target)
    device.wait(device.record())
    assert device.record().done()
    device.empty(NBYTES)
    device.upload(filled(1), device.empty(NBYTES))
    assert (device.num_pending, device.live_nbytes, device.peak_nbytes) == (2, 2 * NBYTES, 2 * NBYTES)
    assert poisoned(target)
    device.wait(event)


def test_latency_holds_back_who_polls_and_blocks_who_waits() -> None:
    device = SimulatedDevice(polls=0, latency_s=3600)
    target = device.empty(NBYTES)
    event = device.upload(filled(1), target)
    assert not event.done()
    assert not event.synchronize(0)
    assert not event.synchronize(0.001)
    assert poisoned(target)
    short = SimulatedDevice(latency_s=0.01)
    above = short.empty(NBYTES)
    short.wait(short.upload(filled(1), above))
    assert torch.equal(above, filled(1))


def test_a_queued_copy_keeps_its_memory(device: SimulatedDevice) -> None:
    arena = Arena(NBYTES, device=device)
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    lease.tensor.fill_(3)
    target = device.empty(NBYTES)
    event = device.upload(lease.tensor, target)
    assert lease.held()
    lease.release()
    assert arena.num_leases == 1
    device.wait(event)
    assert arena.num_leases == 0
    assert torch.equal(target, filled(3))

    device.upload(filled(1), device.empty(NBYTES))  # nobody has the target
    assert device.live_nbytes == 2 * NBYTES
    device.close()
    device.close()
    assert device.live_nbytes == NBYTES


def test_live_and_peak_bytes(device: SimulatedDevice) -> None:
    a, b = device.empty(100), device.empty(5000)
    view = a[5:6]
    del a
    assert (device.live_nbytes, device.peak_nbytes) == (5100, 5100)
    del view
    assert (device.live_nbytes, device.peak_nbytes) == (5000, 5100)
    del b
    assert (device.live_nbytes, device.peak_nbytes) == (0, 5100)


@pytest.mark.parametrize("device_class", [SimulatedDevice, CpuDevice])
@pytest.mark.parametrize("method", ["upload", "download"])
def test_a_copy_that_does_not_fit(device_class: type[SimulatedDevice | CpuDevice], method: str) -> None:
    device = device_class()
    copy = getattr(device, method)
    target = device.empty(8).fill_(1)
    with pytest.raises(ValueError, match="7 bytes into 8 bytes"):
        copy(filled(0, 7), target)
    with pytest.raises(ValueError, match=r"source .* not torch.float32 \[2\]"):
        copy(torch.zeros(2), target)
    with pytest.raises(ValueError, match=r"target .* \[2, 4\]"):
        copy(filled(0, 8), target.view(2, 4))
    with pytest.raises(ValueError, match="source"):
        copy(filled(0, 16)[::2], target)
    assert torch.equal(target, filled(1, 8))


def test_threads(device: SimulatedDevice) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        host = filled(seed)
        for _ in range(100):
            above, back = device.empty(NBYTES), torch.empty(NBYTES, dtype=torch.uint8)
            up = device.upload(host, above)
            down = device.download(above, back, after=up)
            while not down.done():
                pass
            if not torch.equal(back, host):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,), name=f"swapio-test-{seed}") for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (device.num_uploads, device.num_downloads, device.num_pending, device.live_nbytes) == (400, 400, 0, 0)


def test_events_are_events(device: SimulatedDevice) -> None:
    assert isinstance(device.record(), Event)
    assert isinstance(device.upload(filled(1), device.empty(NBYTES)), Event)
