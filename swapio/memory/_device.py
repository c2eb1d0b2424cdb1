"""The interface to an accelerator, and the machine without one.

The host gives work to two streams: *compute*, where PyTorch's operators run, and *copy*, which this interface feeds. Each runs in the order
given; between them only events order anything. Nothing above this package knows which device it is.
"""

from __future__ import annotations

import abc

import torch

__all__ = ["CpuDevice", "Device", "DoneEvent", "Event", "check_copy"]


class Event(abc.ABC):
    """A point in a stream. Any thread may ask."""

    @abc.abstractmethod
    def done(self) -> bool:
        """Whether the stream is past this point. Does not block."""

    @abc.abstractmethod
    def synchronize(self, timeout: float | None) -> bool:
        """Block the caller until `done`, at most `timeout` seconds (`None`: for ever). Whether it is done."""


class DoneEvent(Event):
    """A point that is always passed."""

    def done(self) -> bool:
        return True

    def synchronize(self, timeout: float | None) -> bool:
        return True


class Device(abc.ABC):
    """Where compute runs, its memory, and the copies between that and host memory. All methods may be called from any thread."""

    kind: str
    """`"cpu"`, `"cuda"` or `"simulated"`."""
    torch_device: torch.device
    has_memory: bool
    """False where compute works on host memory: nothing needs to be uploaded, a parameter is a view of the host lease."""

    @abc.abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised device memory, uint8 `[nbytes]`, with a storage of its own. The first use must be on the compute stream, or after a
        `record()` made since."""

    @abc.abstractmethod
    def upload(self, source: torch.Tensor, target: torch.Tensor, *, after: Event | None = None) -> Event:
        """Queue a copy from host to device memory on the copy stream, not before `after`. Does not block where host memory is pinned.

        Both are flat uint8 of the same length. From this call until the event is done, `source` must not be written and the content of
        `target` is undefined. The device keeps both alive that long.

        Raises:
            ValueError: the two do not fit each other.
        """

    @abc.abstractmethod
    def download(self, source: torch.Tensor, target: torch.Tensor, *, after: Event | None = None) -> Event:
        """As `upload`, from device memory to host memory."""

    @abc.abstractmethod
    def record(self) -> Event:
        """The end of what the compute stream was given so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Let what the compute stream is given from now on wait for `event`. Does not block the host."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until both streams are empty."""

    def pin(self, address: int, nbytes: int) -> None:  # noqa: B027 (most devices have nothing to do)
        """Make a mapped range of host memory reachable by the copy engine. It may fail: then copies work, but block the host."""

    def unpin(self, address: int) -> None:  # noqa: B027
        """Undo `pin`, before the range is unmapped. Works after `close` too."""

    def close(self) -> None:  # noqa: B027
        """Finish all copies. Idempotent."""


def check_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Raise `ValueError` unless both are flat uint8 tensors of one length."""
    for what, tensor in (("source", source), ("target", target)):
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"the {what} of a copy must be contiguous uint8 [nbytes], not {tensor.dtype} {list(tensor.shape)}")
    if source.numel() != target.numel():
        raise ValueError(f"a copy of {source.numel()} bytes into {target.numel()} bytes")


class CpuDevice(Device):
    """Compute on the host. Copies happen at once, in the caller's thread."""

    kind = "cpu"
    has_memory = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, source: torch.Tensor, target: torch.Tensor, *, after: Event | None = None) -> Event:
        check_copy(source, target)
        if after is not None:
            after.synchronize(None)
        target.copy_(source)
        return DoneEvent()

    download = upload

    def record(self) -> Event:
        return DoneEvent()

    def wait(self, event: Event) -> None:
        event.synchronize(None)

    def synchronize(self) -> None:
        pass
