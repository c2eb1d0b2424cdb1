"""Gradients of several ranks: each rank sums its own slices, in fp32, in an order that does not depend on who was first."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..errors import RankError
from ..memory import Lease
from ._partition import Piece

if TYPE_CHECKING:
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["GradientSums"]

_BLOCK_NUMEL = 1 << 18
_STEP = 1 << 20  # more gradients of one unit than a step has


@dataclasses.dataclass(slots=True)
class _Sum:
    """Of one unit: what has come, and what was added."""

    unit: Unit
    pieces: list[Piece]  # this rank's, the trained ones
    lease: Lease | None
    total: torch.Tensor  # fp32 [sum_numel]
    pending: dict[tuple[int, int, int], list[torch.Tensor]] = dataclasses.field(default_factory=dict)  # (step, number, rank)
    number: int = 0  # what is added next
    rank: int = 0
    num_put: int = 0  # by this rank
    final: list[int] | None = None  # how many each rank has put, once all are in
    empty: bool = True  # nothing was added yet

    @property
    def done(self) -> bool:
        return self.final is not None and self.number >= max(self.final)


class GradientSums:
    """The sums of all units of one engine.

    [Note: Order] Contributions are added by number (a rank's first, second, ... of a unit since the last step), and within one number by
    rank. One that comes out of turn waits in memory beside the budget; ranks that do the same work hardly ever need that. A rank that is
    through with a step may send the next one's while others still use the sums of this one.

    Methods are called under the engine's lock, but `received` and `failed`, which the serving thread calls.
    """

    def __init__(self, zero: UnitSet) -> None:
        self._zero = zero
        self._ranks = zero.ranks
        self._sums: list[_Sum] = []
        self._turn = threading.Condition()
        self._error: RankError | None = None
        self._step = 0

    def add_unit(self, unit: Unit) -> None:
        """Reserve this rank's sums of a unit."""
        numel = unit.partition.sum_numel[self._ranks.rank]
        lease = self._zero.manager.lease(f"gradient sums of {unit.name}", 4 * numel, self._zero) if numel else None
        total = lease.tensor[: 4 * numel].view(torch.float32) if lease is not None else torch.empty(0)
        pieces = [p for p in unit.partition.pieces[self._ranks.rank] if p.trained]
        self._sums.append(_Sum(unit, pieces, lease, total))

    @property
    def nbytes(self) -> int:
        """Host memory that all sums take."""
        return sum(s.lease.nbytes for s in self._sums if s.lease is not None)

    def total(self, unit: Unit) -> torch.Tensor:
        """fp32 `[sum_numel]`: the sum over ranks and micro-batches; valid between `finish` and `reset`."""
        return self._sums[unit.number].total

    def put(self, unit: Unit, *, keep: bool = False) -> None:
        """Send what gathered in a unit's gradient buffer to the owners, and drop it."""
        mine = self._sums[unit.number]
        if unit.grads is None:
            return
        self._zero.grads_landed()
        unit.zero_missing_grads()
        raw = unit.grads.tensor
        host = raw if raw.device.type == "cpu" else raw.cpu()
        by_rank = {r: [_bytes(host, unit, p) for p in pieces if p.trained] for r, pieces in enumerate(unit.partition.pieces)}
        own = by_rank.pop(self._ranks.rank)
        number, mine.num_put = mine.num_put, mine.num_put + 1
        pieces = {rank: parts for rank, parts in by_rank.items() if parts}
        what = f"sending the gradient of {unit.name!r}"
        self._ranks.put(unit.number, number=self._step * _STEP + number, pieces=pieces, what=what)
        if own:
            self._take(mine, self._ranks.rank, self._step, number, own, borrowed=True)
        unit.contributed = [a or b for a, b in zip(unit.contributed, unit.has_grad, strict=True)]
        if not keep:
            unit.drop_grads()

    def slots(self, unit: int) -> list[torch.Tensor]:
        mine = self._sums[unit]
        return [torch.empty((p.stop - p.start) * _wire(mine.unit, p).itemsize, dtype=torch.uint8) for p in mine.pieces]

    def received(self, source: int, unit: int, number: int, pieces: list[torch.Tensor]) -> None:
        self._take(self._sums[unit], source, *divmod(number, _STEP), pieces, borrowed=False)

    def failed(self, error: RankError) -> None:
        with self._turn:
            self._error = error
            self._turn.notify_all()

    def _take(self, mine: _Sum, rank: int, step: int, number: int, pieces: list[torch.Tensor], *, borrowed: bool) -> None:
        with self._turn:
            in_turn = (self._step, mine.number, mine.rank) == (step, number, rank)
            mine.pending[step, number, rank] = [p.clone() for p in pieces] if borrowed and not in_turn else pieces
            self._advance(mine)
            self._turn.notify_all()

    def _advance(self, mine: _Sum) -> None:
        while not mine.done:
            pieces = mine.pending.pop((self._step, mine.number, mine.rank), None)
            if pieces is not None:
                _add_all(mine, mine.total, pieces, first=mine.empty)
                mine.empty = False
            elif mine.final is None or mine.final[mine.rank] > mine.number:
                return
            mine.rank += 1
            if mine.rank == self._ranks.size:
                mine.number, mine.rank = mine.number + 1, 0

    def finish(self) -> None:
        """Meet the other ranks, and return when all gradients of this step are summed.

        Afterwards `has_grad` of each unit says which parameters had a gradient on any rank.

        Raises:
            RankError: a rank died, or sends nothing within the time limit.
        """
        units = self._zero.units
        counts = [s.num_put for s in self._sums]
        used = [flag for u in units for flag in u.contributed]
        told = torch.tensor(counts + [int(flag) for flag in used], dtype=torch.int64)
        by_rank = [t.tolist() for t in self._ranks.all_gather(told, what="waiting for all ranks at step()")]
        with self._turn:
            for i, mine in enumerate(self._sums):
                mine.final = [t[i] for t in by_rank]
                self._advance(mine)
            self._wait(lambda: next(((s.unit, s.rank) for s in self._sums if s.pieces and not s.done), None))
        flags = iter(np.any([t[len(counts) :] for t in by_rank], axis=0).tolist())
        for unit in units:
            unit.has_grad = [next(flags) for _ in unit.params]

    def _wait(self, missing: Callable[[], tuple[Unit, int] | None]) -> None:
        """Until nothing is missing of what ranks send. Call it in turn."""
        deadline = time.monotonic() + self._ranks.timeout_s
        while (late := missing()) is not None:
            if self._error is not None:
                raise self._error
            if not self._turn.wait(max(deadline - time.monotonic(), 0.0)) and time.monotonic() >= deadline:
                raise RankError(f"the gradient of {late[0].name!r} from rank {late[1]} has not come")

    def so_far(self, unit: Unit) -> torch.Tensor:
        """A copy of this rank's sums of a unit, fp32 `[sum_numel]`, with all that any rank has put until now.

        All ranks call it together, between backward passes; the sums go on as if it had not been called.

        Raises:
            RankError: a rank died, or sends nothing within the time limit.
        """
        mine = self._sums[unit.number]
        told = self._ranks.all_gather(torch.tensor([mine.num_put]), what=f"reading the gradient of {unit.name!r}")
        counts = [int(t) for t in told]

        def to_add() -> list[tuple[int, int, int]]:
            left = itertools.product(range(mine.number, max(counts)), range(self._ranks.size))
            return [(self._step, n, rank) for n, rank in left if n < counts[rank] and (n, rank) >= (mine.number, mine.rank)]

        with self._turn:
            if mine.pieces:
                self._wait(lambda: next(((unit, key[2]) for key in to_add() if key not in mine.pending), None))
            total = torch.zeros_like(mine.total) if mine.empty else mine.total.clone()
            for key in to_add() if mine.pieces else ():
                _add_all(mine, total, mine.pending[key], first=False)
            return total

    def replace(self, unit: Unit, piece: Piece, start: int, values: torch.Tensor) -> None:
        """Put fp32 `values` in place of this rank's sums from element `start` of the piece's segment. After `so_far`."""
        mine = self._sums[unit.number]
        begin = start - piece.start
        with self._turn:
            if mine.empty:
                mine.total.zero_()
                mine.empty = False
            mine.total[piece.sum_start + begin : piece.sum_start + begin + len(values)].copy_(values)
            itemsize = _wire(unit, piece).itemsize
            for (step, _, _), pieces in mine.pending.items():
                if step == self._step:
                    pieces[mine.pieces.index(piece)][begin * itemsize : (begin + len(values)) * itemsize].zero_()

    def reset(self) -> None:
        """The sums are not needed any more. After `finish`, on all ranks."""
        with self._turn:
            self._step += 1
            for mine in self._sums:
                mine.number = mine.rank = mine.num_put = 0
                mine.final, mine.empty = None, True
                mine.unit.contributed = [False] * len(mine.unit.params)
                self._advance(mine)

    def close(self) -> None:
        for mine in self._sums:
            if mine.lease is not None:
                self._zero.manager.end_lease(mine.lease)
        self._sums.clear()


def _wire(unit: Unit, piece: Piece) -> torch.dtype:
    return unit.layout.segments[piece.segment].grad_dtype


def _bytes(raw: torch.Tensor, unit: Unit, piece: Piece) -> torch.Tensor:
    segment = unit.layout.segments[piece.segment]
    itemsize = segment.grad_dtype.itemsize
    return raw[segment.grad_offset + piece.start * itemsize : segment.grad_offset + piece.stop * itemsize]


def _add_all(mine: _Sum, total: torch.Tensor, pieces: list[torch.Tensor], *, first: bool) -> None:
    for piece, raw in zip(mine.pieces, pieces, strict=True):
        target = total[piece.sum_start : piece.sum_start + piece.stop - piece.start]
        _add(target.numpy(), raw.numpy(), _wire(mine.unit, piece), first=first)


def _add(total: np.ndarray, raw: np.ndarray, dtype: torch.dtype, *, first: bool) -> None:
    """`total += raw` in fp32. By numpy, block by block: it lets other threads run and brings no second team of OpenMP threads."""
    for start in range(0, len(total), _BLOCK_NUMEL):
        target = total[start : start + _BLOCK_NUMEL]
        part = raw[start * dtype.itemsize : (start + len(target)) * dtype.itemsize]
        if dtype is torch.bfloat16:
            values = (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = part.view(np.float16 if dtype is torch.float16 else np.float32)
        if first:
            target[:] = values
        else:
            np.add(target, values, out=target)
