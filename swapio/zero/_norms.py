"""The norms of gradients, and whether they are finite: of one unit while its gradients are in memory, or of all before a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..optim import first_nonfinite
from ._grads import flat_grad
from ._layout import Slot
from ._quiet import quiet

if TYPE_CHECKING:
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["GradNorm", "Gradients", "look_at", "measure"]

_NORM_NUMEL = 1 << 22  # elements of a 16-bit gradient of which an fp32 copy is made at once
_PIECE_NUMEL = 1 << 18  # of a larger one: what stays in the cache


class GradNorm(NamedTuple):
    """What is known of one parameter's gradient."""

    norm: torch.Tensor  # fp32 [], on the host
    bad: bool  # an element is not finite


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """What all ranks know of the gradients of a step, before it is made.

    Attributes:
        norm: over all parameters, as they are: of the sum over ranks, times the loss scale; None: the step sums it.
        bad: the first parameter with a gradient that is not finite, of those that forbid a step.
    """

    norm: torch.Tensor | None  # fp32 []
    bad: str | None


def measure(unit: Unit) -> None:
    """Look at those gradients of a unit that nobody has looked at."""
    for slot in unit.layout.slots:
        if unit.has_grad[slot.index] and unit.norms[slot.index] is None:
            parts = list(_flat_grads(unit, slot))
            norm = _norm(parts)
            bad = not bool(norm.isfinite()) and any(first_nonfinite(p) is not None for p in parts)
            unit.norms[slot.index] = GradNorm(norm, bad)


def look_at(zero: UnitSet, *, any_dtype: bool, lazily: bool) -> Gradients:
    """Sum the gradients over ranks, and look at them. All ranks call it together.

    The norm is that of the norms of the parameters, as in `torch.nn.utils.clip_grad_norm_`.

    Args:
        any_dtype: a gradient that is not finite is bad for fp32 weights too.
        lazily: leave the norm out if nothing is bad: that takes four times as long as to see whether all are finite.
    """
    with quiet():
        zero.grads_landed()
        if lazily and all(_is_finite(unit) for unit in zero.units):
            for unit in zero.units:
                unit.shut_grads()
            return Gradients(None, None)
        if zero.sums is not None:
            zero.send_grads()
            zero.sums.finish()
        known: list[GradNorm | None] = []
        for unit in zero.units:
            measure(unit)
            known += [unit.norms[slot.index] for slot in unit.layout.slots]
            unit.shut_grads()
        norms = [k.norm for k in known if k is not None]  # the same on all ranks; a zero more would be summed in another order
        if not zero.ranks.alone:
            squares = torch.tensor([float(n) ** 2 for n in norms], dtype=torch.float64)
            gathered = zero.ranks.all_gather(squares, what="the norm of the gradients")
            norms = [n.float() for n in torch.stack(gathered).sum(0).sqrt()]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), dtype=torch.float32)
        return Gradients(norm, None if bool(norm.isfinite()) else _first_bad(zero, known, any_dtype))


def _is_finite(unit: Unit) -> bool:
    """Whether the gradients of 16-bit weights are. False too where the sum of one is infinite."""
    slots = (slot for slot in unit.layout.slots if slot.dtype is not torch.float32)
    return all(math.isfinite(part.sum().item()) for slot in slots for part in _flat_grads(unit, slot))


def _first_bad(zero: UnitSet, known: Sequence[GradNorm | None], any_dtype: bool) -> str | None:
    """The same on all ranks."""
    slots = [(unit, slot) for unit in zero.units for slot in unit.layout.slots]
    counted = (k is not None and k.bad and (any_dtype or s.dtype is not torch.float32) for k, (_, s) in zip(known, slots, strict=True))
    bad = next((number for number, is_bad in enumerate(counted) if is_bad), len(slots))
    told = zero.ranks.all_gather(torch.tensor([bad]), what="which gradient is not finite")
    bad = min(int(t) for t in told)
    return slots[bad][0].names[slots[bad][1].index] if bad < len(slots) else None


def _flat_grads(unit: Unit, slot: Slot) -> Iterator[torch.Tensor]:
    """The gradient of a parameter, or this rank's slices of its sum."""
    zero = unit.zero
    if not slot.trained or not unit.has_grad[slot.index] or not slot.span:
        return
    if zero.sums is None:
        if unit.grads is not None:
            yield flat_grad(unit.grads, unit.layout, slot)
        return
    total = zero.sums.total(unit)
    for piece in unit.partition.pieces[zero.ranks.rank]:
        if piece.trained and (found := piece.overlap(slot)) is not None:
            first, last = found
            yield total[piece.sum_start + first - piece.start : piece.sum_start + last - piece.start]


def _norm(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all parts together, fp32; of one part exactly as PyTorch computes it of an fp32 copy, unless that is large."""
    if len(parts) == 1 and (parts[0].dtype is torch.float32 or parts[0].numel() <= _NORM_NUMEL):
        norm: torch.Tensor = torch.linalg.vector_norm(parts[0].float())
        return norm.cpu()
    squares = 0.0
    for part in parts:
        scratch = torch.empty(min(part.numel(), _PIECE_NUMEL), dtype=torch.float32, device=part.device)
        for piece in part.split(_PIECE_NUMEL):
            values = piece if piece.dtype is torch.float32 else scratch[: piece.numel()].copy_(piece)
            squares += float(torch.dot(values, values))  # some times as fast as the norm of an fp32 copy
    return torch.tensor(squares**0.5, dtype=torch.float32)
