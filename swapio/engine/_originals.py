"""Weights as they were before `initialize` converted them, for the case that it fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..zero import ChunkedStep, Unit

__all__ = ["Originals"]


class Originals:
    """Keeps what the conversion of weights takes from them.

    [Note: 17 bits] Rounding to bfloat16 moves the upper half of an fp32 number by one at most, so the lower half and the last bit of the
    upper one give it back. They take less memory than taking the weights over has freed. Weights with a split master need nothing.
    """

    def __init__(self, stepper: ChunkedStep | None) -> None:
        self._stepper = stepper
        self._kept: dict[tuple[Unit, int], Callable[[torch.Tensor], torch.Tensor]] = {}

    def keep(self, unit: Unit) -> None:
        """Before the unit is taken over."""
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            data = param.detach()
            if data.dtype is slot.dtype:
                continue
            make: Callable[[torch.Tensor], torch.Tensor] = functools.partial(_itself, data)
            if data.dtype is torch.float32 and slot.dtype.itemsize == 2:
                if self._stepper is not None and slot.trained and unit.zero.ranks.alone:
                    make = functools.partial(self._stepper.master, unit, slot.index)
                elif slot.dtype is torch.bfloat16:
                    halves = data.cpu().reshape(-1).view(torch.int16).numpy().reshape(-1, 2)  # lower, upper
                    make = functools.partial(_joined, halves[:, 0].copy(), np.packbits(halves[:, 1].astype(np.uint8) & 1))
            self._kept[unit, slot.index] = make

    def value(self, unit: Unit, index: int, weight: torch.Tensor) -> torch.Tensor:
        """The parameter's first value, in memory of its own; `weight` is its present one."""
        make = self._kept.get((unit, index))
        return weight.clone() if make is None else make(weight)


def _itself(data: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return data


def _joined(lower: np.ndarray[Any, Any], last_bits: np.ndarray[Any, Any], weight: torch.Tensor) -> torch.Tensor:
    halves = np.empty((lower.size, 2), np.int16)
    rounded = weight.cpu().reshape(-1).view(torch.int16).numpy()
    halves[:, 0] = lower
    halves[:, 1] = rounded - ((rounded ^ np.unpackbits(last_bits, count=lower.size)) & 1)
    value = torch.from_numpy(halves.reshape(-1)).view(torch.float32).view(weight.shape)
    return torch.empty_like(weight, dtype=torch.float32).copy_(value)
