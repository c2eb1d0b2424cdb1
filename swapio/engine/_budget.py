"""Whether a model fits, before anything is allocated: the smallest `host_memory` that works, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from ..errors import BudgetError
from ..optim import OptimizerSpec
from ..spec import format_nbytes
from ..swap import Place
from ..zero import Partition, UnitLayout, chunk_layouts

__all__ = ["HostNeed", "host_need"]


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


def host_need(
    layouts: Sequence[UnitLayout], spec: OptimizerSpec | None, *, block_nbytes: Callable[[int], int], chunk_numel: int,
    param_home: Place, state_home: Place, step_place: Place, has_device: bool, stage: int = 0, rank: int = 0, num_ranks: int = 1,
) -> HostNeed:  # fmt: skip
    """What training needs of host memory when gradients are kept until `step()`."""
    parts = [Partition(layout, num_ranks) for layout in layouts]
    several = num_ranks > 1
    whole = [block_nbytes(layout.nbytes) for layout in layouts]
    sharded = several and stage == 3
    weights = [block_nbytes(part.shard_nbytes[rank]) for part in parts] if sharded else whole
    stepped = [part.pieces[rank] if stage else Partition(layout, 1).pieces[0] for layout, part in zip(layouts, parts, strict=True)]
    chunks = [
        block_nbytes(chunk.nbytes)
        for layout, pieces in zip(layouts, stepped, strict=True) if spec is not None
        for _, _, chunk in chunk_layouts(layout, pieces, spec, chunk_numel)
    ]  # fmt: skip
    of_units = [block_nbytes(layout.grad_nbytes) for layout in layouts if layout.grad_nbytes]
    gradients = 2 * max(of_units, default=0) if several and stage >= 2 else sum(of_units)  # sent as soon as a unit has them all
    if step_place is not Place.HOST and has_device:
        gradients = 0
    sums = sum(block_nbytes(4 * part.sum_numel[rank]) for part in parts if part.sum_numel[rank]) if several else 0
    on_host = _on_host(has_device)
    resident = (sum(weights) if on_host(param_home) else 0) + (sum(chunks) if on_host(state_home) else 0)
    # one whole unit, and of a partitioned one the slice it is made from and one that another rank asks for
    largest = max(whole, default=0) + 2 * max(weights, default=0) if sharded else 0 if on_host(param_home) else max(whole, default=0)
    return HostNeed(
        resident=resident,
        gradients=gradients + sums,
        staging=0 if on_host(state_home) else 2 * max(chunks, default=0),
        largest_unit=largest,
        everything=sum(weights) + sum(chunks) + gradients + sums + (largest if sharded else 0),
    )


def _on_host(has_device: bool) -> Callable[[Place], bool]:
    homes: Iterable[Place] = (Place.HOST,) if has_device else (Place.HOST, Place.DEVICE)
    return lambda home: home in homes
