"""What the benches share: workers as processes of their own, the drive's bandwidth by fio, and how results are kept."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "MALLOC",
    "ROOT",
    "TINY",
    "Cells",
    "bandwidth",
    "environment",
    "front_parser",
    "markdown",
    "save",
    "settle",
    "show",
    "spread",
    "train",
    "work",
]

ROOT = Path(__file__).resolve().parents[1]
Cells = list[tuple[str, ...]]
"""Rows of a table, the head first."""

TINY = ("--layers=2", "--dim=128", "--vocab=512", "--seq=32", "--steps=3")
"""The model of the tests, for a worker."""

MALLOC: dict[str, dict[str, str]] = {
    "default": {},
    # large blocks are mapped and go back to the system at once, one arena for all threads: least RSS
    "lean": {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)},
    # nothing ever goes back, so that no page is faulted in twice: least time, for a loop with everything in memory
    "keep": {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)},
}
"""Settings of glibc's malloc, as environment of a worker; what is compared runs with the same."""

FIO_POINTS = ((1 << 20, 8), (1 << 20, 32), (4 << 20, 4), (4 << 20, 16), (8 << 20, 8))
"""Block and depth of which the best counts."""
FIO_ROUNDS = 3
RAMP_S = 0.5
"""Of transfers before those that count: a drive that allows bursts saves one up while nobody uses it."""


def environment(malloc: str = "lean") -> dict[str, str]:
    """For a worker: malloc as named, this checkout before anything installed, and OpenMP threads that sleep while they wait.

    Those that spin, as is the default, take the cores from the threads that read and write: with other work on the machine a step took
    twenty times as long. What the caller's environment says about that counts more.
    """
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(ROOT)]
    path = os.pathsep.join([str(ROOT), *paths])
    return {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | MALLOC[malloc] | {"PYTHONPATH": path}


def settle(malloc: str = "lean") -> None:
    """Start this process again with the environment of a worker, unless it has that."""
    wanted = environment(malloc)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], wanted)


