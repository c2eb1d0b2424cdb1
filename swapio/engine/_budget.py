"""Whether a model fits, before anything is allocated: the smallest `host_memory` that works, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from ..errors import BudgetError
from ..optim import OptimizerSpec
from ..spec import format_nbytes
from ..swap import Place
from ..zero import UnitLayout, chunk_layouts

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
    param_home: Place, state_home: Place, step_place: Place, has_device: bool,
) -> HostNeed:  # fmt: skip
    """What training needs of host memory when gradients are kept until `step()`."""
    weights = [block_nbytes(layout.nbytes) for layout in layouts]
    chunks = [
        block_nbytes(chunk.nbytes) for layout in layouts if spec is not None for _, _, chunk in chunk_layouts(layout, spec, chunk_numel)
    ]
    gradients = sum(block_nbytes(layout.grad_nbytes) for layout in layouts if layout.grad_nbytes)
    on_host = _on_host(has_device)
    resident = (sum(weights) if on_host(param_home) else 0) + (sum(chunks) if on_host(state_home) else 0)
    return HostNeed(
        resident=resident,
        gradients=gradients if step_place is Place.HOST or not has_device else 0,
        staging=0 if on_host(state_home) else 2 * max(chunks, default=0),
        largest_unit=0 if on_host(param_home) else max(weights, default=0),
        everything=sum(weights) + sum(chunks) + gradients,
    )


def _on_host(has_device: bool) -> Callable[[Place], bool]:
    homes: Iterable[Place] = (Place.HOST,) if has_device else (Place.HOST, Place.DEVICE)
    return lambda home: home in homes
