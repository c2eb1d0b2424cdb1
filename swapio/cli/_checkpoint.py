"""`swapio export` and `swapio inspect`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ..checkpoint import export, inspect
from ..spec import format_nbytes, parse_nbytes

__all__ = ["LateProgress", "export_checkpoint", "inspect_checkpoint"]


class LateProgress:
    """A bar for what takes longer than `after_s` seconds; call it with the bytes that are done and those that there are."""

    def __init__(self, what: str, console: Console, *, after_s: float = 2.0, clock: Callable[[], float] = time.monotonic) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        self._bar = Progress(*columns, console=console, transient=True)
        self._clock = clock
        self._start_at = clock() + after_s
        self._task = self._bar.add_task(what, total=None)
        self.shown = False

    def __call__(self, done: int, total: int) -> None:
        if not self.shown and self._clock() >= self._start_at:
            self.shown = True
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.shown:
            self._bar.stop()


def export_checkpoint(
    checkpoint: Path, out: Path, tag: str | None, dtype: str | None, trainable_only: bool, max_shard_size: str, console: Console
) -> None:
    """Write, and say what."""
    nbytes = parse_nbytes(max_shard_size, key="--max-shard-size")
    with LateProgress("exporting", console) as progress:
        done = export(
            checkpoint, out, tag=tag, dtype=dtype, trainable_only=trainable_only, max_shard_nbytes=nbytes, progress=progress
        )  # fmt: skip
    files = ", ".join(p.name for p in sorted(out.glob("*.safetensors*")))
    console.print(f"{format_nbytes(done)} in {out}: {files}", soft_wrap=True)


def inspect_checkpoint(checkpoint: Path, tag: str | None, verify: bool, as_json: bool, console: Console) -> bool:
    """Say what is there; whether all is as it was written."""
    with LateProgress("checking", Console(stderr=True)) as progress:
        found = inspect(checkpoint, tag=tag, verify=verify, progress=progress)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for name, text in _lines(found):
            console.print(f"{name:12} {text}", soft_wrap=True, markup=False)
    return not found["damage"]


def _lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    lines = [("checkpoint", f"{found['path']}, {format_nbytes(found['nbytes'])}")]
    if "step" in found:
        ranks = f"{found['world_size']} rank{'s' if found['world_size'] > 1 else ''}"
        lines.append(("step", f"{found['step']} ({found['samples']} samples), saved by {ranks}"))
        for dtype, size in found["model"].items():
            lines.append(("model", f"{size['numel']:,} elements in {size['tensors']} tensors of {dtype}, {format_nbytes(size['nbytes'])}"))
        lines.append(("trained", f"{found['trained_numel']:,} elements"))
        lines.append(("optimizer", "none" if found["optimizer"] is None else ", ".join(found["optimizer"]) or "keeps nothing"))
        lines += [("scheduler", found["scheduler"])] if found["scheduler"] else []
        lines += [("client state", ", ".join(found["client_state"]))] if found["client_state"] else []
        lines += [("left out", ", ".join(found["left_out"]))] if found["left_out"] else []
    else:
        lines.append(("unreadable", found["unreadable"]))
    lines.append(("tags", ", ".join(t + (" (latest)" if t == found["latest"] else "") for t in found["tags"])))
    lines += [("skipped", f"{name}: left by a save that did not end; delete it") for name in found["leftovers"]]
    checked = "every byte is as it was written" if found["verified"] else "all parts are there; --verify reads every byte"
    return lines + ([("damaged", text) for text in found["damage"]] or [("whole", checked)])