def work(script: str, options: Sequence[str], *, malloc: str = "lean", python: str = sys.executable) -> Any:
    """Run a worker of this directory to its end; the JSON of its last line.

    Raises:
        SystemExit: it failed, with what it said.
    """
    command = [python, str(ROOT / "bench" / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(malloc))
    if done.returncode or not done.stdout.strip():
        raise SystemExit(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-2000:]}{done.stderr[-8000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"malloc": malloc, "omp_wait_policy": environment()["OMP_WAIT_POLICY"]}


def train(options: Sequence[str], *, malloc: str = "lean") -> dict[str, Any]:
    """One run of `_train.py`."""
    result: dict[str, Any] = work("_train.py", options, malloc=malloc)
    return result


def bandwidth(path: str, *, nbytes: int, read_share: float, point_nbytes: int = 1 << 29) -> dict[str, Any] | None:
    """Bytes per second of the best of several settings of fio, with `O_DIRECT`, on a file of `nbytes` that was overwritten before.

    The best by the median of its rounds: on a drive that others use too, the best single one would be luck.

    `beside` is what both give at once: fio's bandwidth while all cores multiply matrices, and the speed of that, of what it is alone. On
    a virtual machine it may be half: whoever serves its drive takes the time from its cores.

    Writes the file once, and the share of writes of at most twice `point_nbytes` per setting and round. None where fio is not installed.
    """
    from swapio.drive import DriveFile, Setting, fio_run, fio_version
    from swapio.io import aligned_buffer

    if fio_version() is None:
        return None
    content = aligned_buffer(8 << 20, os.urandom(1 << 20))
    settings = [Setting("direct", block, depth) for block, depth in FIO_POINTS if block <= nbytes]
    found: dict[Setting, list[float]] = {setting: [] for setting in settings}
    nbytes_each, ramp_s = min(point_nbytes, nbytes), RAMP_S if nbytes > point_nbytes else 0.0

    def speed(setting: Setting, nbytes: int) -> float:
        expected = statistics.median(found[setting] or [fill_bytes_per_s])
        ramp_nbytes = min(round(ramp_s * expected), nbytes)
        read, written, seconds = fio_run(
            file, setting, "mix", nbytes=nbytes, read_share=read_share, ramp_nbytes=ramp_nbytes, bytes_per_s=expected
        )
        return (read + written) / seconds

    with DriveFile(path, backend="direct", nbytes=nbytes) as file:
        begin = time.perf_counter()
        file.fill(content)
        fill_bytes_per_s = nbytes / (time.perf_counter() - begin)
        for _ in range(FIO_ROUNDS):
            for setting in settings:
                found[setting].append(speed(setting, nbytes_each))
        best = max(settings, key=lambda setting: statistics.median(found[setting]))
        alone = multiply(lambda passed: passed > 2 * ramp_s)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            job = pool.submit(speed, best, 4 * nbytes_each)
            time.sleep(ramp_s)
            beside = multiply(lambda passed: job.done())
    return {
        "best_bytes_per_s": statistics.median(found[best]), "read_share": read_share, "file_nbytes": nbytes,
        "points": [{"setting": str(setting), "bytes_per_s": speeds} for setting, speeds in found.items()],
        "beside": {"bytes_per_s": job.result(), "compute": beside / alone},
    }  # fmt: skip


def multiply(done: Callable[[float], bool]) -> float:
    """Products of matrices per second, until `done(seconds)`."""
    import torch

    a, b = torch.ones(128, 768), torch.ones(768, 3072)
    torch.mm(a, b)
    count, passed, begin = 0, 0.0, time.perf_counter()
    while not (count and done(passed)):
        torch.mm(a, b)
        count, passed = count + 1, time.perf_counter() - begin
    return count / passed


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """Least, median and most."""
    ordered = sorted(values)
    return ordered[0], statistics.median(ordered), ordered[-1]


# --- the front of a bench ---


def front_parser(doc: str | None) -> argparse.ArgumentParser:
    """With what every bench takes; what it does not know goes to the workers: `parse_known_args`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="all other flags go to the workers: python bench/_train.py --help",
    )  # fmt: skip
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path, help="where NAME.md, NAME.json and NAME.png go")
    parser.add_argument("--tiny", action="store_true", help="seconds, for the tests")
    return parser


def show(sections: Mapping[str, Cells]) -> None:
    """Tables on the terminal."""
    from rich.console import Console

    from swapio.report import table

    console = Console()
    console.width = max(console.width, 140)  # a row in one line, in a file too
    for title, (head, *rows) in sections.items():
        shown = table(title, *head)
        for row in rows:
            shown.add_row(*row)
        console.print(shown, "")


def markdown(sections: Mapping[str, Cells], command: str, hardware: Mapping[str, Any]) -> str:
    """The same tables, with how and where they were made."""
    lines = [f"`{command}`", "", ", ".join(f"{k} {v}" for k, v in hardware.items())]
    for title, (head, *rows) in sections.items():
        lines += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))]
    return "\n".join(lines) + "\n"


def save(
    name: str,
    args: argparse.Namespace,
    argv: Sequence[str],
    sections: Mapping[str, Cells],
    data: Any,
    draw: Callable[[Any], None] | None = None,
) -> None:
    """Show the tables, and keep them with the figures and the picture under `args.out`, if it is given.

    Args:
        data: everything that was measured, for JSON.
        draw: draws on a matplotlib figure; None: no picture.
    """
    from swapio.report import machine

    show(sections)
    if args.out is None:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    command, hardware = " ".join([f"python bench/{name}.py", *argv]), machine()
    (args.out / f"{name}.md").write_text(markdown(sections, command, hardware), encoding="utf-8")
    text = {"command": command, "machine": hardware, "results": data}
    (args.out / f"{name}.json").write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    if draw is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed (pip install swapio[plot])")
        return
    figure = Figure(figsize=(8, 5), layout="constrained")
    draw(figure)
    figure.savefig(args.out / f"{name}.png", dpi=110, format="png")
