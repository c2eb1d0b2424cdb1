"""CUDA: one copy stream beside the stream that computes."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

import torch

from ..errors import UsageError
from ._device import Device, Event, check_copy

__all__ = ["CudaDevice"]

_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_POLL_S = 1e-4
_cuda: Any = torch.cuda  # partly untyped


class CudaDevice(Device):
    """A GPU. Compute runs on the stream that was current when this was made.

    Args:
        index: which GPU; `None` is PyTorch's current one.
    """

    kind = "cuda"
    has_memory = True

    def __init__(self, index: int | None = None) -> None:
        self.torch_device = torch.device("cuda", _cuda.current_device() if index is None else index)
        self._compute = _cuda.current_stream(self.torch_device)
        self._copies = _cuda.Stream(self.torch_device)
        self._pinned: set[int] = set()
        self._warned = False
        # Copies that run, and the tensors they use. A tensor freed earlier could be given out again under the copy: the allocator knows of
        # the compute stream only, the arena of none. Any thread adds and takes; single operations on a dict are atomic.
        self._running: dict[_CudaEvent, tuple[torch.Tensor, torch.Tensor]] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        with _cuda.stream(self._compute), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def upload(self, source: torch.Tensor, target: torch.Tensor, *, after: Event | None = None) -> Event:
        check_copy(source, target)
        self._sweep()
        event = _CudaEvent(self)
        with _cuda.stream(self._copies):
            if after is not None:
                self._let_wait(self._copies, after)
            target.copy_(source, non_blocking=True)
            event.event.record(self._copies)
        self._running[event] = (source, target)  # only now: an event that is not recorded counts as done
        return event

    download = upload

    def record(self) -> Event:
        self._sweep()
        event = _CudaEvent(self)
        event.event.record(self._compute)
        return event

    def wait(self, event: Event) -> None:
        """As in `Device`.

        Raises:
            UsageError: the caller's current stream is another than that of compute: its work would not be ordered with the copies.
        """
        current = _cuda.current_stream(self.torch_device)
        if current != self._compute:
            raise UsageError(f"compute moved to {current}; make the manager or the engine inside `torch.cuda.stream(...)` of that stream")
        self._let_wait(self._compute, event)

    def _let_wait(self, stream: Any, event: Event) -> None:
        if isinstance(event, _CudaEvent):
            stream.wait_event(event.event)
        else:
            event.synchronize(None)

    def synchronize(self) -> None:
        self._copies.synchronize()
        self._compute.synchronize()
        self._sweep()

    def ended(self, event: _CudaEvent) -> None:
        """Let go of what the copy of `event` used."""
        self._running.pop(event, None)

    def _sweep(self) -> None:
        for event in list(self._running):  # in the order of the stream
            if not event.done():
                return

    def pin(self, address: int, nbytes: int) -> None:
        with _cuda.device(self.torch_device):
            code = int(_cuda.cudart().cudaHostRegister(address, nbytes, _HOST_REGISTER_PORTABLE))
        if code == 0:
            self._pinned.add(address)
            return
        # CUDA keeps the error for whoever asks next, which is the next kernel launch: take it away here.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"cudaHostRegister of {nbytes} bytes failed: {_cuda.CudaError(code)}. "
                f"Host memory is pageable where that happens: copies work, but are slower and block the host.",
                RuntimeWarning, stacklevel=2,
            )  # fmt: skip

    def unpin(self, address: int) -> None:
        if address in self._pinned:
            self._pinned.discard(address)
            with _cuda.device(self.torch_device):
                _cuda.check_error(_cuda.cudart().cudaHostUnregister(address))

    def close(self) -> None:
        self._copies.synchronize()
        self._sweep()


class _CudaEvent(Event):
    def __init__(self, device: CudaDevice) -> None:
        self.event = _cuda.Event()
        self._device = device

    def done(self) -> bool:
        if not self.event.query():
            return False
        self._device.ended(self)
        return True

    def synchronize(self, timeout: float | None) -> bool:
        if timeout is None:
            self.event.synchronize()
        else:  # CUDA has no wait with a limit
            deadline = time.monotonic() + timeout
            while not self.event.query():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_S)
        self._device.ended(self)
        return True
