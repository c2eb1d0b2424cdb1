"""One stored tensor: where its bytes are, whether they are newer than at rest, and who uses them.

[Note: Places and currency] A record has a *home* (where it rests: NVMe, host or device) and up to one copy in each place.
A copy is *current* or stale. Dirty means that the copy at home is stale. At rest, residency follows from what is current; a
movement is entered with `moving`, which refuses every start that the table `MAY_START` does not list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import ConfigError, UsageError
from ..io import LentExtent
from ..memory import Event, Lease
from ..spec import Extent
from ._in_file import FilePart

__all__ = ["MAY_START", "DeviceCopy", "Place", "Record", "Residency", "TensorSpec", "hull"]


class Place(enum.IntEnum):
    """Where a copy can be. A home is one of these."""

    NVME = 0
    HOST = 1
    DEVICE = 2

    @classmethod
    def parse(cls, name: str, *, key: str) -> Place:
        """From DeepSpeed's words: `"nvme"`, `"cpu"`, `"none"` (stays on the device); also `"host"`, `"device"`."""
        places = {"nvme": cls.NVME, "cpu": cls.HOST, "host": cls.HOST, "none": cls.DEVICE, "device": cls.DEVICE}
        if name not in places:
            raise ConfigError(f"{key}: {name!r} is no place for a tensor; use one of {', '.join(places)}", key=key, value=name)
        return places[name]


class Residency(enum.Enum):
    """What a record is doing, and which memory it holds meanwhile."""

    ON_NVME = "at rest in the file or in files of others (or never written: zeros); needs no memory"
    READING = "file to host lease; holds the lease, its bytes are not valid yet"
    ON_HOST = "a current copy in a host lease"
    WRITING = "host lease to file; the host copy stays valid and may be acquired"
    UPLOADING = "host lease to device buffer; holds both"
    ON_DEVICE = "a current copy in a device buffer"
    OFFLOADING = "device buffer to host lease; holds both"
    FAILED = "moving it home failed: the copy away from home is the only current one"


_R = Residency
MAY_START: dict[Residency, frozenset[Residency]] = {
    _R.READING: frozenset({_R.ON_NVME}),
    _R.WRITING: frozenset({_R.ON_HOST, _R.ON_DEVICE, _R.FAILED}),
    _R.UPLOADING: frozenset({_R.ON_HOST, _R.FAILED}),
    _R.OFFLOADING: frozenset({_R.ON_DEVICE, _R.FAILED}),
}
"""Each movement, and the states at rest it may start from."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """How the bytes of a record are a tensor: dtype, shape and strides over `nbytes` bytes from the first element."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """Of a strided tensor.

        Raises:
            UsageError: sparse, quantized, nested or lazily conjugated tensors.
        """
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
            raise UsageError("only plain strided tensors can be stored; call .to_dense(), .dequantize() or .resolve_conj() first")
        return cls(tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory; more than `numel` where the strides leave gaps."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """The tensor in `raw`, uint8 `[>= nbytes]`; shares its storage."""
        return raw[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)

    def copy_bytes(self, tensor: torch.Tensor, raw: torch.Tensor) -> None:
        """Copy the raw bytes of `tensor` (gaps of its strides too) into `raw`, uint8 `[>= nbytes]`."""
        flat = tensor.detach().as_strided((self.span,), (1,), tensor.storage_offset())
        raw[: self.nbytes].copy_(flat.view(torch.uint8))


class DeviceCopy:
    """A record's buffer on the accelerator, and what orders its use."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # uint8 [nbytes]
        self.arrived: Event | None = None  # compute must wait for this before reading
        self.used: Event | None = None  # a copy out of the buffer must wait for this
        self._uses = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)

    def held(self) -> bool:
        """Whether a view outside still uses the storage."""
        return bool(torch._C._storage_Use_Count(self.tensor.untyped_storage()._cdata) > self._uses)


def hull(a: slice | None, b: slice) -> slice:
    """The smallest range around both."""
    return b if a is None else slice(min(a.start, b.start), max(a.stop, b.stop))


