"""The optimizer step of one chunk of a unit: merge, update, split or round, in sub-blocks that stay in cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import round_up
from ._kernels import step_range
from ._layout import ChunkViews
from ._spec import Group, OptimizerSpec
from ._split import BLOCK_NUMEL, merge_, round_, split_
from ._state import SCALE_NUMEL, SQUARES, Dither, load_, store_

__all__ = ["ChunkStepper", "StepRange"]


class StepRange(NamedTuple):
    """Elements `start` to `stop` of a chunk, the live group they belong to, and the number of this update of them (from 1)."""

    start: int
    stop: int
    group: Group
    step: int


class ChunkStepper:
    """Steps chunks one after the other and owns the scratch for it (8 bytes per element of a sub-block, on their device, and 4 for each
    field that is not stored as fp32).

    Optimizers without a fused kernel make temporaries of a sub-block besides.

    Not thread-safe: it belongs to the thread that computes.

    Args:
        block_numel: elements of a sub-block; default: `BLOCK_NUMEL` for each of up to four threads of PyTorch.

    Attributes:
        squares: the sum of the squares of all gradients as they come is added to it, from the cache; None: it is not.
    """

    def __init__(self, spec: OptimizerSpec, *, block_numel: int | None = None) -> None:
        if block_numel is None:
            block_numel = BLOCK_NUMEL * min(torch.get_num_threads(), 4)
        if block_numel < spec.cut_numel or block_numel % spec.cut_numel:
            raise ValueError(f"block_numel must be a positive multiple of {spec.cut_numel}, got {block_numel}")
        self.spec = spec
        self._block_numel = block_numel
        self._scratch: list[Tensor] = []
        self.squares: float | None = None

    @torch.no_grad()
    def step(
        self,
        weights: Tensor,
        grads: Tensor | Sequence[tuple[int, Tensor]],
        views: ChunkViews,
        ranges: Sequence[StepRange],
        *,
        grad_scale: float | None = None,
        grad_factor: float | None = None,
        place: int = 0,
    ) -> None:
        """Update the elements in `ranges` of a chunk in place; all others keep every bit, in weights and state.

        How a unit is cut into chunks and a chunk into sub-blocks does not change a bit. fp32 weights with fp32
        gradients are stepped where they are, without copies.

        Args:
            weights: flat slice of the unit, bfloat16, float16 or fp32 `[numel]`. A float16 weight becomes `master.to(torch.float16)`:
                infinite from 65520 on, while its master goes on. A bfloat16 one is the same bits whether its master is split or not.
            grads: `[numel]`, in the dtype of the weights or fp32; never written. Or parts of it, ascending, each with its first element;
                zeros are between them.
            views: the state of the chunk; its `master`, if any, is stepped where it is.
            ranges: ascending and disjoint, cut at multiples of `spec.cut_numel` elements (the last may end with the chunk).
            grad_scale: the fp32 gradient is divided by it (loss scaling).
            grad_factor: the fp32 gradient is multiplied by it (clipping), before the division.
            place: of the first element in the unit's segment; random numbers depend on it.

        Raises:
            ValueError: tensors that do not fit each other, or ranges that break the rules above.
            UsageError: see `step_range`.
        """
        numel = weights.numel()
        if weights.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"weights must be bfloat16, float16 or float32, got {weights.dtype}")
        parts = [(0, grads)] if isinstance(grads, Tensor) else grads
        for _, values in parts:
            if values.dtype not in (weights.dtype, torch.float32):
                raise ValueError(f"gradients of {weights.dtype} weights must be of that dtype or float32, got {values.dtype}")
        heads = [tensor for tensor in (views.lo, views.master) if tensor is not None]
        lengths = [tensor.numel() for tensor in heads] + [field.numel() for field in views.fields.values()]
        fits = len(heads) == (weights.dtype != torch.float32) and (views.lo is None or weights.dtype == torch.bfloat16)
        expected = [numel] * len(heads) + [round_up(numel, SCALE_NUMEL) if name in views.scales else numel for name in views.fields]
        num_grads = sum(values.numel() for _, values in parts)
        complete = grads.shape == weights.shape if isinstance(grads, Tensor) else _ascending(parts, numel)
        if not fits or lengths != expected or not complete or weights.dim() != 1:
            raise ValueError(
                f"the state does not belong to the weights: {numel} weights of {weights.dtype}, {num_grads} gradients, state of "
                f"{lengths} elements, {'with' if views.lo is not None else 'without'} lower halves, "
                f"{'with' if views.master is not None else 'without'} masters"
            )
        plain = isinstance(grads, Tensor) and grads.dtype is torch.float32
        copy_grads = not plain or grad_scale is not None or grad_factor is not None  # the kernels write unscaled ones
        at_once = weights.dtype == torch.float32 and not copy_grads and self.spec.fused and self.spec.state_dtype == "fp32"
        cut = self.spec.cut_numel
        blocks = list(_blocks(ranges, numel, max(numel, cut) if at_once else self._block_numel, cut))  # all checked before any is stepped
        for pieces in blocks:
            block = slice(pieces[0].start, pieces[-1].stop)
            weight, length = weights[block], block.stop - block.start
            master = weight if views.master is None else views.master[block]
            spare: Tensor | None = None
            if not at_once:
                master_scratch, grad_scratch, *field_scratch = self._buffers(weight)
                spare = grad_scratch[:length].view(torch.int32)  # lent to merge, split and round while no gradient is in it
            if views.lo is not None:
                lo, master = views.lo[block], master_scratch[:length]
                merge_(weight, lo, master, scratch=spare)
            grad = _gathered(parts, block, grad_scratch[:length]) if copy_grads else parts[0][1][block]
            if self.squares is not None:
                self.squares += float(torch.dot(grad, grad))
            if grad_factor is not None:
                grad.mul_(grad_factor)
            if self.spec.state_dtype == "fp32":
                state = {name: field[block] for name, field in views.fields.items()}
            else:
                state = dict(zip(views.fields, field_scratch, strict=True))
                self._load(views, block.start, state)
            for start, stop, group, step in pieces:
                fields, its_master, its_grad = state, master, grad
                if len(pieces) > 1:
                    part = slice(start - block.start, stop - block.start)
                    fields, its_master, its_grad = {name: field[part] for name, field in state.items()}, master[part], grad[part]
                step_range(self.spec, group, master=its_master, grad=its_grad, fields=fields, step=step, grad_scale=grad_scale)
            if self.spec.state_dtype != "fp32":
                self._store(views, pieces, place, state, grad_scratch)
            if views.lo is not None:
                split_(master, weight, lo, scratch=spare)
            elif views.master is not None:
                round_(master, weight, scratch=spare)

    def _load(self, views: ChunkViews, start: int, state: Mapping[str, Tensor]) -> None:
        """Fill `state`, fp32, from the state from element `start` on."""
        for name, values in state.items():
            stored, scales = views.part(name, start, values.numel())
            load_(stored, scales, values, square=name in SQUARES, to_step=True)

    def _store(self, views: ChunkViews, pieces: Sequence[StepRange], place: int, state: Mapping[str, Tensor], scratch: Tensor) -> None:
        """Round `state`, fp32, into that of `pieces`, which have no gaps between them; it is overwritten, and so is `scratch`."""
        begin = pieces[0].start
        for step, group in itertools.groupby(pieces, key=lambda piece: piece.step):
            first, *rest = group
            start, numel = first.start, (rest[-1] if rest else first).stop - first.start
            for number, (name, values) in enumerate(state.items()):
                stored, scales = views.part(name, start, numel)
                part = slice(start - begin, start - begin + stored.numel())
                dither = Dither(place + start, number, step)
                store_(values[part], stored, scales, square=name in SQUARES, dither=dither, scratch=scratch[: stored.numel()])

    def _buffers(self, like: Tensor) -> list[Tensor]:
        """Scratch for the master, for the gradient and for each field that is not fp32, as long as `like` or its blocks of codes."""
        if not self._scratch or self._scratch[0].device != like.device:
            rows = 2 + (len(self.spec.fields) if self.spec.state_dtype != "fp32" else 0)
            scratch = torch.empty((rows, self._block_numel), dtype=torch.float32, device=like.device)
            self._scratch = list(scratch.unbind())
        numel = round_up(like.numel(), SCALE_NUMEL) if self.spec.state_dtype == "int8" else like.numel()
        return self._scratch if numel == self._block_numel else [row[:numel] for row in self._scratch]


def _gathered(parts: Sequence[tuple[int, Tensor]], block: slice, target: Tensor) -> Tensor:
    """The elements of a block in `target`, with zeros where no part is."""
    end = block.start
    for begin, values in parts:
        first, last = max(begin, end), min(begin + values.numel(), block.stop)
        if first < last:
            if end < first:
                target[end - block.start : first - block.start].zero_()
            target[first - block.start : last - block.start].copy_(values[first - begin : last - begin])
            end = last
    if end < block.stop:
        target[end - block.start :].zero_()
    return target


def _ascending(parts: Sequence[tuple[int, Tensor]], numel: int) -> bool:
    """Whether no part begins before the end of the one before, or reaches beyond `numel`."""
    end = 0
    for begin, values in parts:
        if begin < end or values.dim() != 1:
            return False
        end = begin + values.numel()
    return end <= numel


def _blocks(ranges: Sequence[StepRange], numel: int, block_numel: int, cut_numel: int) -> Iterator[list[StepRange]]:
    """Cut `ranges` into pieces and gather them into runs without gaps of at most `block_numel` elements.

    Neighbours with one group and step become one piece. Empty ranges vanish.
    """
    block: list[StepRange] = []
    end = 0
    for start, stop, group, step in ranges:
        if not end <= start <= stop <= numel or start % cut_numel or (stop % cut_numel and stop != numel):
            raise ValueError(
                f"range [{start}, {stop}) of a chunk of {numel} elements must start at {end} or later, end at {numel} or "
                f"before, and be cut at multiples of {cut_numel}"
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
