"""`swapio bench` and `swapio tune`: what a drive gives, and the setting that gets it."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..drive import Plan, check_room, run_bench, run_tune
from ..report import drive_tables, machine, plot_drive, table
from ..spec import format_nbytes
from ._output import output_file

__all__ = ["bench_paths", "tune_path"]


def bench_paths(paths: Sequence[Path], plan: Plan, out: Path, console: Console) -> None:
    """Measure each path in turn, print tables, and write `drive.json` and `drive.png` (`drive-2.png`, ...) to `out`.

    Raises:
        ConfigError, StorageError: a path cannot be used, or has too little room.
    """
    for path in paths:  # a wrong one is told before minutes go to the others
        check_room(path, plan.file_nbytes)
    json_path = output_file(out, "drive.json")
    found: dict[str, Any] = {"command": sys.argv, "machine": machine(), "results": []}
    files = [json_path]
    for number, path in enumerate(paths, 1):
        console.rule(escape(str(path)))
        with _progress(console) as progress:
            task = progress.add_task("starting", total=None)

            def announce(moved: int, written: int, progress: Progress = progress, path: Path = path) -> None:
                progress.console.print(
                    f"At most {format_nbytes(moved)} will be moved, {format_nbytes(written)} of them written to {path}; no file stays.",
                    soft_wrap=True,
                    markup=False,
                )

            def show(done: int, total: int, what: str, progress: Progress = progress, task: Any = task) -> None:
                progress.update(task, completed=min(done, total), total=total, description=what)

            result = run_bench(path, plan=plan, announce=announce, progress=show)
        for shown in drive_tables(result):
            console.print(shown, "")
        found["results"].append(result)
        written = result["actual_nbytes"]["written"]
        console.print(f"{format_nbytes(written)} were written to {path}. For the config, as JSON:", soft_wrap=True, markup=False)
        console.print_json(json.dumps(result["swapio_config"]), indent=2)
        _show_refused(result, console)
        for note in result["notes"]:
            console.print(f"Note: {note}.", soft_wrap=True, markup=False)
        picture = output_file(out, "drive.png" if number == 1 else f"drive-{number}.png")
        if plot_drive(result, picture):
            files.append(picture)
        else:
            picture.unlink(missing_ok=True)  # that of an earlier run
            console.print('No picture: matplotlib is not installed (pip install "swapio\\[plot]").')
        json_path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"Written: {', '.join(map(str, files))}.", soft_wrap=True, markup=False)


def tune_path(path: Path, out: Path, console: Console) -> None:
    """Search the best setting of a path and write it to the file `out`.

    Raises:
        ConfigError, StorageError: as for `bench_paths`.
    """
    target = output_file(out.parent, out.name, asked="file")
    with _progress(console) as progress:
        task = progress.add_task("starting", total=None)

        def announce(written: int) -> None:
            progress.console.print(
                f"At most {format_nbytes(written)} will be written to {path}; no file stays.", soft_wrap=True, markup=False
            )

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        result = run_tune(path, announce=announce, progress=show)
    shown = table("The mix of the optimizer, GB/s", "backend", "block", "depth", "median", "range", "rounds")
    for row in result["measured"][:10]:
        low, middle, high = (f"{row[f'{k}_bytes_per_s'] / 1e9:.2f}" for k in ("min", "median", "max"))
        cells = (row["backend"], format_nbytes(row["block_nbytes"]), str(row["queue_depth"]), middle, f"{low} - {high}")
        shown.add_row(*cells, str(row["num_samples"]))
    console.print(shown, "")
    _show_refused(result, console)
    target.write_text(json.dumps(result | {"machine": machine()}, indent=1) + "\n", encoding="utf-8")
    console.print(f"{format_nbytes(result['written_nbytes'])} were written to {path}. Use it with", soft_wrap=True, markup=False)
    console.print_json(json.dumps({"swapio": {"tuned": str(target)}}), indent=2)
    console.print("or paste")
    console.print_json(json.dumps(result["swapio_config"]), indent=2)


def _show_refused(result: dict[str, Any], console: Console) -> None:
    for kind, why in result["refused_backends"].items():
        console.print(f"Not measured: {kind}, {why}", soft_wrap=True, markup=False)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<40.40}"), BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        console=console, transient=True, disable=not console.is_terminal,
    )  # fmt: skip
