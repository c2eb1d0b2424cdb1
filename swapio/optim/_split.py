"""The exact split of an fp32 master into its bfloat16 weight and 16 more bits.

[Note: Split master]
A bfloat16 weight is the upper half of an fp32 number. Keeping the lower half too, as `lo`, gives the exact fp32 master
at 4 bytes per parameter instead of 6. With `bits` the master as int32, all sums modulo 2**32:

    hi = (bits + 0x8000) >> 16        round half up in magnitude; the same as bfloat16(bits | 1)
    lo = bits - (hi << 16)            the low half of `bits` as a signed int16
    bits = (hi << 16) + lo

Rounding half to even would not do: 65,537 fp32 values share one even `hi`. So the weight differs from
`.to(torch.bfloat16)` in exact ties only. Everything here is integer arithmetic, not a float conversion: it holds for
all 2**32 patterns whatever the CPU does with subnormals or NaN payloads, and merge then split gives back any (hi, lo).
Non-finite masters survive the round trip too, but their *weight* need not be like them: a NaN with a payload of
0x7FFF8000 or above shows as -0.0, and a finite master from 0x7F7F8000 (3.396e38) on shows as inf, as with any rounding.

[Note: Whole master]
State that stays in RAM need not save bytes: the split costs about 1 ns per parameter, so there the master lies whole, beside the weight
`bfloat16(bits | 1)`: the same bits as `hi`, for all finite masters.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ._grad import without_grad

__all__ = ["BLOCK_NUMEL", "merge_", "round_", "round_bf16", "split_"]

BLOCK_NUMEL = 256 * 1024
"""Elements that a thread works on at a time: fp32 scratch of 1 MiB stays in cache, and the cost of a call is spread thin."""


# A Python number would become a tensor at each call, which costs more than adding it to a small block does.
_HALF = torch.tensor(0x8000, dtype=torch.int32, device="cpu")
_SHIFT = torch.tensor(16, dtype=torch.int32, device="cpu")
_ONE = torch.tensor(1, dtype=torch.int32, device="cpu")


@without_grad
def merge_(hi: Tensor, lo: Tensor, master: Tensor, *, scratch: Tensor | None = None) -> None:
    """Fill `master` (fp32 `[numel]`) with the exact master of `hi` (bfloat16 `[numel]`) and `lo` (int16 `[numel]`).

    Args:
        scratch: int32, at least one element, overlapping none of the others; sets the size of the sub-blocks. Allocated when `None`.
    """
    numel = master.numel()
    scratch = _scratch(master) if scratch is None else scratch
    if numel > scratch.numel():
        for part in _parts(numel, scratch.numel()):
            merge_(hi[part], lo[part], master[part], scratch=scratch)
        return
    low = scratch if scratch.numel() == numel else scratch[:numel]
    master.copy_(hi)  # bfloat16 to fp32 is a shift by 16
    low.copy_(lo)
    master.view(torch.int32).add_(low)


@without_grad
def split_(master: Tensor, hi: Tensor, lo: Tensor, *, scratch: Tensor | None = None) -> None:
    """Fill `hi` (bfloat16) and `lo` (int16) from `master` (fp32, unchanged), all `[numel]`. `scratch` as in `merge_`."""
    numel = master.numel()
    scratch = _scratch(master) if scratch is None else scratch
    if numel > scratch.numel():
        for part in _parts(numel, scratch.numel()):
            split_(master[part], hi[part], lo[part], scratch=scratch)
        return
    bits, rounded = master.view(torch.int32), scratch if scratch.numel() == numel else scratch[:numel]
    lo.copy_(bits)  # int32 to int16 keeps the low half
    torch.add(bits, _HALF, out=rounded)
    hi.view(torch.int16).copy_(rounded.bitwise_right_shift_(_SHIFT))


@without_grad
def round_(master: Tensor, weight: Tensor, *, scratch: Tensor | None = None) -> None:
    """Fill `weight` (bfloat16, float16 or fp32) with the rounded `master` (fp32, unchanged), both `[numel]`. `scratch` as in `merge_`."""
    if weight.dtype is not torch.bfloat16:
        weight.copy_(master)
        return
    numel = master.numel()
    scratch = _scratch(master) if scratch is None else scratch
    for part in _parts(numel, scratch.numel()):
        source, target = (master, weight) if numel <= scratch.numel() else (master[part], weight[part])
        odd = torch.bitwise_or(source.view(torch.int32), _ONE, out=scratch[: source.numel()])
        target.copy_(odd.view(torch.float32))


@torch.no_grad()
def round_bf16(tensor: Tensor) -> Tensor:
    """The bfloat16 weight of an fp32 master of any shape, as a new tensor."""
    return (tensor.contiguous().view(torch.int32) | 1).view(torch.float32).to(torch.bfloat16)


def _scratch(master: Tensor) -> Tensor:
    return torch.empty(max(1, min(master.numel(), BLOCK_NUMEL)), dtype=torch.int32, device=master.device)


def _parts(numel: int, part_numel: int) -> Iterator[slice]:
    return (slice(start, min(start + part_numel, numel)) for start in range(0, numel, part_numel))
