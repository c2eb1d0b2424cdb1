"""Kept inputs in host memory: exact, only what is worth it, nothing left behind. The simulated device copies as late as events allow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from swapio.activation import HostOffload
from swapio.activation._configure import current
from swapio.checkpointing import checkpoint, configure, reset
from swapio.memory import SimulatedDevice

from .models import DIM, Block, check_equal, kept, leave

MODES = pytest.mark.parametrize("reentrant", [False, True])


@pytest.fixture
def device() -> SimulatedDevice:
    device = SimulatedDevice()
    configure(checkpoint_in_cpu=True, device=device)
    return device


def offload() -> HostOffload:
    found = current().offload
    assert found is not None
    return found


@MODES
def test_exact_and_gone_from_the_device(device: SimulatedDevice, reentrant: bool) -> None:
    moved: list[StorageWeakRef] = []

    def call(block: nn.Module, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = x.clone()
            moved.append(StorageWeakRef(x.untyped_storage()))
            x = checkpoint(block, x, use_reentrant=reentrant)
        device.synchronize()  # a copy under way keeps its source
        assert [ref.expired() for ref in moved] == [True] * 3
        assert (device.num_downloads, device.num_uploads) == (3, 0)
        return x

    def plain(block: nn.Module, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = block(x.clone())
        return x

    check_equal(leave(call), leave(plain))
    assert device.num_uploads == 3
    assert device.downloaded_nbytes == device.uploaded_nbytes == 3 * 3 * DIM * 4
    assert offload().arena.leased_nbytes == 0
    assert device.live_nbytes == 0


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "slice with gaps": lambda x: x[:, 1::3],
    "expanded": lambda x: x[:1].expand(5, DIM),
    "scalar": lambda x: x[1, 2],
    "prime": lambda x: x.flatten()[:13],
    "offset": lambda x: x[1:],
    "channels last": lambda x: x.reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "bf16": lambda x: x.bfloat16()[:, :7],
    "double": lambda x: x.double(),
    "empty": lambda x: x[:0],
}


@MODES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_come_back_as_they_were(device: SimulatedDevice, layout: str, reentrant: bool) -> None:
    strides = []

    def function(x: torch.Tensor) -> torch.Tensor:
        strides.append((x.stride(), x.dtype))
        return x.sin().cumsum(-1)

    def call(block: nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(function, LAYOUTS[layout](x), use_reentrant=reentrant)

    check_equal(leave(call), leave(lambda block, x: LAYOUTS[layout](x).sin().cumsum(-1)))
    assert strides == strides[:1] * 2
    assert device.num_downloads == (layout != "empty")


@MODES
def test_what_is_kept_anyway_does_not_move(device: SimulatedDevice, reentrant: bool) -> None:
    weight = nn.Parameter(torch.ones(DIM))
    mask = torch.rand(3, DIM)
    x = torch.randn(3, DIM, requires_grad=True)
    number = torch.arange(3)
    y = checkpoint(lambda x, w, mask, n: x * w * mask * n[:, None], x, weight, mask, number, use_reentrant=reentrant)
    assert device.num_downloads == 0
    y.sum().backward()
    assert device.num_uploads == 0
    assert x.grad is not None
    assert torch.equal(x.grad, mask * number[:, None])


@MODES
def test_what_does_not_move_goes_to_the_pair_below(device: SimulatedDevice, reentrant: bool) -> None:
    mask = torch.rand(3, DIM)
    x = torch.randn(3, DIM, requires_grad=True) * 1
    with kept() as tensors:
        y = checkpoint(lambda x, mask: (x * mask).sin(), x, mask=mask, use_reentrant=reentrant)
    assert [t.data_ptr() for t in tensors] == [mask.data_ptr()]
    assert device.num_downloads == 1
    y.sum().backward()


@MODES
def test_a_mask_that_was_written_is_an_error(device: SimulatedDevice, reentrant: bool) -> None:
    mask = torch.rand(3, DIM)
    x = torch.randn(3, DIM, requires_grad=True) * 1
    y = checkpoint(lambda x, mask: (x * mask).sin(), x, mask, use_reentrant=reentrant)
    mask.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@MODES
def test_an_input_that_was_written_is_an_error(device: SimulatedDevice, reentrant: bool) -> None:
    x = torch.randn(3, DIM, requires_grad=True) * 1
    y = checkpoint(torch.sin, x, use_reentrant=reentrant)
    x.mul_(2)  # before the copy has landed, so the copy is not what was saved
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: torch.float32 \[3, 16\].*clone"):
        y.sum().backward()


@MODES
def test_inner_calls_leave_it_to_the_outer_one(device: SimulatedDevice, reentrant: bool) -> None:
    def twice(block: nn.Module, x: torch.Tensor) -> Any:
        for _ in range(2):
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    check_equal(leave(lambda b, x: checkpoint(twice, b, x, use_reentrant=reentrant)), leave(lambda b, x: b(b(x))))
    assert (device.num_downloads, device.num_uploads) == (1, 1)


def test_backward_twice(device: SimulatedDevice) -> None:
    def run(block: nn.Module, x: torch.Tensor, use: bool) -> Any:
        y = checkpoint(block, x) if use else block(x)
        (y * y).sum().backward(retain_graph=True)
        return y

    check_equal(leave(lambda b, x: run(b, x, True)), leave(lambda b, x: run(b, x, False)))
    assert (device.num_downloads, device.num_uploads) == (1, 2)


def test_a_dropped_graph_gives_host_memory_back(device: SimulatedDevice) -> None:
    y = checkpoint(Block(), torch.randn(3, DIM, requires_grad=True) * 1)
    arena = offload().arena
    assert arena.leased_nbytes > 0
    del y
    device.synchronize()
    assert arena.leased_nbytes == 0
    assert arena.mapped_nbytes > 0
    reset()
    assert arena.mapped_nbytes == 0
    reset()


def test_an_error_leaves_nothing_behind(device: SimulatedDevice) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        checkpoint(broken, torch.ones(2, requires_grad=True) * 1)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    device.synchronize()
    assert offload().arena.leased_nbytes == 0
    check_equal(leave(lambda b, x: checkpoint(b, x)), leave(lambda b, x: b(x)))
    assert device.num_downloads == 2, "the failed call still counts as an outer one"


def test_configured_anew_while_a_graph_waits(device: SimulatedDevice) -> None:
    other = SimulatedDevice()

    def call(block: nn.Module, x: torch.Tensor) -> Any:
        y = checkpoint(block, x)
        configure(checkpoint_in_cpu=True, device=other)
        return checkpoint(block, y)

    check_equal(leave(call), leave(lambda b, x: b(b(x))))
    assert (device.num_uploads, other.num_uploads) == (1, 1)


def test_without_an_accelerator_nothing_moves_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "swapio"):
        configure(checkpoint_in_cpu=True, device="cpu")
        check_equal(leave(lambda b, x: checkpoint(b, checkpoint(b, x))), leave(lambda b, x: b(b(x))))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["activation_checkpointing.cpu_checkpointing"]
    assert current().offload is None
    reset()
