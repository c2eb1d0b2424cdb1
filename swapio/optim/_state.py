"""How a field of the optimizer's state is stored: fp32, bfloat16, or 8 bits with a scale for each 256 elements. Computing is in fp32.

[Note: Stochastic rounding]
With beta2 = 0.999 a second moment changes by less than a thousandth in most steps, and bfloat16 keeps 8 bits: rounded to nearest it would
stay where it is. So a step rounds up or down at random, with the probabilities that make the mean exact (Gupta et al., "Deep Learning with
Limited Numerical Precision", ICML 2015). The random number of an element depends on its place in the unit's segment, on the field, and on
how often the element was updated, so that slices, chunks, places and a restart change no bit: it is entry
`(place + hash(field, update)) % 16384` of a table that holds 16384 numbers spread evenly between 0 and 1, shuffled.

[Note: 8 bits]
Blocks of 256 elements have an fp32 scale, as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (ICLR 2022); codes are
linear. A signed field has the values `code * scale`, codes from -127 to 127. A mean of squares keeps its root, `(code + 0.5) * scale`,
codes from 0 to 255: so what is divided by is never 0 only because a neighbour is large. Zero bytes mean 0. The largest of a block gets the
largest code, and scales keep 21 of their 24 bits, so storing what was loaded gives the same codes and scale: checkpoints hold fp32 values.
Scales up to 2**-45 (2**-49 of roots) become 0; that is far below the epsilon that roots are added to.

Blocks start at multiples of 256 elements of the unit's segment, and so must parameters, slices of ranks and chunks.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from ._grad import without_grad

__all__ = ["SCALE_NUMEL", "SQUARES", "Dither", "StateDtype", "field_nbytes", "load_", "store_"]

StateDtype = Literal["fp32", "bf16", "int8"]

SCALE_NUMEL = 256
"""Elements that share a scale."""

SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
"""Fields that are means or sums of squares."""

_PERIOD = 1 << 14  # 64 KiB of a table at a time: it stays in the cache
# As in _split.py, numbers are tensors: making one of a Python number costs more than using it.
_HALF = torch.tensor(0.5, dtype=torch.float32, device="cpu")
_SHIFT, _ULPS, _MASK = (torch.tensor(number, dtype=torch.int32, device="cpu") for number in (16, 4, -8))
_SIGNED_LEVELS, _ROOT_LEVELS = (torch.tensor(number, dtype=torch.float32, device="cpu") for number in (127.0, 255.5))
_LEVELS = {False: _SIGNED_LEVELS, True: _ROOT_LEVELS}  # the largest value is so many scales
_LEAST_SCALE = {False: 2.0**-45, True: 2.0**-49}


def field_nbytes(dtype: StateDtype, numel: int) -> int:
    """Bytes of a field of `numel` elements, without padding after it."""
    blocks = -(-numel // SCALE_NUMEL)
    return {"fp32": 4 * numel, "bf16": 2 * numel, "int8": blocks * (SCALE_NUMEL + 4)}[dtype]


@functools.lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The shuffled numbers twice, one after the other, for bfloat16, for signed codes and for codes of roots; see `Dither`."""
    order = torch.arange(_PERIOD)
    for factor, shift in ((0x2545, 5), (0x1D35, 7), (0x3A2D, 6)):  # each line is one to one
        order = (order * factor + 0x0B57) % _PERIOD
        order ^= order >> shift
    order = order.repeat(2)
    even = ((order + 0.5) / _PERIOD).clamp_(2.0**-12, 1 - 2.0**-12)  # the largest of a block stays the largest code
    tables = order * 4 + 2, even + 256, even - 0.5
    return tables[0].int().to(device), tables[1].float().to(device), tables[2].float().to(device)


class Dither:
    """What is added before truncation, to round stochastically; `None` in its place rounds to nearest.

    Args:
        place: of the first element, in the unit's segment.
        field: number of the field.
        step: number of this update of the elements.
    """

    def __init__(self, place: int, field: int, step: int) -> None:
        mixed = (step * 0x9E3779B97F4A7C15 + field * 0xD1B54A32D192ED03) & (1 << 64) - 1
        mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & (1 << 64) - 1
        self._start = (place + (mixed >> 32)) % _PERIOD

    def add_(self, values: Tensor, table: Tensor) -> None:
        """Add the numbers of these elements, `[numel]`."""
        whole = values.numel() // _PERIOD * _PERIOD
        numbers = table[self._start : self._start + _PERIOD]
        if whole:
            values[:whole].view(-1, _PERIOD).add_(numbers)
        if whole < values.numel():
            values[whole:].add_(numbers[: values.numel() - whole])


@without_grad
def load_(stored: Tensor, scales: Tensor | None, values: Tensor, *, square: bool, to_step: bool = False) -> None:
    """Fill `values` (fp32 `[numel]`) with a stored field.

    Args:
        stored: fp32 or bfloat16 `[numel]`, or uint8 codes.
        scales: of codes, fp32 `[numel / 256]`; `numel` is a multiple of 256 then.
        square: it is a mean of squares.
        to_step: zero squares become 2**-100, whose root is computed 8 times as fast; `store_` makes them zeros again.
    """
    if scales is None:
        values.copy_(stored)
        return
    if square and to_step:
        scales = scales.clamp_min(_LEAST_SCALE[square])
    rows = values.view(-1, SCALE_NUMEL)
    if square:
        values.copy_(stored)
        values.add_(_HALF)
        rows.mul_(scales[:, None])
        values.mul_(values)
    else:
        values.copy_(stored.view(torch.int8))
        rows.mul_(scales[:, None])


@without_grad
def store_(values: Tensor, stored: Tensor, scales: Tensor | None, *, square: bool, dither: Dither | None, scratch: Tensor) -> None:
    """The reverse of `load_`; `values` is overwritten.

    Args:
        dither: how to round stochastically; None: to nearest.
        scratch: fp32 `[numel]`.
    """
    if stored.dtype is torch.float32 or (stored.dtype is torch.bfloat16 and dither is None):
        stored.copy_(values)
        return
    bf16_table, signed_table, root_table = _tables(values.device)
    if stored.dtype is torch.bfloat16 and dither is not None:
        bits = values.view(torch.int32)
        dither.add_(bits, bf16_table)
        stored.view(torch.int16).copy_(bits.bitwise_right_shift_(_SHIFT))
        return
    if scales is None:
        raise ValueError("codes without scales")
    rows = values.view(-1, SCALE_NUMEL)
    if square:
        torch.amax(rows.sqrt_(), 1, out=scales)
    else:
        torch.maximum(rows.amax(1), rows.amin(1).neg_(), out=scales)
    scales.div_(_LEVELS[square])
    scales.view(torch.int32).add_(_ULPS).bitwise_and_(_MASK)  # to a multiple of 8, the nearest
    inverse = scales.clamp_min(_LEAST_SCALE[square]).reciprocal_()
    torch.threshold_(scales, _LEAST_SCALE[square], 0.0)
    rows.mul_(inverse[:, None])
    if dither is not None:
        dither.add_(values, root_table if square else signed_table)
    elif not square:
        values.add_(256.5)
    codes = scratch.view(torch.int32)
    codes.copy_(values)  # truncated; float to uint8 is slow
    stored.copy_(codes)  # the lowest byte
