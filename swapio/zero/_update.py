"""What a step does to one unit, and when."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from ..optim import Group
from ._grads import GradBuffer

__all__ = ["StepTiming", "Update"]


class StepTiming(enum.Enum):
    """When the weights of a unit are stepped."""

    AT_STEP = "all units in `step()`"
    IN_FORWARD = "`step()` fixes what happens; it happens when the unit is needed next, with its state fetched while backward runs"
    IN_BACKWARD = "as soon as the unit's last gradient arrives: gradients never pile up, and a step cannot be taken back"


@dataclasses.dataclass(slots=True, eq=False)
class Update:
    """What one step does to a unit.

    Attributes:
        groups: hyper-parameters, as they were in `step`.
        scale, factor: as in `ChunkStepper.step`.
        numbers: of this update of each parameter, from 1; 0: it had no gradient.
        grads: the unit's; None where the sums over ranks are used.
        num_done: chunks that were stepped.
    """

    groups: Sequence[Group]
    scale: float | None
    factor: float | None
    numbers: list[int]
    grads: GradBuffer | None
    num_done: int = 0

    @property
    def indices(self) -> list[int]:
        """The parameters that are changed."""
        return [i for i, number in enumerate(self.numbers) if number]
