"""`swapio demo`: a GPT that lives on the drive learns real text."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..engine import Engine, initialize
from ..errors import ConfigError
from ..report import plot_training, training_table
from ..spec import format_nbytes, parse_nbytes
from ._data import Corpus
from .gpt import GPT, GPTConfig

__all__ = ["DemoOptions", "pick_directory", "run_demo"]

_KEPT_FREE = 2 << 30
_NO_DRIVE = {"tmpfs", "ramfs", "devtmpfs", "proc", "sysfs", "squashfs", "nfs", "nfs4", "cifs", "9p", "fuse", "fuse.sshfs"}


@dataclasses.dataclass(frozen=True, slots=True)
class DemoOptions:
    """The command's options."""

    offload: str
    nvme_path: Path | None
    host_memory: str | None
    out: Path
    layers: int
    dim: int
    seq: int
    batch: int
    steps: int
    seed: int
    lr: float
    dtype: str
    device: str


def run_demo(options: DemoOptions, console: Console) -> list[dict[str, Any]]:
    """Train, show, and write `demo.jsonl`, `demo.png`; returns the log, one entry per step.

    Raises:
        ConfigError, BudgetError, StorageError: what was asked for cannot work; said before training starts.
    """
    if options.dim % 64:
        raise ConfigError(f"--dim: {options.dim} is no multiple of 64", key="dim", value=options.dim)
    shape = GPTConfig(Corpus.vocab_size, options.seq, options.layers, options.dim, max(options.dim // 64, 1))
    state_nbytes = shape.num_params * (12 if options.dtype == "bf16" else 12)
    host_memory = options.host_memory or "auto"
    if host_memory != "auto":
        parse_nbytes(host_memory, key="--host-memory")
    console.print(
        f"[bold]A GPT of {shape.num_params / 1e6:.1f}M parameters[/], {options.layers} layers of {options.dim}. Its weights and AdamW's "
        f"state are {format_nbytes(state_nbytes)}: 12 bytes per parameter."
    )
    options.out.mkdir(parents=True, exist_ok=True)
    with _place(options, state_nbytes, console) as path:
        torch.manual_seed(options.seed)
        engine = initialize(model=GPT(shape), config=_config(options, path, host_memory))[0]
        with engine:
            log = _train(engine, options, console)
            if log:
                _show_sample(engine, options, console)
            peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            stats = engine.stats()
            seconds = sum(entry["seconds"] for entry in log)
            # its weights would come back into memory only to be dropped
            engine.abandon()
    console.print(training_table(stats, seconds=seconds, num_steps=len(log), peak_rss=peak_rss))
    _write(options, log, console)
    return log


def _config(options: DemoOptions, path: Path | None, host_memory: str) -> dict[str, Any]:
    where = {"device": options.offload} | ({"nvme_path": str(path)} if path is not None else {})
    return {
        "train_batch_size": options.batch,
        "bf16": {"enabled": options.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": where, "offload_optimizer": where},
        "swapio": {"host_memory": host_memory, "device": options.device},
    }


@contextmanager
def _place(options: DemoOptions, nbytes: int, console: Console) -> Iterator[Path | None]:
    """The directory for the swap file; one made for the demo is removed after it."""
    if options.offload != "nvme":
        console.print(f"Nothing goes to a drive (--offload {options.offload}).")
        yield None
        return
    if options.nvme_path is not None:
        console.print(f"All of it rests on the drive, in {options.nvme_path}; host memory holds what is in use.")
        yield options.nvme_path
        return
    parent, why = pick_directory(nbytes)
    console.print(f"All of it rests on the drive, in {parent} ({why}); host memory holds what is in use. --nvme-path chooses another.")
    path = Path(tempfile.mkdtemp(prefix="swapio-demo-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def pick_directory(nbytes: int) -> tuple[Path, str]:
    """A writable directory on the local drive with the most room, and why it was chosen.

    Raises:
        ConfigError: none has `nbytes` and a reserve free.
    """
    kinds = {p.mountpoint: p.fstype for p in psutil.disk_partitions(all=True)}
    best: tuple[int, Path, str] | None = None
    for candidate in (Path.cwd(), Path(tempfile.gettempdir()), Path("/var/tmp"), Path.home(), *map(Path, kinds)):
        mount = next((str(p) for p in (candidate, *candidate.parents) if str(p) in kinds), "/")
        kind = kinds.get(mount, "")
        if kind in _NO_DRIVE or not candidate.is_dir() or not os.access(candidate, os.W_OK | os.X_OK):
            continue
        free = shutil.disk_usage(candidate).free
        if best is None or free > best[0]:
            best = (free, candidate, kind)
    if best is None or best[0] < nbytes + _KEPT_FREE:
        found = f"the most that any local drive has is {format_nbytes(best[0])} in {best[1]}" if best else "no local drive is writable"
        raise ConfigError(
            f"--nvme-path: {format_nbytes(nbytes + _KEPT_FREE)} of free space are needed, but {found}; give --nvme-path, or fewer --layers",
            key="nvme_path",
        )
    return best[1], f"{best[2] or 'local drive'}, {format_nbytes(best[0])} free, the most of all here"


def _train(engine: Engine, options: DemoOptions, console: Console) -> list[dict[str, Any]]:
    corpus = Corpus()
    process = psutil.Process()
    log: list[dict[str, Any]] = []
    progress = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), TextColumn("{task.description}"), console=console)
    task = progress.add_task("", total=options.steps)
    before = engine.stats()
    device = engine.device
    with Live(progress, console=console, refresh_per_second=4) if console.is_terminal else _nothing():
        try:
            for step in range(options.steps):
                start = time.perf_counter()
                inputs, targets = corpus.batch(step, seed=options.seed, batch=options.batch, seq=options.seq)
                loss = engine(inputs.to(device), targets.to(device))
                engine.backward(loss)
                engine.step()
                value = loss.item()
                del loss
                seconds = time.perf_counter() - start
                stats = engine.stats()
                entry = {
                    "step": step,
                    "loss": value,
                    "seconds": seconds,
                    "bytes_read": stats["bytes_read"] - before["bytes_read"],
                    "bytes_written": stats["bytes_written"] - before["bytes_written"],
                    "stall_seconds": stats["stall_seconds"] - before["stall_seconds"],
                    "rss": process.memory_info().rss,
                } | {k: stats[k] for k in ("host_memory_used", "host_memory_budget", "bytes_on_nvme", "bytes_on_host", "bytes_on_device")}
                before = stats
                log.append(entry)
                text = _line(entry, options)
                progress.update(task, advance=1, description=text)
                if not console.is_terminal and (step % max(options.steps // 20, 1) == 0 or step == options.steps - 1):
                    console.print(f"step {step + 1}/{options.steps}  {text}")
        except KeyboardInterrupt:
            console.print("[yellow]Interrupted: stopping after the last whole step.[/]")
    return log


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _line(entry: dict[str, Any], options: DemoOptions) -> str:
    seconds = entry["seconds"]
    budget = entry["host_memory_budget"]
    return (
        f"loss {entry['loss']:.4f}  {options.batch * options.seq / seconds:.0f} tokens/s  "
        f"drive {entry['bytes_read'] / seconds / 1e9:.2f} GB/s read {entry['bytes_written'] / seconds / 1e9:.2f} written  "
        f"RAM {format_nbytes(entry['host_memory_used'])}" + (f" of {format_nbytes(budget)}" if budget is not None else "")
        + f"  waiting {100 * entry['stall_seconds'] / seconds:.0f}%"
    )  # fmt: skip


def _show_sample(engine: Engine, options: DemoOptions, console: Console) -> None:
    prompt = b"The "
    idx = torch.tensor([list(prompt)], dtype=torch.int64, device=engine.device)
    engine.eval()
    generated = engine.module.generate(idx, 60, generator=torch.Generator().manual_seed(options.seed))  # type: ignore[operator]
    text = bytes(generated[0].tolist()).decode("utf-8", errors="replace")
    console.print("What it writes by now:", highlight=False)
    console.print(f"  {text!r}", highlight=False, markup=False)


def _write(options: DemoOptions, log: list[dict[str, Any]], console: Console) -> None:
    jsonl = options.out / "demo.jsonl"
    jsonl.write_text("".join(json.dumps(entry) + "\n" for entry in log))
    files = str(jsonl)
    if log:
        first, last = log[0]["loss"], log[-1]["loss"]
        console.print(f"The loss went from [bold]{first:.3f}[/] to [bold]{last:.3f}[/] in {len(log)} steps.")
        title = f"{options.layers} x {options.dim}, --offload {options.offload}, --host-memory {options.host_memory or 'auto'}"
        png = options.out / "demo.png"
        if plot_training(log, png, title=title):
            files += f" and {png}"
        else:
            print('no picture: matplotlib is not installed (pip install "swapio[plot]")', file=sys.stderr)
    console.print(f"Written: {files}", soft_wrap=True)
