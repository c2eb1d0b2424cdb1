"""What each step of a run took and moved."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any, Protocol

import psutil

from ..report import PHASES, StepEntry

__all__ = ["StepMeter", "peak_rss"]

_LEVELS = ("bytes_on_nvme", "bytes_on_host", "bytes_on_device", "gradient_bytes", "host_memory_used")


class HasStats(Protocol):
    """An engine."""

    def stats(self) -> dict[str, Any]:
        """Counters since the start, and bytes by tier."""


class StepMeter:
    """Takes the engine's counters at the end of each phase of a step: `start()`, `end(phase)` for each, `entry(...)`."""

    def __init__(self, engine: HasStats) -> None:
        self._engine = engine
        self._process = psutil.Process()
        self._phase_seconds: dict[str, float] = {}
        self._phase_stalls: dict[str, float] = {}
        self._levels: dict[str, int] = {}
        self._first = self._last = engine.stats()
        self._time = time.perf_counter()

    def start(self) -> None:
        """A step begins."""
        self._phase_seconds, self._phase_stalls = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        self._levels = dict.fromkeys((*_LEVELS, "rss"), 0)
        self._first = self._last
        self._time = time.perf_counter()

    def end(self, phase: str) -> None:
        """A phase is done; what comes after it counts for the next."""
        now, stats = time.perf_counter(), self._engine.stats()
        self._phase_seconds[phase] = now - self._time
        self._phase_stalls[phase] = stats["stall_seconds"] - self._last["stall_seconds"]
        for key in _LEVELS:
            self._levels[key] = max(self._levels[key], stats[key])
        self._levels["rss"] = max(self._levels["rss"], self._process.memory_info().rss)
        self._time, self._last = now, stats

    def entry(self, *, step: int, loss: float, tokens: int, learning_rate: float) -> StepEntry:
        """The step that just ended. What the drive moved since the step before it, in the background too, is this one's."""
        last, first = self._last, self._first
        return StepEntry(
            step=step,
            loss=loss,
            seconds=sum(self._phase_seconds.values()),
            bytes_read=last["bytes_read"] - first["bytes_read"],
            bytes_written=last["bytes_written"] - first["bytes_written"],
            tokens=tokens,
            learning_rate=learning_rate,
            stall_seconds=last["stall_seconds"] - first["stall_seconds"],
            phase_seconds=dict(self._phase_seconds),
            phase_stall_seconds=dict(self._phase_stalls),
            host_memory_budget=last["host_memory_budget"],
            **self._levels,
        )


def peak_rss() -> int:
    """The most bytes that this process had resident. Unlike `ru_maxrss`, Linux's `VmHWM` does not count the process that started it."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
