"""Whether a model fits, before anything is allocated: the smallest `host_memory` that works, why, and what a larger one keeps there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ..errors import BudgetError
from ..optim import ChunkLayout, OptimizerSpec
from ..spec import format_nbytes
from ..swap import Place
from ..zero import Kept, Movable, Partition, StepTiming, UnitLayout, chunk_layouts, resident_set

__all__ = ["HostNeed", "HostPlan", "Setting", "plan_host"]

_AHEAD_NBYTES = 128 << 20
_MANY = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """What the need depends on beside the model.

    Attributes:
        spills: gradients may rest on NVMe between times.
    """

    block_nbytes: Callable[[int], int]
    chunk_numel: int
    param_home: Place
    state_home: Place
    step_place: Place
    has_device: bool
    timing: StepTiming
    spills: bool
    num_micro_batches: int = 1
    stage: int = 0
    rank: int = 0
    num_ranks: int = 1

    def on_host(self, home: Place) -> bool:
        """Whether what rests at `home` is in host memory always."""
        return home is Place.HOST or (home is Place.DEVICE and not self.has_device)


@dataclasses.dataclass(frozen=True, slots=True)
class HostNeed:
    """Bytes of host memory by purpose, as blocks of the arena."""

    resident: int  # weights and state that rest in host memory
    gradients: int
    staging: int  # optimizer state in transit
    largest_unit: int
    everything: int  # with which nothing ever has to go

    @property
    def minimum(self) -> int:
        return self.resident + self.gradients + self.staging + self.largest_unit

    def check(self, budget: int | None, largest: str) -> None:
        """
        Raises:
            BudgetError: `budget` is below the minimum; the message says what each part needs and what works.
        """
        if budget is not None and budget < self.minimum:
            raise BudgetError(
                f"swapio.host_memory: {budget} bytes ({format_nbytes(budget)}) are too few for this model: "
                f"gradients {format_nbytes(self.gradients)}, the largest unit {largest!r} {format_nbytes(self.largest_unit)}, "
                f"optimizer state in transit {format_nbytes(self.staging)}"
                + (f", tensors at home in host memory {format_nbytes(self.resident)}" if self.resident else "")
                + f'; use at least {self.minimum} ("{-(-self.minimum // 2**20)}MiB")',
                name=largest, needed_nbytes=self.minimum, budget_nbytes=budget, works_nbytes=self.minimum,
            )  # fmt: skip


class HostPlan:
    """What a model needs of host memory, and what a budget keeps there.

    Attributes:
        need: the bytes.
        chunk_numel: elements whose state moves in one piece.
    """

    def __init__(self, layouts: Sequence[UnitLayout], spec: OptimizerSpec | None, setting: Setting) -> None:
        self._layouts = layouts
        self._setting = s = setting
        self.chunk_numel = s.chunk_numel
        parts = [Partition(layout, s.num_ranks) for layout in layouts]
        self._sharded = s.num_ranks > 1 and s.stage == 3
        stored = [part.shard_nbytes[s.rank] if self._sharded else layout.nbytes for layout, part in zip(layouts, parts, strict=True)]
        self._weights = [s.block_nbytes(nbytes) for nbytes in stored]
        stepped = [part.pieces[s.rank] if s.stage else Partition(layout, 1).pieces[0] for layout, part in zip(layouts, parts, strict=True)]
        self._chunks = [
            list(chunk_layouts(layout, pieces, spec, s.chunk_numel)) if spec is not None else []
            for layout, pieces in zip(layouts, stepped, strict=True)
        ]
        self._grads = [s.block_nbytes(layout.grad_nbytes) if layout.grad_nbytes else 0 for layout in layouts]
        self.need = self._need(parts)

    def _need(self, parts: Sequence[Partition]) -> HostNeed:
        s = self._setting
        several = s.num_ranks > 1
        whole = [s.block_nbytes(layout.nbytes) for layout in self._layouts]
        passes = s.spills or (s.timing is StepTiming.IN_BACKWARD and s.num_micro_batches == 1)  # one unit's at a time
        if s.step_place is not Place.HOST and s.has_device:
            gradients = 0
        elif several and s.stage >= 2:
            gradients = 2 * max(self._grads, default=0)  # sent as soon as a unit has them all
        else:
            gradients = 0 if passes else sum(self._grads)
        sums = sum(s.block_nbytes(4 * part.sum_numel[s.rank]) for part in parts if part.sum_numel[s.rank]) if several else 0
        weights_stay, state_stays = s.on_host(s.param_home), s.on_host(s.state_home)
        moving = [chunk if s.state_home is Place.NVME else chunk.whole for unit in self._chunks for _, _, chunk in unit]
        chunks = [s.block_nbytes(chunk.nbytes) for chunk in moving]
        at_once = [
            (0 if weights_stay else w) + (g if passes and s.step_place is Place.HOST else 0)
            for w, g in zip(whole, self._grads, strict=True)
        ]
        largest = max(at_once, default=0)
        if self._sharded:  # one whole unit, and the slice it is made from and one that another rank asks for
            largest = max(whole, default=0) + 2 * max(self._weights, default=0)
        kept = gradients or (sum(self._grads) if s.step_place is Place.HOST else 0)
        return HostNeed(
            resident=(sum(self._weights) if weights_stay else 0) + (sum(chunks) if state_stays else 0),
            gradients=gradients + sums,
            staging=0 if state_stays else 2 * max(chunks, default=0),
            largest_unit=largest,
            everything=sum(self._weights)
            + sum(self._resident_cost(c) for unit in self._chunks for _, _, c in unit)
            + kept
            + sums
            + (largest if self._sharded else 0),
        )

    @property
    def largest(self) -> int:
        """Index of the unit that needs most."""
        return max(range(len(self._layouts)), key=lambda i: self._weights[i] + self._grads[i], default=0)

    def _resident_cost(self, chunk: ChunkLayout) -> int:
        """Of state that stays, which has whole masters."""
        return self._setting.block_nbytes(chunk.whole.nbytes)

    def resident(self, budget: int | None) -> set[Kept]:
        """What of that which rests on NVMe stays in host memory."""
        s = self._setting
        rereads = (2 if s.timing is not StepTiming.AT_STEP else 3) * s.num_micro_batches
        movables = []
        for number, layout in enumerate(self._layouts):
            trained = any(segment.num_trained for segment in layout.segments)
            if s.param_home is Place.NVME:
                movables.append(Movable(Kept("weights", number), self._weights[number], layout.nbytes * (rereads + trained)))
            if s.spills and layout.grad_nbytes:
                movables.append(Movable(Kept("gradients", number), self._grads[number], layout.grad_nbytes * 2 * s.num_micro_batches))
            if s.state_home is Place.NVME:
                for index, (_, _, chunk) in enumerate(self._chunks[number]):
                    movables.append(Movable(Kept("state", number, index), self._resident_cost(chunk), 2 * chunk.nbytes))
        if budget is None or budget >= self.need.everything:
            return {movable.key for movable in movables}
        return resident_set(movables, budget - self.need.minimum - _AHEAD_NBYTES)


def plan_host(
    layouts: Sequence[UnitLayout], spec: OptimizerSpec | None, setting: Setting, budget: int | None, chunk_numels: Sequence[int]
) -> HostPlan:
    """A plan with the largest chunks, of `chunk_numels` from large to small, of which the budget has room for many.

    Each piece that moves costs some work of the thread that decides, whatever its size.
    """
    for chunk_numel in chunk_numels:
        plan = HostPlan(layouts, spec, dataclasses.replace(setting, chunk_numel=chunk_numel))
        if budget is None or budget - plan.need.minimum >= _MANY * plan.need.staging:
            break
    return plan
