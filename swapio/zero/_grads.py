"""Where the gradients of one unit gather until its weights are stepped: on the device, in host memory, or in a file between times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ..memory import Lease
from ..swap import Place, Record, RecordLease

if TYPE_CHECKING:
    from ._units import UnitSet

__all__ = ["DeviceGrads", "GradBuffer", "LeasedGrads", "SpilledGrads"]


class GradBuffer(Protocol):
    """What all kinds have. Called under the engine's lock."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 `[grad_nbytes]`; brings it and keeps it here until `shut`."""

    @property
    def here(self) -> bool:
        """Whether `tensor` costs nothing."""

    def held(self) -> bool:
        """Whether somebody has a view, and may write through it."""

    def written(self) -> None:
        """The bytes were, or will be, changed."""

    def shut(self) -> None:
        """Nobody needs the bytes now. Views that are alive stay valid."""

    def drop(self) -> None:
        """The bytes are not needed any more."""


class DeviceGrads:
    """On the device, where the optimizer runs there."""

    def __init__(self, zero: UnitSet, nbytes: int) -> None:
        self.tensor = zero.manager.device.empty(nbytes)
        self.here = True
        self._uses = _num_uses(self.tensor)

    def held(self) -> bool:
        return _num_uses(self.tensor) > self._uses

    def written(self) -> None:
        pass

    def shut(self) -> None:
        pass

    def drop(self) -> None:
        pass


class LeasedGrads:
    """In host memory until they are dropped."""

    def __init__(self, zero: UnitSet, lease: Lease) -> None:
        self._zero = zero
        self._lease = lease
        self.here = True

    @property
    def tensor(self) -> torch.Tensor:
        return self._lease.tensor

    def held(self) -> bool:
        return self._lease.held()

    def written(self) -> None:
        pass

    def shut(self) -> None:
        pass

    def drop(self) -> None:
        self._zero.manager.end_lease(self._lease)


class SpilledGrads:
    """In a record at home on NVMe: in host memory only while they are used."""

    def __init__(self, zero: UnitSet, record: Record) -> None:
        self._zero = zero
        self._lease: RecordLease | None = None
        self._uses = 0  # of its storage, when nobody else has a view
        self._dirty = False
        self.record = record

    @property
    def tensor(self) -> torch.Tensor:
        if self._lease is None:
            self._lease = self._zero.pin(self.record, Place.HOST)
            self._zero.note(self.record, Place.HOST)
            self._uses = _num_uses(self._lease.raw)
        return self._lease.raw

    @property
    def here(self) -> bool:
        return self._lease is not None

    def held(self) -> bool:
        return self._lease is not None and _num_uses(self._lease.raw) > self._uses

    def written(self) -> None:
        self._dirty = True

    def shut(self) -> None:
        if self._lease is None or self.held():
            return
        if self._dirty:
            self._lease.mark_dirty()
            self._dirty = False
        self._end()

    def drop(self) -> None:
        self._end()
        self._zero.manager.discard(self.record)

    def _end(self) -> None:
        if self._lease is not None:
            lease, self._lease = self._lease, None
            lease.release()


def _num_uses(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
