"""A run while it runs: a bar and two lines of figures on a terminal, else a line now and then."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ..spec import format_nbytes
from ._run import StepEntry
from ._tables import percent

__all__ = ["LiveRun"]

_LINES = 20  # about so many where there is no terminal


class LiveRun:
    """Shows the steps of a run. Draws only in `update`, so it takes no time from the compute threads."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=num_steps)
        self._live = Live(Group(self._bar), console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, entry: StepEntry) -> None:
        """A step is done."""
        learning, moving = _lines(entry)
        if self._live is not None:
            self._bar.update(self._task, completed=entry.step)
            self._live.update(Group(self._bar, Text(learning), Text(moving)), refresh=True)
        elif entry.step == 1 or entry.step == self._num_steps or entry.step % max(self._num_steps // _LINES, 1) == 0:
            self._console.print(f"step {entry.step}/{self._num_steps}  {learning}  {moving}", soft_wrap=True)


def _lines(entry: StepEntry) -> tuple[str, str]:
    """Both fit a terminal of 80 columns."""
    seconds, budget = max(entry.seconds, 1e-9), entry.host_memory_budget
    read, written = (f"{nbytes / seconds / 1e9:.2f}" for nbytes in (entry.bytes_read, entry.bytes_written))
    memory = format_nbytes(entry.host_memory_used) + (f" of {format_nbytes(budget)}" if budget is not None else "")
    return (
        f"loss {entry.loss:.4f}  {entry.tokens / seconds:.0f} tokens/s  stalled {percent(entry.stall_seconds, seconds)}",
        (f"drive {read} GB/s read, {written} written  " if entry.bytes_on_nvme else "") + f"RAM {memory}",
    )
