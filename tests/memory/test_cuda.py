"""The GPU: copies are ordered by events, overlap nothing they must not, and keep their memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swapio.errors import UsageError
from swapio.memory import Arena, CudaDevice, Lease, get_device

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NBYTES = 64 * 2**20
LONG = 200_000_000  # cycles: about 0.1 s


def busy() -> None:
    torch.cuda._sleep(LONG)


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice()
    yield device
    device.close()


@pytest.fixture
def arena(device: CudaDevice) -> Iterator[Arena]:
    arena = Arena(4 * NBYTES, device=device)
    yield arena
    arena.close()


def take(arena: Arena, nbytes: int = NBYTES) -> Lease:
    lease = arena.try_lease(nbytes, name="x")
    assert lease is not None
    return lease


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 1_000_003])
def test_there_and_back(device: CudaDevice, arena: Arena, nbytes: int) -> None:
    source, back, above = take(arena, nbytes), take(arena, nbytes), device.empty(nbytes)
    source.tensor.random_(0, 256)
    back.tensor.zero_()
    up = device.upload(source.tensor, above, after=device.record())
    device.wait(up)
    above.bitwise_not_()
    down = device.download(above, back.tensor, after=device.record())
    assert down.synchronize(30)
    assert down.done()
    assert up.done()
    assert torch.equal(back.tensor, source.tensor.bitwise_not())


def test_leases_are_pinned_until_unmapped(device: CudaDevice) -> None:
    arena = Arena(None, device=device)
    lease = take(arena)
    tensor = lease.tensor
    assert tensor.is_pinned()
    lease.release()
    arena.close()
    assert tensor.is_pinned()
    del tensor
    assert not device._pinned


def test_a_copy_waits_for_compute(device: CudaDevice, arena: Arena) -> None:
    above, host = device.empty(NBYTES).fill_(1), take(arena)
    busy()
    above.fill_(2)
    down = device.download(above, host.tensor, after=device.record())
    assert not down.synchronize(0), "the host was blocked"
    assert down.synchronize(30)
    assert int(host.tensor.min()) == 2


def test_compute_waits_for_a_copy(device: CudaDevice, arena: Arena) -> None:
    above, host = device.empty(NBYTES).fill_(1), take(arena)
    host.tensor.fill_(2)
    busy()
    device.wait(device.upload(host.tensor, above, after=device.record()))
    assert int(above.min()) == 2


def test_a_running_copy_keeps_its_memory(device: CudaDevice, arena: Arena) -> None:
    host, above = take(arena), device.empty(NBYTES)
    host.tensor.fill_(3)
    busy()
    event = device.upload(host.tensor, above, after=device.record())
    host.release()
    assert arena.num_leases == 1
    grads = device.empty(NBYTES).fill_(4)
    back = take(arena)
    down = device.download(grads, back.tensor, after=device.record())
    del grads
    other = [device.empty(NBYTES).fill_(9) for _ in range(4)]  # would take the memory of grads over
    assert event.synchronize(None)
    assert arena.num_leases == 1
    assert down.synchronize(None)
    assert int(above.max()) == 3
    assert int(back.tensor.max()) == 4
    del other


def test_refused_pinning_warns_once_and_works(device: CudaDevice, arena: Arena) -> None:
    lease = take(arena)
    lease.tensor.fill_(5)
    address = lease.tensor.data_ptr()
    with pytest.warns(RuntimeWarning, match=r"cudaHostRegister of 4096 bytes failed: .*already"):
        device.pin(address, 4096)
    device.pin(address, 4096)  # warnings are errors
    above = device.empty(NBYTES)
    above.fill_(1)  # a kernel launch must not see the error
    pageable = torch.full((NBYTES,), 6, dtype=torch.uint8)
    device.wait(device.upload(pageable, above, after=device.record()))
    assert int(above.min()) == 6
    back = torch.empty_like(pageable)
    assert device.download(above, back, after=device.record()).synchronize(30)
    assert torch.equal(back, pageable)


def test_another_stream_is_refused(device: CudaDevice) -> None:
    event = device.record()
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(UsageError, match="compute moved"):
        device.wait(event)


def test_get_device() -> None:
    device = get_device("cuda:0")
    assert (device.kind, device.has_memory, device.torch_device) == ("cuda", True, torch.device("cuda", 0))
    assert get_device("cuda").torch_device.index == torch.cuda.current_device()
    device.close()
    device.close()
