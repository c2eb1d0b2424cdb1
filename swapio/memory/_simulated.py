"""An accelerator for tests, on the CPU, that shows every missing wait.

Its copies land as late as the events allow, where a real one is usually early enough to hide a mistake, and memory reads 0xFF (NaN in every
floating dtype) whenever its content is undefined:
 - device memory that nobody wrote yet, and again as soon as its storage is dead;
 - the target of a copy, from the moment it is queued until it lands.

So a use before the wait sees NaN; a source that is reused before its event gives the wrong bytes; a target that is reused is overwritten.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque

import torch

from ..spec import PAGE_NBYTES, round_up
from ._device import Device, DoneEvent, Event, check_copy
from ._mapping import Mapping

__all__ = ["SimulatedDevice"]

_POISON = 0xFF


class SimulatedDevice(Device):
    """See the module. Compute is ordinary PyTorch on `torch.device("cpu")`, hence finished when the call returns.

    There is one copy stream. A queued copy lands when somebody waits for its event or that of a later copy: by `wait`, by `synchronize`, or
    by asking `done()` more than `polls` times. It does not land earlier for any other reason.

    Args:
        polls: how often `done()` of a copy says no before the copy lands.
        latency_s: seconds from when a copy is queued until it can land; who waits for it blocks, who polls is told no.

    Attributes `num_uploads`, `num_downloads`, `uploaded_nbytes`, `downloaded_nbytes`: copies queued so far. `num_pending`: not landed.
    """

    kind = "simulated"
    has_memory = True

    def __init__(self, *, polls: int = 2, latency_s: float = 0.0) -> None:
        self.torch_device = torch.device("cpu")
        self.polls = polls
        self.latency_s = latency_s
        self.num_uploads = self.num_downloads = 0
        self.uploaded_nbytes = self.downloaded_nbytes = 0
        self.peak_nbytes = 0
        self._live_nbytes = 0
        self._lock = threading.RLock()
        self._queue: deque[_Copy] = deque()
        self._dead: deque[tuple[Mapping, int]] = deque()  # what finalizers gave back, without the lock
        self._idle: list[Mapping] = []

    def empty(self, nbytes: int) -> torch.Tensor:
        block_nbytes = round_up(max(nbytes, 1), PAGE_NBYTES)
        with self._lock:
            self._take_back()
            mapping = next((m for m in self._idle if m.nbytes == block_nbytes), None)
            if mapping is not None:
                self._idle.remove(mapping)
            else:
                self._idle.clear()
                mapping = Mapping(block_nbytes)
            self._live_nbytes += nbytes
            self.peak_nbytes = max(self.peak_nbytes, self._live_nbytes)
        ctypes.memset(mapping.address, _POISON, block_nbytes)
        return mapping.tensor(nbytes, lambda mapping: self._died(mapping, nbytes))

    def _died(self, mapping: Mapping, nbytes: int) -> None:
        ctypes.memset(mapping.address, _POISON, mapping.nbytes)
        self._dead.append((mapping, nbytes))

    def _take_back(self) -> None:
        while self._dead:
            mapping, nbytes = self._dead.popleft()
            self._live_nbytes -= nbytes
            self._idle.append(mapping)

    @property
    def live_nbytes(self) -> int:
        """Device memory in use: the sum of `nbytes` of every `empty` whose storage is alive. `peak_nbytes` is the most it ever was."""
        with self._lock:
            self._take_back()
            return self._live_nbytes

    @property
    def num_pending(self) -> int:
        return len(self._queue)

    def upload(self, source: torch.Tensor, target: torch.Tensor, *, after: Event | None = None) -> Event:
        event = self._copy(source, target, after)
        with self._lock:
            self.num_uploads += 1
            self.uploaded_nbytes += source.numel()
        return event

    def download(self, source: torch.Tensor, target: torch.Tensor, *, after: Event | None = None) -> Event:
        event = self._copy(source, target, after)
        with self._lock:
            self.num_downloads += 1
            self.downloaded_nbytes += source.numel()
        return event

    def _copy(self, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> Event:
        check_copy(source, target)
        copy = _Copy(self, source, target, after)
        with self._lock:
            # The content of the target is undefined from here on. Only what queued copies still have to read stays.
            if not any(c.reads(target) for c in (*self._queue, copy)):
                ctypes.memset(target.data_ptr(), _POISON, target.numel())
            self._queue.append(copy)
        return copy.event

    def land(self, event: _CopyEvent) -> None:
        """Perform the queued copies up to that of `event`, in order."""
        with self._lock:
            while not event.landed:
                copy = self._queue.popleft()
                if copy.after is not None:
                    copy.after.synchronize(None)
                ctypes.memmove(copy.target.data_ptr(), copy.source.data_ptr(), copy.source.numel())
                copy.event.landed = True

    def record(self) -> Event:
        return DoneEvent()

    def wait(self, event: Event) -> None:
        event.synchronize(None)

    def synchronize(self) -> None:
        with self._lock:
            last = self._queue[-1].event if self._queue else None
        if last is not None:
            last.synchronize(None)

    def close(self) -> None:
        self.synchronize()


class _CopyEvent(Event):
    def __init__(self, device: SimulatedDevice) -> None:
        self.landed = False
        self._device = device
        self._polls = device.polls
        self._ready = time.monotonic() + device.latency_s

    def done(self) -> bool:
        if not self.landed:
            if self._polls > 0:
                self._polls -= 1
                return False
            if time.monotonic() < self._ready:
                return False
            self._device.land(self)
        return True

    def synchronize(self, timeout: float | None) -> bool:
        left = self._ready - time.monotonic()
        if not self.landed and left > 0:
            time.sleep(left if timeout is None else min(left, timeout))
            if timeout is not None and timeout < left:
                return False
        if not self.landed:
            self._device.land(self)
        return True


class _Copy:
    """A queued copy. It keeps the memory alive; its event does not."""

    def __init__(self, device: SimulatedDevice, source: torch.Tensor, target: torch.Tensor, after: Event | None) -> None:
        self.source = source
        self.target = target
        self.after = after
        self.event = _CopyEvent(device)

    def reads(self, target: torch.Tensor) -> bool:
        start, other = self.source.data_ptr(), target.data_ptr()
        return start < other + target.numel() and other < start + self.source.numel()
