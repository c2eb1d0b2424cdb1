"""One unit: a range of parameters with one record of weights, brought, attached, let go and written as a whole.

[Note: A held unit stays] A view of a weight that somebody holds (`w = p.t()`, a list of `p.data`) must go on showing the weight. So a
unit is let go only when nobody outside uses its storage; until then it stays attached, costs budget, and is named in the budget's error.
What autograd saved of a parameter past the hooks is no view: bumping the version at detach makes its use an error instead of NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import nn

from ..errors import UsageError
from ..swap import Place, Record, RecordLease
from ._away import AwayParameter, WindowParameter, forget, manage, placeholder, raw_grad, set_raw_grad
from ._gather import GatheredLease
from ._layout import Slot, UnitLayout
from ._norms import GradNorm, measure
from ._partition import Partition
from ._quiet import quiet, uninterrupted
from ._saved import WeightHandle

if TYPE_CHECKING:
    from ._grads import GradBuffer
    from ._units import UnitSet

__all__ = ["Unit", "slot_view"]

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_STORAGE = torch.Tensor.untyped_storage  # past the parameter's own, which takes it for an alias that is handed out
_use_count = torch._C._storage_Use_Count
_bump = torch.autograd.graph.increment_version


class Unit:
    """Parameters that move together. Not for users; every method is called under the engine's lock."""

    def __init__(
        self,
        zero: UnitSet,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        groups: Sequence[int | None],
        record: Record,
        layout: UnitLayout,
        partition: Partition,
    ) -> None:
        self.zero = zero
        self.number = len(zero.units)  # the same on all ranks
        self.name = name
        self.names = [n for n, _ in params]
        self.params = [p for _, p in params]
        self.groups = groups  # of the optimizer; None: not trained
        self.layout = layout
        self.partition = partition  # among the ranks
        self.record = record  # the weights, or of each rank its slice of them
        self.device = self.params[0].device
        self.lease: RecordLease | GatheredLease | None = None  # pinned and shown by the parameters
        self.pins = 0  # windows and ops that need it now
        self.stale_masters: set[int] = set()  # parameters the user wrote: their master is the weight itself
        self.grads: GradBuffer | None = None
        self.spill: Record | None = None  # where gradients rest between times
        self.keeps_grads = False  # they stay in host memory until a step
        self.has_grad = [False] * len(self.params)
        self.came = [False] * len(self.params)  # a gradient came since the buffer was last shut
        self.norms: list[GradNorm | None] = [None] * len(self.params)  # of gradients that were looked at before the step
        self.contributed = [False] * len(self.params)  # a gradient was sent to the ranks that sum it
        self._detach_bumps = 0
        self._versions: list[int] = []
        self._hashes: dict[int, int] = {}  # of parameters whose bytes were aliased
        self._uses = 0
        self._address = 0

    # --- coming and going ---

    @property
    def attached(self) -> bool:
        return self.lease is not None

    def open(self) -> None:
        """Bring the unit, keep it until the matching `shut`, and let ops on its parameters run plainly."""
        with uninterrupted(), self.zero.lock:
            self.attach()
            self.pins += 1
            if self.pins == 1:
                for param in self.params:
                    param.__class__ = WindowParameter

    def shut(self) -> None:
        with uninterrupted(), self.zero.lock:
            self.pins -= 1
            if not self.pins:
                for param in self.params:
                    param.__class__ = AwayParameter

    def attach(self) -> None:
        """Bring the weights and show them in the parameters."""
        if self.lease is not None:
            self.zero.used(self)
            return
        self.zero.check_open()
        with quiet():
            self.zero.make_room(self)
            self.apply_due()
            adopted = [(i, self._adopt(i)) for i in self._foreign(placeholder_is_ours=True)]
            lease = self.zero.bring(self)
            raw = lease.raw
            try:
                for index, data in adopted:
                    lease.mark_dirty(span=self._bytes([index]))
                    self.layout_view(raw, index).copy_(data)
                    self.stale_masters.add(index)
                    self.zero.written(self, {index})
            except UsageError:
                lease.release()
                raise
            self._show(raw)
            self.lease = lease
            self.zero.attached(self)

    def apply_due(self) -> None:
        """Before anybody looks at the weights or their state: make the update that the last step has put off."""
        if self.zero.stepper is not None:
            self.zero.stepper.apply_due(self)

    def _show(self, raw: torch.Tensor) -> None:
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            _SET_DATA(param, self.layout_view(raw, slot.index))
        self._versions = [p._version for p in self.params]
        self._address = raw.untyped_storage().data_ptr()
        self._uses = _use_count(raw.untyped_storage()._cdata)
        self.zero.saved.units[self._address] = self

    def layout_view(self, raw: torch.Tensor, index: int) -> torch.Tensor:
        """The parameter `index` in `raw`, uint8 `[unit nbytes]`."""
        slot = self.layout.slots[index]
        return slot_view(raw, slot)

    def _bytes(self, indices: Iterable[int]) -> slice:
        """Around these parameters' bytes in the unit."""
        slots = [self.layout.slots[i] for i in indices]
        return slice(min(s.offset for s in slots), max(s.offset + s.span * s.dtype.itemsize for s in slots))

    def held(self) -> bool:
        """Whether somebody outside uses the storage of an attached unit."""
        if self.lease is None:
            return False
        return bool(_use_count(self.lease.raw.untyped_storage()._cdata) > self._uses - len(self._foreign()))

    def detach(self) -> bool:
        """Let the weights go; False when they are in use or held."""
        lease = self.lease
        if lease is None:
            return True
        with quiet():
            if self.pins or self.held():
                return False
            self.find_writes()
            for slot, param in zip(self.layout.slots, self.params, strict=True):
                _bump(param)
                _SET_DATA(param, placeholder(slot.dtype, self.device, slot.shape))
            self._detach_bumps += 1
            self._hashes.clear()
            del self.zero.saved.units[self._address]
            self.lease = None
            lease.release()
            self.zero.detached(self)
        return True

    def rebuild(self, handle: WeightHandle) -> torch.Tensor:
        """The view that `handle` stands for; brings the unit."""
        with self.zero.lock, quiet():
            if self.version(handle.param) != handle.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{self.names[handle.param]!r} "
                    f"is at version {self.version(handle.param)}; expected version {handle.version} instead"
                )
            self.attach()
            if self.lease is None:
                raise RuntimeError(f"{self.name!r} went away while it was brought")
            raw = self.lease.raw
            usable = raw.numel() // handle.dtype.itemsize * handle.dtype.itemsize
            return raw[:usable].view(handle.dtype).as_strided(handle.shape, handle.stride, handle.storage_offset)

    def version(self, index: int) -> int:
        """The parameter's version counter, less what coming and going added."""
        return self.params[index]._version - self._detach_bumps

    # --- what the user does to the parameters ---

    def watch(self, index: int) -> None:
        """An alias of the parameter's bytes is handed out: remember what they are now."""
        with self.zero.lock, quiet():
            if self.lease is not None and index not in self._hashes:
                self._hashes[index] = self.digest(index)

    def digest(self, index: int) -> int:
        """A hash of the bytes of a parameter of an attached unit."""
        if self.lease is None:
            raise RuntimeError("only the bytes of an attached unit can be hashed")
        slot = self.layout.slots[index]
        raw = self.lease.raw[slot.offset : slot.offset + slot.span * slot.dtype.itemsize]
        return xxhash.xxh3_64_intdigest(
            raw.cpu().numpy()  # type: ignore[arg-type]
        )

    def find_writes(self) -> None:
        """Notice what the user wrote into an attached unit since the last look, and take over data that he put in place of ours."""
        if self.lease is None:
            return
        written = set(self._foreign())
        for index in written:
            view = self.layout_view(self.lease.raw, index)
            view.copy_(self._adopt(index))
            _SET_DATA(self.params[index], view)
        for index, param in enumerate(self.params):
            if param._version != self._versions[index]:
                self._versions[index] = param._version
                written.add(index)
        for index, before in self._hashes.items():
            self._hashes[index] = self.digest(index)  # a write is found once: later ones may not be allowed
            if self._hashes[index] != before:
                written.add(index)
        if written:
            self.lease.mark_dirty(span=self._bytes(written))
            self.stale_masters |= written
            self.zero.written(self, written)

    def weights_written(self, index: int) -> None:
        """The bytes of a parameter of an attached unit were changed for the user, on all ranks."""
        if self.lease is not None:
            self.lease.mark_dirty(span=self._bytes([index]))
            self.weights_stepped([index])

    def weights_stepped(self, indices: Sequence[int]) -> None:
        """The optimizer changed these weights of an attached unit: no user's write, but a new version for autograd."""
        with quiet():
            for index in indices:
                _bump(self.params[index])
                self._versions[index] = self.params[index]._version
            for index in self._hashes:
                self._hashes[index] = self.digest(index)

    def record_changed(self, indices: Sequence[int]) -> None:
        """The weights of these parameters were changed in the record, or will be when it comes: whoever holds a view must see them."""
        if self.lease is None:
            with quiet():
                for index in indices:
                    _bump(self.params[index])
            return
        if not isinstance(self.lease, GatheredLease):  # that one is refreshed when all ranks have written
            self.zero.pin(self.record, Place.DEVICE).release()
        self.weights_stepped(indices)

    def publish_writes(self) -> None:
        """Let the record have what the user wrote into an attached unit."""
        if self.lease is not None:
            self.find_writes()
            self.lease.publish()

    def settle(self) -> None:
        """Let the record have all that the user wrote, data put in place of a parameter that is away too."""
        with self.zero.lock, quiet():
            if self.lease is None and self._foreign(placeholder_is_ours=True):
                self.attach()
            self.publish_writes()

    def _foreign(self, *, placeholder_is_ours: bool = False) -> list[int]:
        """Parameters whose data the user replaced (`p.data = x`, `.to()`)."""
        foreign = []
        for slot, param in zip(self.layout.slots, self.params, strict=True):
            if placeholder_is_ours:
                ours = placeholder(slot.dtype, self.device, slot.shape).untyped_storage().data_ptr()
            else:
                ours = self._address
            with torch._C.DisableTorchFunctionSubclass():
                if _STORAGE(param).data_ptr() != ours and param.numel():
                    foreign.append(slot.index)
        return foreign

    def _adopt(self, index: int) -> torch.Tensor:
        slot = self.layout.slots[index]
        with torch._C.DisableTorchFunctionSubclass():
            data = torch.Tensor.detach(self.params[index])
        if data.dtype != slot.dtype or tuple(data.shape) != slot.shape or data.device != self.device:
            raise UsageError(
                f"{self.names[index]!r} became {data.dtype} {tuple(data.shape)} on {data.device}; it is managed as {slot.dtype} "
                f"{slot.shape} on {self.device}. Convert or resize the model before swapio.initialize, or close the engine and initialize "
                "again"
            )
        return data

    def read(self, index: int) -> torch.Tensor:
        """A copy of a parameter's current value, in memory of its own."""
        with self.zero.lock, quiet():
            self.open()
            try:
                if self.lease is None:
                    raise RuntimeError(f"{self.name!r} went away while it was read")
                return self.layout_view(self.lease.raw, index).clone()
            finally:
                self.shut()

    # --- gradients ---

    def take_grad(self, index: int) -> None:
        """Move what autograd accumulated in `.grad` into the unit's gradient buffer."""
        with uninterrupted():
            grad = raw_grad(self.params[index])
            set_raw_grad(self.params[index], None)
            if self.zero.plain_grads:
                raise UsageError(
                    f"the gradient of {self.names[index]!r} is not summed over the ranks, as the engine has no optimizer: "
                    "give swapio.initialize one, or name it in the config"
                )
            if grad is None or not self.layout.slots[index].trained:
                return
            if grad.requires_grad:
                raise UsageError(
                    f"backward(create_graph=True) would lose the graph of {self.names[index]!r}'s gradient, which is moved into a buffer; "
                    "use torch.autograd.grad(loss, parameters, create_graph=True)"
                )
            with self.zero.lock, quiet():
                self.add_grad(index, grad, ours=True)
                self.came[index] = True
                if all(came or not slot.trained for came, slot in zip(self.came, self.layout.slots, strict=True)):
                    self.zero.grads_complete(self)

    def add_grad(self, index: int, grad: torch.Tensor, *, ours: bool = False) -> None:
        """
        Args:
            ours: nobody else will change `grad`.
        """
        if grad.layout is not torch.strided:
            raise UsageError(f"{self.names[index]!r} has a {grad.layout} gradient; use dense gradients (for an embedding: sparse=False)")
        if self.zero.stepper is not None:
            self.zero.stepper.check_can_add(self, index)
        if ours and not self.has_grad[index] and self._buffer().keep(self.layout.slots[index], grad):
            self.norms[index] = None
        else:
            self.zero.store_grad(self._grad_view(index, write=True), grad, add=self.has_grad[index])
        self.has_grad[index] = True

    def _buffer(self) -> GradBuffer:
        """Where the gradients gather."""
        if self.grads is None:
            self.apply_due()
            self.grads = self.zero.grad_buffer(self)
        return self.grads

    def _grad_view(self, index: int, *, write: bool) -> torch.Tensor:
        grads, slot = self._buffer(), self.layout.slots[index]
        if write:
            self.norms[index] = None
        kept = grads.kept(slot)
        if kept is not None:
            return kept
        if write:
            grads.written()
        return self.layout.grad_view(grads.tensor, slot)

    def keep_grads_on_nvme(self) -> None:
        """Reserve a place where gradients rest between times."""
        self.spill = self.zero.create(f"gradients of {self.name}", self.layout.grad_nbytes, Place.NVME)
        self.spill.overwritten = True
        self.keeps_grads = False

    def shut_grads(self) -> None:
        """Nobody adds to the gradients now; those that have a place on the drive may go there."""
        self.came = [False] * len(self.params)
        if self.grads is not None and self.spill is not None:
            self.zero.grads_landed()
            if self.grads.here and self.zero.last_micro_batch and not self.grads.held():
                measure(self)  # while they are here, and nobody can change them unseen
            self.grads.shut()

    def zero_missing_grads(self) -> None:
        """Make the gradient buffer zeros where no gradient came."""
        if self.grads is not None:
            for slot in self.layout.slots:
                if slot.trained and not self.has_grad[slot.index]:
                    self.grads.tensor[self.layout.grad_bytes(slot)].zero_()
                    self.grads.written()

    def get_grad(self, index: int) -> torch.Tensor | None:
        """`.grad` as the user sees it: a view of the gradient buffer (a copy of it where that lies on another device)."""
        with self.zero.lock, quiet():
            if not self.has_grad[index]:
                if self.contributed[index]:
                    raise UsageError(
                        f"the gradient of {self.names[index]!r} was summed in slices over the ranks (ZeRO stage {self.zero.stage}); "
                        "all ranks together get it by swapio.utils.safe_get_full_grad(parameter)"
                    )
                return raw_grad(self.params[index])
            self.zero.grads_landed()
            return self._grad_view(index, write=True).to(self.device, self.layout.slots[index].dtype)

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        with self.zero.lock, quiet():
            if self.contributed[index]:
                raise UsageError(
                    f"the gradient of {self.names[index]!r} was summed in slices over the ranks (ZeRO stage {self.zero.stage}); "
                    "all ranks together set it by swapio.utils.safe_set_full_grad(parameter, value), or drop all by engine.zero_grad()"
                )
            if self.zero.plain_grads:
                set_raw_grad(self.params[index], value)
                return
            if value is None:
                self.has_grad[index], self.norms[index] = False, None
                if not any(self.has_grad):
                    self.drop_grads()
                return
            slot = self.layout.slots[index]
            if tuple(value.shape) != slot.shape or value.dtype != slot.dtype:
                raise UsageError(
                    f"{self.names[index]!r} is {slot.dtype} {slot.shape}; its gradient cannot be {value.dtype} {tuple(value.shape)}"
                )
            if not slot.trained:
                raise UsageError(f"{self.names[index]!r} is not trained; pass it to the optimizer before swapio.initialize")
            self.has_grad[index] = False
            self.add_grad(index, value)

    def take_grads(self) -> tuple[GradBuffer | None, list[bool]]:
        """The gradients, and which parameters have one; the unit has none afterwards, and whoever has them drops them."""
        taken = self.grads, self.has_grad
        self.grads = None
        self.has_grad, self.came = [False] * len(self.params), [False] * len(self.params)
        self.norms = [None] * len(self.params)
        return taken

    def drop_grads(self) -> None:
        grads, _ = self.take_grads()
        if grads is not None:
            self.zero.drop_grads(self, grads)
        for param in self.params:  # the user's own, or what an interrupt left there between autograd and `take_grad`
            set_raw_grad(param, None)

    # --- the end ---

    def restore(self, value: Callable[[Unit, int, torch.Tensor], torch.Tensor] | None) -> None:
        """Make the parameters ordinary again, in memory of their own: copies, or what `value` makes of the weight of an index."""
        self.open()
        try:
            with quiet():
                for index, param in enumerate(self.params):
                    if self.lease is None:
                        raise RuntimeError(f"{self.name!r} went away while it was given back")
                    weight = self.layout_view(self.lease.raw, index)
                    _SET_DATA(param, weight.clone() if value is None else value(self, index, weight))
                    param.__class__ = nn.Parameter
                    forget(param)
        finally:
            self.pins = 0

    def abandon(self) -> None:
        """Let go without looking; parameters that are still managed stay away for ever."""
        if self.lease is None:
            return
        with quiet():
            for slot, param in zip(self.layout.slots, self.params, strict=True):
                if type(param) is not nn.Parameter:
                    param.__class__ = AwayParameter
                    _SET_DATA(param, placeholder(slot.dtype, self.device, slot.shape))
        self.zero.saved.units.pop(self._address, None)
        lease, self.lease = self.lease, None
        lease.release()

    def manage(self) -> None:
        """Take over parameters whose values are in the record."""
        for index, (slot, param) in enumerate(zip(self.layout.slots, self.params, strict=True)):
            manage(param, self, index)
            _SET_DATA(param, placeholder(slot.dtype, self.device, slot.shape))
            param.__class__ = AwayParameter


def slot_view(raw: torch.Tensor, slot: Slot) -> torch.Tensor:
    """A parameter in the bytes of its unit."""
    flat = raw[slot.offset : slot.offset + slot.span * slot.dtype.itemsize].view(slot.dtype)
    return flat.as_strided(slot.shape, slot.stride)