class Record:
    """The state of one key. The manager's loop thread is the only writer, except under `lock`: pins and generation."""

    __slots__ = (
        "borrowed", "busy", "changed", "content_nbytes", "current", "device", "error", "extent", "generation", "home", "host", "in_file",
        "key", "last_use", "lent", "lock", "movement", "nbytes", "next_use", "overwritten", "pins",
        "prefetched", "removed", "since", "spec", "stored_nbytes",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        nbytes: int,
        home: Place,
        spec: TensorSpec,
        extent: Extent | None,
        busy: Any,
        in_file: Sequence[tuple[int, FilePart]] = (),
    ) -> None:
        self.key = key
        self.nbytes = nbytes
        self.home = home
        self.spec = spec
        self.extent = extent
        self.borrowed: Sequence[tuple[int, FilePart]] = ()  # where its first bytes are until it is written as a whole; the rest is zeros
        self.lent: LentExtent | None = None  # the extent, which others read from
        self.in_file = in_file  # what the extent has no room for, by byte of the record, ascending; until such a byte is changed
        self.content_nbytes = nbytes  # what a write-back has to store; the rest is zeros
        self.stored_nbytes = 0  # bytes of the extent ever written; the rest of the record is zeros
        self.changed: slice | None = None  # bytes that may differ from those in the extent
        self.movement: Residency | None = None
        self.since = time.monotonic()
        self.host: Lease | None = None
        self.device: DeviceCopy | None = None
        self.current = [True, False, False]  # by Place
        self.lock = threading.Lock()
        self.pins: list[tuple[Place, object]] = []  # (place, owner)
        self.generation = 0
        self.last_use = 0
        self.next_use: int | None = None  # when it is expected again, on the clock of whoever knows
        self.overwritten = False  # bytes that were never stored need not be zeros: who uses it writes first
        self.prefetched = False  # brought ahead of its use, not used yet
        self.removed = False
        self.error: BaseException | None = None  # why the last write-back failed
        self.busy = busy  # asyncio.Lock: one movement at a time

    @property
    def own_nbytes(self) -> int:
        """What the extent holds, or may: all but what stays in a file."""
        in_file = self.in_file
        return in_file[0][0] if in_file else self.nbytes

    @property
    def dirty(self) -> bool:
        """Whether there are bytes newer than those at home."""
        return not self.current[self.home] and (self.current[Place.HOST] or self.current[Place.DEVICE])

    @property
    def residency(self) -> Residency:
        """The movement under way, else where the bytes rest: the place nearest to compute that is current."""
        if self.movement is not None:
            return self.movement
        if self.error is not None:
            return Residency.FAILED
        if self.current[Place.DEVICE]:
            return Residency.ON_DEVICE
        return Residency.ON_HOST if self.current[Place.HOST] else Residency.ON_NVME

    @contextlib.contextmanager
    def moving(self, movement: Residency) -> Iterator[None]:
        """Be in `movement` for the block."""
        if self.residency not in MAY_START[movement]:
            raise RuntimeError(f"{self.key!r}: {movement.name} cannot start from {self.residency.name}")
        self.movement = movement
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.movement = None

    @property
    def distance(self) -> int:
        """Larger: expected later, so better to drop. Who gives no expectation is dropped first, the longest unused before."""
        return self.next_use if self.next_use is not None else (1 << 60) - self.last_use

    def pinned(self, place: Place) -> bool:
        return any(p is place for p, _ in self.pins)

    def reset(self) -> None:
        """All bytes are zeros, as at first. Call under `lock`, without pins."""
        self.current = [True, False, False]
        self.generation += 1
        self.content_nbytes, self.stored_nbytes, self.borrowed = self.nbytes, 0, ()
        self.changed = self.error = self.next_use = None

    def to_write(self) -> tuple[int, int, slice]:
        """Generation, bytes that a write-back has to store, and those that may differ from the extent's, all of one moment."""
        with self.lock:
            return self.generation, self.content_nbytes, self.changed or slice(0, self.nbytes)

    def touched(self, place: Place, span: slice) -> None:
        """The bytes `span` of the copy in `place` were changed: it alone is current. Call under `lock`."""
        self.current = [p is place for p in Place]
        self.generation += 1
        self.changed = hull(self.changed, span)
