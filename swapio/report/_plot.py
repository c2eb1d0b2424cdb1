"""A run as a picture. matplotlib is imported here only, when a picture is made: it costs memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["plot_run"]

_TIERS = (
    ("bytes_on_nvme", "on the drive: weights and optimizer state", "tab:blue"),
    ("rss", "the process (RSS): with Python, PyTorch, activations", "tab:gray"),
    ("host_memory_used", "held in host memory by swapio", "tab:green"),
    ("gradient_bytes", "gradients in that", "tab:olive"),
    ("bytes_on_device", "on the accelerator", "tab:orange"),
)


def plot_run(entries: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> bool:
    """Write a PNG of the loss, and of memory by tier, over the steps. False when matplotlib is not installed.

    Args:
        entries: one mapping per step, as in the JSONL log; at least one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    steps = [e["step"] for e in entries]
    marker = "o" if len(steps) < 3 else None  # a line through one point is invisible
    figure = Figure(figsize=(8, 7), layout="constrained")
    loss, memory = figure.subplots(2, 1, sharex=True)
    loss.plot(steps, [e["loss"] for e in entries], color="tab:blue", marker=marker)
    loss.set_ylabel("loss (nats per byte)")
    loss.set_title(title, fontsize=10)
    top = 0.0
    for key, label, color in _TIERS:
        mib = [e[key] / 2**20 for e in entries]
        if any(mib):
            memory.plot(steps, mib, label=label, color=color, marker=marker)
            top = max(top, *mib)
    budget = entries[0]["host_memory_budget"]
    if budget is not None and budget / 2**20 < 3 * top:  # far above everything it would only flatten the rest
        memory.axhline(budget / 2**20, color="tab:red", linestyle="--", linewidth=1, label="the budget of host memory")
    memory.set_ylabel("MiB")
    memory.set_xlabel("step")
    memory.xaxis.get_major_locator().set_params(integer=True)
    memory.set_ylim(bottom=0)
    memory.legend(fontsize=8)
    for axes in (loss, memory):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110, format="png")
    return True
