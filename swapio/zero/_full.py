"""What the engine knows of one parameter, whole: its fp32 master, optimizer state and gradient, to read and to set.

DeepSpeed's names; `swapio.utils` shows them. Values have the parameter's shape and lie on the engine's device. A parameter that no
optimizer of an engine trains gives None, and cannot be set. With several ranks, all of them call each function together: the parts that the
others own come from there, and a value to set is the same on all ranks. The `local` functions are about the elements that this rank
owns, flat, in the order in which they lie in memory; there may be none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import UsageError
from ..optim import round_
from ._away import managed
from ._layout import Slot
from ._partition import Piece
from ._quiet import quiet
from ._step import ChunkedStep
from ._unit import Unit

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """A copy of the fp32 master that the optimizer steps."""
    known = _Known.of(param)
    return None if known is None else known.shaped(known.read_master())


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set the fp32 master, and the weight to what it rounds to.

    Raises:
        UsageError: another shape, or a parameter that is not trained.
    """
    known = _Known.to_set(param)
    known.write_master(known.flat(value))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """A copy of a tensor of the optimizer's state, fp32, by PyTorch's name (`"exp_avg"`); zeros before the first step.

    Raises:
        UsageError: the optimizer keeps no such tensor.
    """
    known = _Known.of(param)
    return None if known is None else known.shaped(known.read_state(known.field(optim_state_key)))


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a tensor of the optimizer's state.

    Raises:
        UsageError: the optimizer keeps no such tensor, another shape, or a parameter that is not trained.
    """
    known = _Known.to_set(param)
    known.write_state(known.field(optim_state_key), known.flat(value))


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """A copy, fp32, of the gradient as the coming step would see it before clipping: the mean over ranks, summed over the micro-batches
    so far. None after `step`, and where no rank has one. Between backward passes only.
    """
    known = _Known.of(param)
    if known is None:
        return None
    grad = known.read_grad()
    return None if grad is None else known.shaped(grad)


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Put `value` in place of what `safe_get_full_grad` gives; later backward passes add to it. Where gradients are summed in 16 bits it is
    rounded to them.

    Raises:
        UsageError: another shape, or a parameter that is not trained.
    """
    known = _Known.to_set(param)
    known.write_grad(known.flat(value))


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """What this rank owns of `safe_get_full_fp32_param`."""
    known = _Known.of(param)
    return None if known is None else known.cut(known.read_master())


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """`safe_set_full_fp32_param` with what each rank owns."""
    known = _Known.to_set(param)
    known.write_master(known.join(value))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """What this rank owns of `safe_get_full_optimizer_state`."""
    known = _Known.of(param)
    return None if known is None else known.cut(known.read_state(known.field(optim_state_key)))


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """`safe_set_full_optimizer_state` with what each rank owns."""
    known = _Known.to_set(param)
    known.write_state(known.field(optim_state_key), known.join(value))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """What this rank owns of `safe_get_full_grad`."""
    known = _Known.of(param)
    if known is None:
        return None
    grad = known.read_grad()
    return None if grad is None else known.cut(grad)


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """`safe_set_full_grad` with what each rank owns."""
    known = _Known.to_set(param)
    known.write_grad(known.join(value))


