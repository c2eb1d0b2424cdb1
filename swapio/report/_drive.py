"""What the bench of a drive found, as tables and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from ..spec import format_nbytes
from ._tables import percent, table

__all__ = ["drive_tables", "plot_drive"]


def _gb(value: float) -> str:
    return f"{value / 1e9:.2f}"


def drive_tables(result: Mapping[str, Any]) -> list[Table]:
    """The tables of one result of `run_bench`."""
    tables = [_grid(result)]
    if result["fio"]:
        tables.append(_fio(result))
    tables.append(_beside(result))
    tables.append(_forecast(result))
    return tables


def _grid(result: Mapping[str, Any]) -> Table:
    rounds = result["plan"]["repeats"]
    shown = table(
        f"Throughput, GB/s, medians of at most {rounds} rounds",
        "backend",
        "block",
        "depth",
        "read",
        "write",
        "mix",
        "least",
        "p50 ms",
        "p99",
        "CPU",
    )
    rows: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in result["grid"]:
        rows.setdefault((row["backend"], row["block_nbytes"], row["queue_depth"]), {})[row["action"]] = row
    best = result["best"]
    for (backend, block, depth), actions in rows.items():
        mix = actions["mix"]
        speeds = [_gb(actions[action]["median_bytes_per_s"]) for action in ("read", "write", "mix")]
        waits = (f"{mix['p50_ms']:.1f}", f"{mix['p99_ms']:.1f}", f"{100 * mix['cpu_cores']:.0f}%")
        is_best = (backend, block, depth) == (best["backend"], best["block_nbytes"], best["queue_depth"])
        shown.add_row(
            backend + " *" * is_best,
            format_nbytes(block),
            str(depth),
            *speeds,
            _gb(mix["min_bytes_per_s"]),
            *waits,
            style="bold green" if is_best else None,
        )
    shown.caption = "least, latencies and CPU (of one core) are of the mix; *: the best, or within 3% of it with less in flight"
    return shown


def _fio(result: Mapping[str, Any]) -> Table:
    shown = table(f"Beside {result['fio_version']}, GB/s, in turns", "block", "depth", "action", "ours", "fio", "ours / fio", "90% between")
    for row in result["fio"]:
        low, high = row["ratio_90_percent"]
        shown.add_row(
            format_nbytes(row["block_nbytes"]), str(row["queue_depth"]), row["action"], _gb(row["ours"]["median_bytes_per_s"]),
            _gb(row["fio"]["median_bytes_per_s"]), f"{row['ratio']:.3f}", f"{low:.2f} - {high:.2f}" if low < high else "-",
        )  # fmt: skip
    return shown


def _beside(result: Mapping[str, Any]) -> Table:
    shown = table("At the best setting", "what", "GB/s", "")
    for row in result["checksums"]:
        cores = 100 * (row["cpu_cores_on"] - row["cpu_cores_off"])
        shown.add_row(
            f"{row['action']} with checksums", _gb(row["on"]["median_bytes_per_s"]),
            f"{percent(row['ratio'], 1)} of without, {cores:+.0f}% of a core",
        )  # fmt: skip
    if several := result["processes"]:
        for action, speed in several["together_bytes_per_s"].items():
            shown.add_row(
                f"{action}, {several['num_processes']} processes together",
                _gb(speed),
                f"{percent(several['ratio'][action], 1)} of one alone",
            )
    if long := result["sustained_write"]:
        shown.add_row("first write", _gb(long["first_bytes_per_s"]), f"of {format_nbytes(long['first_nbytes'])}")
        shown.add_row(
            "sustained write",
            _gb(long["rest_bytes_per_s"]),
            f"{format_nbytes(long['rest_nbytes'])} more: {percent(long['ratio'], 1)} of that",
        )
    return shown


def _forecast(result: Mapping[str, Any]) -> Table:
    rows = result["forecast"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    shown = table("Seconds per step that the drive allows, all state on it", "parameters", *models, "TB written *", "on the drive *")
    for state in dict.fromkeys(row["state"] for row in rows):
        of = {row["model"]: row for row in rows if row["state"] == state}
        first = of[models[0]]
        shown.add_row(
            state, *(f"{of[m]['seconds_per_step']:.0f}" for m in models), f"{first['terabytes_per_1000_steps']:.0f}",
            format_nbytes(first["bytes_on_drive"]),
        )  # fmt: skip
    speed = _gb(result["best"]["mix_bytes_per_s"])
    shown.caption = f"at {speed} GB/s of the mix; compute may take longer. * in 1,000 steps, per {models[0]}"
    return shown


def plot_drive(result: Mapping[str, Any], path: Path) -> bool:
    """Write a PNG of throughput over depth, by block and action. False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    lines = dict.fromkeys((row["backend"], row["block_nbytes"]) for row in result["grid"])
    for axes, action in zip(panels, ("read", "write", "mix"), strict=True):
        for backend, block in lines:
            rows = [r for r in result["grid"] if (r["backend"], r["block_nbytes"], r["action"]) == (backend, block, action)]
            middle = [r["median_bytes_per_s"] / 1e9 for r in rows]
            spread = [
                [m - r["min_bytes_per_s"] / 1e9 for m, r in zip(middle, rows, strict=True)],
                [r["max_bytes_per_s"] / 1e9 - m for m, r in zip(middle, rows, strict=True)],
            ]
            axes.errorbar(
                [r["queue_depth"] for r in rows], middle, yerr=spread, marker="o", capsize=2, linewidth=1,
                linestyle="-" if backend == "direct" else "none", label=f"{backend}, {format_nbytes(block)}",
            )  # fmt: skip
        axes.set_title(action)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("transfers in flight")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("GB/s (median, least and most)")
    panels[0].set_ylim(bottom=0)
    panels[-1].legend(fontsize=7)
    figure.suptitle(f"{result['path']}, {result['filesystem']['type']}", fontsize=10)
    figure.savefig(path, dpi=110, format="png")
    return True
