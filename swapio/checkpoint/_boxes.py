"""Stretches of a tensor's memory as boxes of its shape. Pure functions.

[Note: Boxes] Ranks own stretches of flat memory; `torch.distributed.checkpoint` knows boxes. A stretch of a dense tensor is at most
`2 * dims - 1` boxes: the rest of a row, whole rows, and the begin of one, in each dimension. So tensors are stored under their own shape,
and any tool reads them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

__all__ = ["Box", "boxes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor that lies in one stretch of memory.

    Attributes:
        offsets, sizes: in the tensor.
        start: its first element in memory order.
        order: dimensions from the slowest to the fastest in memory.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    order: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def view(self, flat: torch.Tensor, start: int) -> torch.Tensor:
        """The box in `flat`, which holds the memory from element `start` on."""
        stretch = flat[self.start - start : self.start - start + self.numel]
        slow_first = stretch.view([self.sizes[d] for d in self.order])
        return slow_first.permute([self.order.index(d) for d in range(len(self.order))])


def boxes(shape: Sequence[int], stride: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Elements `start` to `stop`, in memory order, of a dense tensor."""
    order = tuple(sorted(range(len(shape)), key=lambda d: (shape[d] != 1, -stride[d])))
    dims = [shape[d] for d in order]
    while start < stop:
        axis, inner = _widest(dims, start, stop)
        index, offsets = start, [0] * len(dims)
        for d in reversed(range(len(dims))):
            index, offsets[d] = divmod(index, dims[d])
        sizes = [1] * len(dims)
        if dims:
            count = min(dims[axis] - offsets[axis], (stop - start) // inner)
            sizes[axis:] = [count, *dims[axis + 1 :]]
        yield Box(_restored(offsets, order), _restored(sizes, order), start, order)
        start += math.prod(sizes)


def _widest(dims: Sequence[int], start: int, stop: int) -> tuple[int, int]:
    """The slowest dimension along which a box can begin at `start`, and the elements of one step along it."""
    axis, inner = len(dims) - 1, 1
    while axis > 0 and start % (inner * dims[axis]) == 0 and stop - start >= inner * dims[axis]:
        inner *= dims[axis]
        axis -= 1
    return axis, inner


def _restored(values: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    return tuple(values[order.index(d)] for d in range(len(order)))
