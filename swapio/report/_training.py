"""A training run as a picture and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from ..spec import format_nbytes

__all__ = ["plot_training", "training_table"]


def plot_training(steps: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """Loss, and memory by tier, over the steps, as a PNG. False when matplotlib is not installed.

    Args:
        steps: one mapping per step, as in the demo's JSONL log.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("agg")
    from matplotlib import pyplot as plt

    number = [s["step"] for s in steps]
    figure, (loss, memory) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    loss.plot(number, [s["loss"] for s in steps], color="tab:blue")
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title(title)
    for key, label in (
        ("bytes_on_nvme", "at rest on the drive"),
        ("rss", "process, resident (RSS)"),
        ("host_memory_used", "held by swapio in host memory"),
        ("bytes_on_device", "on the accelerator"),
    ):
        values = [s[key] / 2**20 for s in steps]
        if any(values):
            memory.plot(number, values, label=label)
    budget = steps[0]["host_memory_budget"] if steps else None
    if budget is not None and steps and budget < 4 * max(max(s["rss"], s["bytes_on_nvme"]) for s in steps):
        memory.axhline(budget / 2**20, color="tab:red", linestyle="--", linewidth=1, label="budget (host_memory)")
    memory.set_ylabel("MiB")
    memory.set_xlabel("step")
    memory.set_ylim(bottom=0)
    memory.legend()
    for axes in (loss, memory):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def training_table(stats: Mapping[str, Any], *, seconds: float, num_steps: int, peak_rss: int) -> Table:
    """Where bytes rested and what the steps waited for."""
    table = Table(title="Where the bytes rested, and what the steps waited for", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    budget = stats["host_memory_budget"]
    per_step = max(num_steps, 1)
    rows = [
        ("on the drive", format_nbytes(stats["bytes_on_nvme"]), f"{stats['backend']} at {stats['path']}"),
        ("in host memory, peak", format_nbytes(stats["host_memory_peak"]), "no limit" if budget is None else f"budget {format_nbytes(budget)}"),
        ("on the accelerator", format_nbytes(stats["bytes_on_device"]), ""),
        ("process, peak RSS", format_nbytes(peak_rss), "with Python, PyTorch and activations"),
        ("read per step", format_nbytes(stats["bytes_read"] // per_step), f"{stats['bytes_read'] / max(seconds, 1e-9) / 1e9:.2f} GB/s"),
        ("written per step", format_nbytes(stats["bytes_written"] // per_step), f"{stats['bytes_written'] / max(seconds, 1e-9) / 1e9:.2f} GB/s"),
        ("found in memory", f"{stats['hits']} of {stats['hits'] + stats['misses']}", "uses that needed no wait"),
        ("waited for bytes or memory", f"{stats['stall_seconds']:.1f} s", f"{100 * stats['stall_seconds'] / max(seconds, 1e-9):.0f}% of the time"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
