"""A block comes back exactly when nobody can reach its bytes any more, whatever it was that could."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from swapio.memory import Arena, CpuDevice

NBYTES = 4096


def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.view(torch.float32))


def shown_by_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    result = torch.nn.Parameter(torch.empty(()))
    result.data = tensor.view(torch.float32)
    return result


def linear(tensor: torch.Tensor) -> torch.Tensor:
    return F.linear(torch.ones(1, 32, requires_grad=True), tensor.view(torch.float32).view(32, 32)).sum()


def cycle(tensor: torch.Tensor) -> list[Any]:
    box: list[Any] = [tensor]
    box.append(box)
    return box


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor itself": lambda t: t,
    "a slice": lambda t: t[3:5],
    "an empty slice": lambda t: t[5:5],
    "another dtype": lambda t: t.view(torch.bfloat16),
    "strides": lambda t: t.as_strided((2, 2), (1, 1)),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "data of a parameter": lambda t: parameter(t).data,
    "a parameter over it": parameter,
    "set as data of a parameter": shown_by_parameter,
    "a shallow copy": copy.copy,
    "a saved input": lambda t: parameter(t).pow(2).sum(),
    "a saved transposed weight": linear,
    "a node of the graph": lambda t: linear(t).grad_fn,
    "untyped_storage": lambda t: t.untyped_storage(),
    "a tensor set to the storage": lambda t: torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()),
    "numpy": lambda t: t.numpy(),
    "a view of numpy": lambda t: t.numpy()[7:9].view(np.int16),
    "a memoryview of numpy": lambda t: memoryview(t.numpy().data)[1:2],
    "dlpack": torch.utils.dlpack.from_dlpack,
    "dlpack into numpy": np.from_dlpack,
    "a dlpack capsule": lambda t: t.__dlpack__(),
    "a python cycle": cycle,
}


@pytest.fixture
def arena() -> Arena:
    return Arena(NBYTES, device=CpuDevice())


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_until_the_last_view_is_gone(arena: Arena, holder: str) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    lease.tensor.fill_(7)
    assert not lease.held()

    held = HOLDERS[holder](lease.tensor)
    gc.collect()
    assert lease.held(), "not seen"
    lease.release()
    lease.release()
    gc.collect()
    assert arena.try_lease(1, name="other") is None, "given out under a view"
    assert (arena.num_leases, arena.leased_nbytes) == (1, NBYTES)
    assert [(name, nbytes) for name, nbytes, _ in arena.live()] == [("weights", NBYTES)]

    del held
    gc.collect()
    assert (arena.num_leases, arena.leased_nbytes) == (0, 0)
    assert arena.try_lease(1, name="other") is not None


@pytest.mark.parametrize("holder", HOLDERS)
def test_held_ends_with_the_view(arena: Arena, holder: str) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    for _ in range(3):
        held = HOLDERS[holder](lease.tensor)
        assert lease.held()
        del held
        gc.collect()
        assert not lease.held(), "a view that is gone still counts"


def test_the_bytes_stay_while_held(arena: Arena) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    lease.tensor.fill_(7)
    storage = lease.tensor.untyped_storage()
    lease.release()
    arena.close()
    del arena, lease
    gc.collect()
    assert bytes(storage[:100]) == b"\x07" * 100


def test_backward_sees_the_weights_after_release(arena: Arena) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    weight = lease.tensor.view(torch.float32)
    weight.copy_(torch.arange(1024.0))
    weight.requires_grad_()
    loss = weight.pow(2).sum()
    lease.release()
    assert arena.try_lease(NBYTES, name="reuse") is None
    loss.backward()
    assert torch.equal(weight.grad, 2 * torch.arange(1024.0))  # type: ignore[arg-type]


def test_the_buffer_is_no_view(arena: Arena) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    buffer = lease.buffer
    assert not lease.held()
    lease.release()
    assert arena.num_leases == 0
    buffer[:] = bytes(NBYTES)  # still mapped


def test_a_view_that_dies_in_another_thread(arena: Arena) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    box = [lease.tensor]
    lease.release()
    released_in: list[threading.Thread] = []
    arena.on_release = lambda: released_in.append(threading.current_thread())
    thread = threading.Thread(target=box.clear, name="swapio-test")
    thread.start()
    thread.join()
    assert released_in == [thread]
    assert arena.num_leases == 0


def test_a_graph_freed_by_backward(arena: Arena) -> None:
    """Backward frees saved tensors while it runs, on whichever thread and without holding the interpreter."""
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    loss = F.linear(torch.ones(1, 32, requires_grad=True), lease.tensor.view(torch.float32).view(32, 32)).sum()
    lease.release()
    assert arena.num_leases == 1
    loss.backward()
    assert arena.num_leases == 0
    del loss


def test_a_view_that_dies_in_a_collection_under_the_lock(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector may run in the middle of any method, in the thread that has the lock."""
    lease = arena.try_lease(NBYTES // 2, name="weights")
    assert lease is not None
    box = cycle(lease.tensor)
    lease.release()
    calls: list[int] = []
    arena.on_release = lambda: calls.append(1)
    take_back = arena._take_back

    def collect_under_the_lock() -> None:
        take_back()
        assert arena._lock.locked()
        gc.collect()

    monkeypatch.setattr(arena, "_take_back", collect_under_the_lock)
    del box
    assert arena.num_leases == 1, "not seen yet: it died after we looked"
    assert calls == [1]
    monkeypatch.undo()
    assert arena.num_leases == 0


def test_a_lease_that_is_dropped_is_released(arena: Arena) -> None:
    lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    dropped = weakref.ref(arena)
    del lease
    assert arena.num_leases == 0
    assert dropped() is arena


@pytest.mark.parametrize("mode", ["inference", "device", "fake"])
def test_the_callers_modes_do_not_leak_in(arena: Arena, mode: str) -> None:
    modes: dict[str, Any] = {"inference": torch.inference_mode, "device": lambda: torch.device("meta"), "fake": FakeTensorMode}
    with modes[mode]():
        lease = arena.try_lease(NBYTES, name="weights")
    assert lease is not None
    tensor = lease.tensor
    assert type(tensor) is torch.Tensor
    assert tensor.device.type == "cpu"
    assert not tensor.is_inference()
    assert tensor.data_ptr() % 4096 == 0
    tensor.fill_(1)
    assert bytes(lease.buffer) == b"\x01" * NBYTES
