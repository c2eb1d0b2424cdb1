"""A unit of parameters that were constructed where they rest.

[Note: Stored as it will be used] Where fp32 parameters become bfloat16, by the argument `dtype` or in the engine, they are written once, as
that: rounded, or with `split_`, which keeps every bit, as the engine's weights and the lower halves of its masters. Operations go on seeing
what was constructed. The engine's units then begin with these bytes (`SwapManager.lend`): until they are stepped nothing is written again.
Until then the drive has room for both, so that it cannot be full in the first step.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..optim import merge_, split_
from ..swap import FilePart, Place
from ._away import forget, placeholder, raw_grad
from ._layout import Slot, UnitLayout
from ._quiet import quiet
from ._unit import Unit, slot_view

if TYPE_CHECKING:
    from ._construct import ConstructionSet

__all__ = ["ConstructedUnit", "Lent", "ShownLease"]

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD: Any = torch.Tensor.grad


class Lent(NamedTuple):
    """Where the bytes of a parameter are that an engine takes over: its weights as `slot` says, and the lower halves if it was split."""

    slot: Slot
    weights: FilePart
    lower: FilePart | None


class ConstructedUnit(Unit):
    """A unit whose parameters may die, become another dtype or shape, or be given back, one by one.

    Attributes:
        stored: how they lie in the record, if not as they are shown; lower halves lie behind it.
    """

    zero: ConstructionSet
    stored: UnitLayout

    def load(self, raw: torch.Tensor, shown: torch.Tensor) -> None:
        """From the bytes of the record to those that are shown."""
        for index, slot in enumerate(self.stored.slots):
            view, lower = self.layout_view(shown, index), self._lower(index)
            if lower is None:
                view.copy_(slot_view(raw, slot))
            else:
                merge_(_flat(slot_view(raw, slot)), raw[lower].view(torch.int16), _flat(view))

    def store(self, values: Sequence[torch.Tensor], raw: torch.Tensor) -> int:
        """The values of all parameters into the bytes of the record; how many of them are needed, the rest being zeros.

        Lower halves are none where all values are those of 16-bit weights, as pretrained ones often are.
        """
        for index, (slot, value) in enumerate(zip(self.stored.slots, values, strict=True)):
            view, lower = slot_view(raw, slot), self._lower(index)
            if lower is None:
                view.copy_(value)
            else:
                dense = value.detach()
                if tuple(value.stride()) != slot.stride:
                    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device="cpu").copy_(value)
                split_(_flat(dense), _flat(view), raw[lower].view(torch.int16))
        halves = [raw[lower] for i in range(len(values)) if (lower := self._lower(i)) is not None]
        return raw.numel() if any(half.any() for half in halves) else self.stored.nbytes

    def _lower(self, index: int) -> slice | None:
        """Bytes of the record that hold the lower halves of a parameter."""
        slot = self.stored.slots[index]
        if not self.zero.splits or slot.dtype is self.layout.slots[index].dtype:
            return None
        start = self.stored.nbytes + slot.offset
        return slice(start, start + slot.span * slot.dtype.itemsize)

    def show_stored(self) -> None:
        """Let parameters that are away be as they were rounded from now on."""
        if self.lease is not None or self.stored is self.layout or self.zero.splits:
            return
        self.layout = self.stored
        self._stand_ins.clear()
        for index, ref in enumerate(self._refs):
            param, slot = ref(), self.layout.slots[index]
            if param is not None:
                _SET_DATA(param, placeholder(slot.dtype, self.device, slot.shape))

    def lend(self, index: int) -> Lent:
        """Where a parameter's bytes are. The unit is on the drive."""
        slot, lower = self.stored.slots[index], self._lower(index) if self.record.stored_nbytes > self.stored.nbytes else None
        weights, *halves = (
            self.zero.manager.lend(self.record, part.start, part.stop - part.start)
            for part in (slice(slot.offset, slot.offset + slot.span * slot.dtype.itemsize), lower)
            if part is not None
        )
        return Lent(slot, weights, halves[0] if halves else None)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters; in the place of one that is gone, one that shows nothing."""
        return [self._stand_in(i) if (p := ref()) is None else p for i, ref in enumerate(self._refs)]

    @params.setter
    def params(self, params: list[nn.Parameter]) -> None:
        me = weakref.ref(self)
        self._refs: list[Callable[[], nn.Parameter | None]] = [
            weakref.ref(p, functools.partial(_died, me, i)) for i, p in enumerate(params)
        ]
        self._stand_ins: dict[int, nn.Parameter] = {}

    def _stand_in(self, index: int) -> nn.Parameter:
        if index not in self._stand_ins:
            slot = self.layout.slots[index]
            with quiet():
                self._stand_ins[index] = nn.Parameter(placeholder(slot.dtype, self.device, slot.shape), requires_grad=False)
        return self._stand_ins[index]

    def live(self) -> list[nn.Parameter]:
        """The parameters that are still here."""
        return [p for ref in self._refs if (p := ref()) is not None]

    def is_live(self, index: int) -> bool:
        return self._refs[index]() is not None

    def lost(self, index: int) -> None:
        """A parameter is not of this unit any more."""
        self._refs[index] = _nobody
        self.zero.alive.discard((self, index))

    def attach(self) -> None:
        if self.lease is None:
            with quiet():
                self._part_with_converted(self._foreign(placeholder_is_ours=True))
        super().attach()

    def detach(self) -> bool:
        if self.lease is not None and not self.pins:
            with quiet():
                self._part_with_converted(self._foreign())
            if not self.live():
                self.zero.drop(self)
                return True
        return super().detach()

    def _part_with_converted(self, foreign: Iterable[int]) -> None:
        """Parameters whose data is of another dtype, shape or device now (`model.half()`) are new ones."""
        for index in foreign:
            slot, param = self.layout.slots[index], self.params[index]
            if (param.dtype, tuple(param.shape), param.device) != (slot.dtype, slot.shape, self.device):
                param.__class__ = nn.Parameter
                forget(param)
                self.lost(index)
                self.zero.add(self.names[index], param)

    def give_back(self, indices: Iterable[int]) -> None:
        """Make some parameters ordinary again, in memory of their own."""
        with quiet():
            self.attach()
            self.find_writes()
            if self.lease is None:
                raise RuntimeError(f"{self.name!r} went away while it was given back")
            for index in indices:
                param = self.params[index]
                _SET_DATA(param, self.layout_view(self.lease.raw, index).clone())
                param.__class__ = nn.Parameter
                forget(param)
                self.lost(index)
            self.detach()

    def get_grad(self, index: int) -> torch.Tensor | None:
        """There is no gradient buffer: what autograd left is the gradient."""
        return raw_grad(self.params[index])

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.params[index], value)


def _nobody() -> None:
    return None


def _died(unit_ref: weakref.ref[ConstructedUnit], index: int, _: Any) -> None:
    unit = unit_ref()
    if unit is not None:
        unit.lost(index)
        unit.zero.end_if_unused()


class ShownLease:
    """What `stored` stands for, in ordinary memory, as before it left."""

    def __init__(self, unit: ConstructedUnit) -> None:
        self._unit = unit
        self._dirty = False
        self.raw = torch.empty(unit.layout.nbytes, dtype=torch.uint8, device="cpu")
        with unit.zero.pin(unit.record, Place.HOST) as lease:
            unit.load(lease.raw, self.raw)

    def mark_dirty(self, *, span: slice | None = None) -> None:
        self._dirty = True

    def publish(self) -> None:
        if self._dirty:
            self._dirty = False
            unit = self._unit
            with unit.zero.pin(unit.record, Place.HOST) as lease:
                nbytes = unit.store([unit.layout_view(self.raw, slot.index) for slot in unit.layout.slots], lease.raw)
                lease.mark_dirty(nbytes=nbytes)

    def release(self) -> None:
        self.publish()
        if hasattr(self, "raw"):
            del self.raw


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))
