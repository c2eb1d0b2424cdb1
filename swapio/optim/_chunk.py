"""The optimizer step of one chunk of a unit: merge, update, split or round, in sub-blocks that stay in cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ._kernels import CUT_NUMEL, step_range
from ._layout import ChunkViews
from ._spec import Group, OptimizerSpec
from ._split import BLOCK_NUMEL, merge_, round_, split_

__all__ = ["ChunkStepper", "StepRange"]


class StepRange(NamedTuple):
    """Elements `start` to `stop` of a chunk, the live group they belong to, and the number of this update of them (from 1)."""

    start: int
    stop: int
    group: Group
    step: int


class ChunkStepper:
    """Steps chunks one after the other and owns the scratch for it (8 bytes per element of a sub-block, on their device).

    Optimizers without a fused kernel make temporaries of a sub-block besides.

    Not thread-safe: it belongs to the thread that computes.
    """

    def __init__(self, spec: OptimizerSpec, *, block_numel: int = BLOCK_NUMEL) -> None:
        if block_numel < CUT_NUMEL or block_numel % CUT_NUMEL:
            raise ValueError(f"block_numel must be a positive multiple of {CUT_NUMEL}, got {block_numel}")
        self.spec = spec
        self._block_numel = block_numel
        self._scratch = torch.empty(0)

    @torch.no_grad()
    def step(
        self,
        weights: Tensor,
        grads: Tensor,
        views: ChunkViews,
        ranges: Sequence[StepRange],
        *,
        grad_scale: float | None = None,
        grad_factor: float | None = None,
    ) -> None:
        """Update the elements in `ranges` of a chunk in place; all others keep every bit, in weights and state.

        How a unit is cut into chunks and a chunk into sub-blocks does not change a bit. fp32 weights with fp32
        gradients are stepped where they are, without copies.

        Args:
            weights: flat slice of the unit, bfloat16, float16 or fp32 `[numel]`. A float16 weight becomes `master.to(torch.float16)`:
                infinite from 65520 on, while its master goes on. A bfloat16 one is the same bits whether its master is split or not.
            grads: `[numel]`, in the dtype of the weights or fp32; never written.
            views: the state of the chunk; its `master`, if any, is stepped where it is.
            ranges: ascending and disjoint, cut at multiples of 64 elements (the last may end with the chunk).
            grad_scale: the fp32 gradient is divided by it (loss scaling).
            grad_factor: the fp32 gradient is multiplied by it (clipping), before the division.

        Raises:
            ValueError: tensors that do not fit each other, or ranges that break the rules above.
            UsageError: see `step_range`.
        """
        numel = weights.numel()
        if weights.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"weights must be bfloat16, float16 or float32, got {weights.dtype}")
        if grads.dtype not in (weights.dtype, torch.float32):
            raise ValueError(f"gradients of {weights.dtype} weights must be of that dtype or float32, got {grads.dtype}")
        heads = [tensor for tensor in (views.lo, views.master) if tensor is not None]
        state = [*views.fields.values(), *heads]
        fits = len(heads) == (weights.dtype != torch.float32) and (views.lo is None or weights.dtype == torch.bfloat16)
        if not fits or any(tensor.shape != (numel,) for tensor in (weights, grads, *state)):
            raise ValueError(
                f"the state does not belong to the weights: {numel} weights of {weights.dtype}, {grads.numel()} gradients, state of "
                f"{[tensor.numel() for tensor in state]} elements, {'with' if views.lo is not None else 'without'} lower halves, "
                f"{'with' if views.master is not None else 'without'} masters"
            )
        copy_grads = grads.dtype != torch.float32 or grad_scale is not None or grad_factor is not None  # the kernels write unscaled ones
        in_place = weights.dtype == torch.float32 and not copy_grads and self.spec.fused  # in one pass, with no temporaries
        blocks = list(_blocks(ranges, numel, max(numel, CUT_NUMEL) if in_place else self._block_numel))  # all checked before any is stepped
        spare: Tensor | None = None
        for pieces in blocks:
            block = slice(pieces[0].start, pieces[-1].stop)
            weight, grad = weights[block], grads[block]
            master = weight if views.master is None else views.master[block]
            if copy_grads or weights.dtype is torch.bfloat16:
                master_scratch, grad_scratch = self._buffers(grad)
                spare = grad_scratch.view(torch.int32)  # lent to merge, split and round while no gradient is in it
            if views.lo is not None:
                lo, master = views.lo[block], master_scratch
                merge_(weight, lo, master, scratch=spare)
            if copy_grads:
                grad = grad_scratch.copy_(grad)
                if grad_factor is not None:
                    grad.mul_(grad_factor)
            for start, stop, group, step in pieces:
                part = slice(start - block.start, stop - block.start)
                fields = {name: field[start:stop] for name, field in views.fields.items()}
                step_range(self.spec, group, master=master[part], grad=grad[part], fields=fields, step=step, grad_scale=grad_scale)
            if views.lo is not None:
                split_(master, weight, lo, scratch=spare)
            elif views.master is not None:
                round_(master, weight, scratch=spare)

    def _buffers(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Scratch for the master and for the gradient, of the length and on the device of `like`."""
        if self._scratch.device != like.device or self._scratch.numel() == 0:
            self._scratch = torch.empty((2, self._block_numel), dtype=torch.float32, device=like.device)
        return self._scratch[0, : like.numel()], self._scratch[1, : like.numel()]


def _blocks(ranges: Sequence[StepRange], numel: int, block_numel: int) -> Iterator[list[StepRange]]:
    """Cut `ranges` into pieces and gather them into runs without gaps of at most `block_numel` elements.

    Neighbours with one group and step become one piece. Empty ranges vanish.
    """
    block: list[StepRange] = []
    end = 0
    for start, stop, group, step in ranges:
        if not end <= start <= stop <= numel or start % CUT_NUMEL or (stop % CUT_NUMEL and stop != numel):
            raise ValueError(
                f"range [{start}, {stop}) of a chunk of {numel} elements must start at {end} or later, end at {numel} or "
                f"before, and be cut at multiples of {CUT_NUMEL}"
            )
        if block and start != end:
            yield block
            block = []
        end = stop
        while start < stop:
            first = block[0].start if block else start
            cut = min(stop, first + block_numel)
            if block and block[-1].group is group and block[-1].step == step:
                block[-1] = block[-1]._replace(stop=cut)
            else:
                block.append(StepRange(start, cut, group, step))
            start = cut
            if cut - first == block_numel:
                yield block
                block = []
    if block:
        yield block
