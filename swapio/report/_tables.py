"""The tables at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ..spec import format_nbytes
from ._run import PHASES, Totals

__all__ = ["memory_table", "percent", "table", "time_table"]


def percent(part: float, whole: float) -> str:
    """`"12%"`."""
    return f"{100 * part / whole:.0f}%" if whole > 0 else "-"


def memory_table(stats: Mapping[str, Any], totals: Totals, *, peak_rss: int) -> Table:
    """Where the bytes rested, from `engine.stats()` at the end of a run."""
    shown = table("Where the bytes rested", "", "bytes", "")
    budget, peak = stats["host_memory_budget"], stats["host_memory_peak"]
    if stats["bytes_on_nvme"]:
        shown.add_row("on the drive", format_nbytes(stats["bytes_on_nvme"]), f"weights and optimizer state, in {stats['path']}")
        shown.add_row("", "", f"read and written by the backend {stats['backend']}: {stats['backend_reason']}")
    shown.add_row(
        "in host memory at the end", format_nbytes(stats["bytes_on_host"]), "weights and state, as copies in use or kept for the next step"
    )
    shown.add_row("in host memory at most", format_nbytes(peak), _of_budget(peak, budget))
    shown.add_row("  gradients in that", format_nbytes(totals.gradient_bytes), "from backward to the end of the step")
    if stats["bytes_on_device"]:
        shown.add_row("on the accelerator at the end", format_nbytes(stats["bytes_on_device"]), "")
    shown.add_row("the whole process at most", format_nbytes(peak_rss), "that, and Python, PyTorch, the first weights and activations")
    return shown


def time_table(totals: Totals) -> Table:
    """What a step did, and what it waited for."""
    shown = table("What a step waited for", "", "seconds", "waiting", "")
    steps, seconds = max(totals.num_steps, 1), totals.seconds
    for phase in PHASES:
        part, stall = totals.phase_seconds[phase], totals.phase_stall_seconds[phase]
        shown.add_row(phase, f"{part / steps:.2f}", percent(stall, part), "")
    why = "waiting: for the drive, or for memory to become free"
    shown.add_row("a whole step", f"{seconds / steps:.2f}", percent(totals.stall_seconds, seconds), why, end_section=True)
    if totals.bytes_read or totals.bytes_written:
        for name, nbytes in (("read", totals.bytes_read), ("written", totals.bytes_written)):
            speed = f"{nbytes / max(seconds, 1e-9) / 1e9:.2f} GB/s on average"
            shown.add_row(f"{name} per step", "", "", f"{format_nbytes(nbytes // steps)}, {speed}")
    return shown


def _of_budget(peak: int, budget: int | None) -> str:
    return "no limit" if budget is None else f"{percent(peak, budget)} of the budget of {format_nbytes(budget)}, which is never exceeded"


def table(title: str, *columns: str) -> Table:
    """A plain table; a column whose name is empty holds remarks."""
    made = Table(
        title=title, title_justify="left", title_style="bold", caption_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0)
    )
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if column and i else "left", style="" if column or not i else "dim", overflow="fold")
    return made
