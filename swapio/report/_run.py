"""What is kept of a training run: one entry per step, as it goes to the JSONL log."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["PHASES", "StepEntry", "Totals"]

PHASES = ("forward", "backward", "optimizer")


@dataclasses.dataclass(frozen=True, slots=True)
class StepEntry:
    """One step. Bytes and seconds are those of the step alone; memory is the most that was seen at the ends of its phases."""

    step: int  # from 1
    loss: float  # exact: the float32 of the loss
    seconds: float
    bytes_read: int
    bytes_written: int
    tokens: int
    learning_rate: float
    stall_seconds: float
    phase_seconds: Mapping[str, float]  # by PHASES
    phase_stall_seconds: Mapping[str, float]
    bytes_on_nvme: int
    bytes_on_host: int
    bytes_on_device: int
    gradient_bytes: int
    host_memory_used: int
    host_memory_budget: int | None
    rss: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


class Totals:
    """Sums over a run."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.seconds = self.stall_seconds = 0.0
        self.bytes_read = self.bytes_written = self.tokens = 0
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.phase_stall_seconds = dict.fromkeys(PHASES, 0.0)
        self.gradient_bytes = 0  # the most

    def add(self, entry: StepEntry) -> None:
        """Count one step."""
        self.num_steps += 1
        self.seconds += entry.seconds
        self.stall_seconds += entry.stall_seconds
        self.bytes_read += entry.bytes_read
        self.bytes_written += entry.bytes_written
        self.tokens += entry.tokens
        self.gradient_bytes = max(self.gradient_bytes, entry.gradient_bytes)
        for phase in PHASES:
            self.phase_seconds[phase] += entry.phase_seconds[phase]
            self.phase_stall_seconds[phase] += entry.phase_stall_seconds[phase]