class _Known:
    """A trained parameter. Flat values are `[span]` in host memory."""

    def __init__(self, unit: Unit, index: int, stepper: ChunkedStep) -> None:
        self.unit = unit
        self.index = index
        self.slot: Slot = unit.layout.slots[index]
        self.stepper = stepper
        self.zero = unit.zero
        self.ranks = unit.zero.ranks

    @classmethod
    def of(cls, param: torch.Tensor) -> _Known | None:
        entry = managed(param)
        if entry is None or entry[0].zero.stepper is None or not entry[0].layout.slots[entry[1]].trained:
            return None
        entry[0].zero.check_open()
        return cls(*entry, entry[0].zero.stepper)

    @classmethod
    def to_set(cls, param: torch.Tensor) -> _Known:
        known = cls.of(param)
        if known is None:
            raise UsageError(f"a parameter of shape {tuple(param.shape)} is trained by no engine; give the parameter of an engine's module")
        return known

    def field(self, name: str) -> str:
        fields = self.stepper.spec.fields
        if name not in fields:
            raise UsageError(f"{name!r} is no state of {self.stepper.spec.kind}; it has {', '.join(map(repr, fields)) or 'none'}")
        return name

    # --- shapes and owners ---

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.slot.shape, self.slot.stride).to(self.unit.device)

    def flat(self, value: torch.Tensor) -> torch.Tensor:
        if tuple(value.shape) != self.slot.shape:
            raise UsageError(f"{self.unit.names[self.index]!r} has the shape {self.slot.shape}; it cannot be set to {tuple(value.shape)}")
        with quiet():
            flat = torch.empty(self.slot.span, dtype=torch.float32)
            flat.as_strided(self.slot.shape, self.slot.stride).copy_(value)
            return flat

    def owners(self) -> Iterator[tuple[int, Piece, slice]]:
        """Which rank owns which elements: (rank, piece of the unit, elements of the parameter)."""
        for rank, pieces in enumerate(self.unit.partition.pieces):
            for piece in pieces:
                if piece.trained and (found := piece.overlap(self.slot)) is not None:
                    first, last = found
                    yield rank, piece, slice(first - self.slot.start, last - self.slot.start)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        own = [flat[part] for rank, _, part in self.owners() if rank == self.ranks.rank]
        return torch.cat([flat[:0], *own]).to(self.unit.device)

    def join(self, value: torch.Tensor) -> torch.Tensor:
        """The whole, of what each rank owns."""
        own = [part for rank, _, part in self.owners() if rank == self.ranks.rank]
        numel = sum(part.stop - part.start for part in own)
        if value.numel() != numel:
            raise UsageError(f"this rank owns {numel} elements of {self.unit.names[self.index]!r}; they cannot be set to {value.numel()}")
        with quiet():
            flat = torch.empty(self.slot.span, dtype=torch.float32)
            for part, values in zip(own, value.reshape(-1).split([p.stop - p.start for p in own]) if own else (), strict=True):
                flat[part].copy_(values)
            self.share(flat)
            return flat

    def share(self, flat: torch.Tensor) -> None:
        """Fill in what the others own."""
        for rank, _, part in self.owners():
            self.ranks.broadcast(flat[part], source=rank, what=f"sharing parts of {self.unit.names[self.index]!r}")

    # --- state ---

    def read_state(self, field: str) -> torch.Tensor:
        with self.zero.lock, quiet():
            flat = torch.empty(self.slot.span, dtype=torch.float32)
            for part, values in self.stepper.state(self.unit, self.index, field):
                flat[part].copy_(values)
            if self.zero.stage:
                self.share(flat)
            return flat

    def write_state(self, field: str, flat: torch.Tensor) -> None:
        with self.zero.lock, quiet():
            self.zero.changing(self.unit)
            for part, values in self.stepper.state(self.unit, self.index, field, write=True):
                values.copy_(flat[part])

    def read_master(self) -> torch.Tensor:
        with self.zero.lock, quiet():
            self.unit.open()
            try:
                self.unit.find_writes()
                weight = self._raw().cpu().view(self.slot.dtype)
            finally:
                self.unit.shut()
            if self.slot.dtype is torch.float32 or self.index in self.unit.stale_masters:
                return weight.to(torch.float32, copy=True)
            master = self.stepper.master(self.unit, self.index, weight).as_strided((self.slot.span,), (1,))
            if self.zero.stage:
                self.share(master)
            return master

    def write_master(self, flat: torch.Tensor) -> None:
        weight = torch.empty(self.slot.span, dtype=self.slot.dtype)
        round_(flat, weight)
        with self.zero.lock, quiet(), self.zero.written_together():
            self.unit.open()
            try:
                self.unit.find_writes()
                self.zero.changing(self.unit)
                self._raw().copy_(weight.view(torch.uint8))
                self.unit.weights_written(self.index)
            finally:
                self.unit.shut()
            if self.slot.dtype is not torch.float32:
                for part, values in self.stepper.state(self.unit, self.index, None, write=True):
                    lower_halves = values.dtype is torch.int16
                    values.copy_(flat[part].view(torch.int32).to(torch.int16) if lower_halves else flat[part])
            self.unit.stale_masters.discard(self.index)

    def _raw(self) -> torch.Tensor:
        if self.unit.lease is None:
            raise RuntimeError(f"{self.unit.name!r} went away while it was used")
        return self.unit.lease.raw[self.slot.offset : self.slot.offset + self.slot.span * self.slot.dtype.itemsize]

    # --- gradients ---

    def read_grad(self) -> torch.Tensor | None:
        zero, unit = self.zero, self.unit
        with zero.lock, quiet():
            zero.grads_landed()
            mine = torch.tensor([unit.has_grad[self.index], unit.contributed[self.index]])
            told = [t.tolist() for t in self.ranks.all_gather(mine, what="reading a gradient")]
            if not any(map(any, told)):
                return None
            flat = torch.zeros(self.slot.span, dtype=torch.float32)
            if zero.sums is not None and any(contributed for _, contributed in told):
                total = zero.sums.so_far(unit)
                for rank, piece, part in self.owners():
                    if rank == self.ranks.rank:
                        begin = piece.sum_start + self.slot.start - piece.start
                        flat[part].copy_(total[begin + part.start : begin + part.stop])
                self.share(flat)
            for rank, (here, _) in enumerate(told):
                if here:  # in a buffer, not sent yet
                    one = self._gathered() if rank == self.ranks.rank else torch.empty(self.slot.span, dtype=torch.float32)
                    self.ranks.broadcast(one, source=rank, what=f"sharing the gradient of {unit.names[self.index]!r}")
                    flat += one
            return flat.div_(self.ranks.size * zero.loss_scale)

    def _gathered(self) -> torch.Tensor:
        """What backward passes of this rank left in the unit's buffer."""
        if self.unit.grads is None:
            raise RuntimeError(f"{self.unit.name!r} has no gradients")
        raw = self.unit.grads.tensor[self.unit.layout.grad_bytes(self.slot)]
        return raw.view(self.unit.layout.segments[self.slot.segment].grad_dtype).cpu().float()

    def write_grad(self, flat: torch.Tensor) -> None:
        zero, unit = self.zero, self.unit
        with zero.lock, quiet():
            zero.grads_landed()
            flat = flat * zero.loss_scale
            if not zero.partitions_grads or zero.sums is None:  # the same on each rank, which has it as its mean
                unit.has_grad[self.index] = False
                unit.add_grad(self.index, self.shaped(flat))
                return
            zero.sums.so_far(unit)  # what is under way would be added later
            for rank, piece, part in self.owners():
                if rank == self.ranks.rank:
                    zero.sums.replace(unit, piece, self.slot.start + part.start, flat[part] * self.ranks.size)
            unit.contributed[self.index] = True
            unit.has_grad[self.index] = False
            if not any(unit.has_grad):
                unit.drop_grads()
