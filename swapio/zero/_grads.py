"""Where the gradients of one unit gather until its weights are stepped: on the device, in host memory, or in a file between times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ..memory import Lease
from ..swap import Place, Record, RecordLease

if TYPE_CHECKING:
    from ._layout import Slot, UnitLayout
    from ._units import UnitSet

__all__ = ["DeviceGrads", "GradBuffer", "LeasedGrads", "SpilledGrads", "flat_grad"]


class GradBuffer(Protocol):
    """What all kinds have. Called under the engine's lock."""

    @property
    def tensor(self) -> torch.Tensor:
        """uint8 `[grad_nbytes]`; brings it and keeps it here until `shut`."""

    @property
    def here(self) -> bool:
        """Whether `tensor` costs nothing."""

    def keep(self, slot: Slot, grad: torch.Tensor) -> bool:
        """Let a tensor that nobody else will change be a parameter's first gradient; False: it must be copied."""

    def kept(self, slot: Slot) -> torch.Tensor | None:
        """The tensor that is a parameter's gradient in place of its part of the buffer."""

    def held(self) -> bool:
        """Whether somebody has a view, and may write through it."""

    def written(self) -> None:
        """The bytes were, or will be, changed."""

    def shut(self) -> None:
        """Nobody needs the bytes now. Views that are alive stay valid."""

    def drop(self) -> None:
        """The bytes are not needed any more."""


class _Copied:
    """All gradients are in the buffer."""

    def keep(self, slot: Slot, grad: torch.Tensor) -> bool:
        return False

    def kept(self, slot: Slot) -> torch.Tensor | None:
        return None


class DeviceGrads(_Copied):
    """On the device, where the optimizer runs there."""

    def __init__(self, zero: UnitSet, layout: UnitLayout) -> None:
        self.tensor = zero.manager.device.empty(layout.grad_nbytes)
        layout.zero_grad_padding(self.tensor)
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
    """In host memory until they are dropped.

    [Note: Autograd's own] Where all is in memory, copying gradients took 3% of a step. So autograd's tensors stay, and count for the lease,
    whose memory nobody touches; who needs the buffer has them copied there.

    Args:
        keeps: they may stay.
    """

    def __init__(self, zero: UnitSet, lease: Lease, layout: UnitLayout, *, keeps: bool) -> None:
        self._zero = zero
        self._lease = lease
        self._layout = layout
        self._own: dict[int, torch.Tensor] | None = {}
        self.here = True
        if not keeps:
            self.tensor  # noqa: B018

    @property
    def tensor(self) -> torch.Tensor:
        buffer = self._lease.tensor
        if self._own is not None:
            own, self._own = self._own, None
            self._layout.zero_grad_padding(buffer)
            for index, grad in own.items():
                self._layout.grad_view(buffer, self._layout.slots[index]).copy_(grad)
        return buffer

    def keep(self, slot: Slot, grad: torch.Tensor) -> bool:
        same = grad.dtype is self._layout.segments[slot.segment].grad_dtype and grad.shape == slot.shape and grad.stride() == slot.stride
        if self._own is None or not same or grad.untyped_storage().nbytes() != grad.nbytes or _num_uses(grad) > _ALONE:
            return False
        self._own[slot.index] = grad
        return True

    def kept(self, slot: Slot) -> torch.Tensor | None:
        return None if self._own is None else self._own.get(slot.index)

    def held(self) -> bool:
        return self._lease.held()

    def written(self) -> None:
        pass

    def shut(self) -> None:
        pass

    def drop(self) -> None:
        self._own = None
        self._zero.manager.end_lease(self._lease)


class SpilledGrads(_Copied):
    """In a record at home on NVMe: in host memory only while they are used."""

    def __init__(self, zero: UnitSet, record: Record, layout: UnitLayout) -> None:
        self._zero = zero
        self._lease: RecordLease | None = None
        self._uses = 0  # of its storage, when nobody else has a view
        self._dirty = False
        self.record = record
        layout.zero_grad_padding(self.tensor)

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


def flat_grad(grads: GradBuffer, layout: UnitLayout, slot: Slot) -> torch.Tensor:
    """The gradient of a parameter, `[span]` in memory order."""
    kept = grads.kept(slot)
    if kept is not None:
        return kept.as_strided((slot.span,), (1,))
    return grads.tensor[layout.grad_bytes(slot)].view(layout.segments[slot.segment].grad_dtype)


def _num_uses(tensor: torch.Tensor) -> int:
    """Of its storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_ALONE = _num_uses(torch.empty(1, device="cpu"))
