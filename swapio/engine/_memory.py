"""Bytes of one rank, by what they are and where they lie."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from ..swap import Place, Record
from ..zero import ChunkedStep, UnitSet

__all__ = ["memory"]

TIERS = tuple(place.name.lower() for place in Place)


def memory(zero: UnitSet, stepper: ChunkedStep | None, module: nn.Module) -> dict[str, dict[str, int]]:
    """By kind, then by tier; a record with copies in several tiers counts in each. Called under the engine's lock."""
    gathered, gradients, buffers = dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0)
    near = zero.manager.place(Place.DEVICE).name.lower()
    for unit in zero.units:
        if zero.partitions_weights and unit.attached:
            gathered[near] += unit.layout.nbytes
    for unit, grads in zero.grad_buffers():
        place = zero.step_place if grads.here else Place.NVME
        gradients[place.name.lower()] += unit.layout.grad_nbytes
    if zero.sums is not None:
        gradients["host"] += zero.sums.nbytes
    for buffer in module.buffers():
        buffers[near if buffer.device == zero.manager.device.torch_device else "host"] += buffer.numel() * buffer.element_size()
    return {
        "weights": _of_records(unit.record for unit in zero.units),
        "gathered": gathered,
        "gradients": gradients,
        "optimizer": _of_records(stepper.records() if stepper is not None else ()),
        "buffers": buffers,
    }


def _of_records(records: Iterable[Record]) -> dict[str, int]:
    held = dict.fromkeys(TIERS, 0)
    for record in records:
        held["nvme"] += record.own_nbytes if record.extent is not None else 0
        held["host"] += record.nbytes if record.host is not None else 0
        held["device"] += record.nbytes if record.device is not None else 0
    return held
