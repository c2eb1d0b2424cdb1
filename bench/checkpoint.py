"""Saving, loading and exporting a model that trains from a drive: time against copying as many bytes there, and memory above training.

    python bench/checkpoint.py --nvme-path /mnt/nvme0 --out bench/results     # 86M parameters, some minutes, 4 GB on the drive
    python bench/checkpoint.py --tiny                                         # seconds, for the tests

Everything rests on the drive. Each part is measured alone, in one process: the peak of resident memory is reset before it (`clear_refs`),
and what it is above the peak of a training step is the cost of the part. A copy is read and written in pieces of 4 MiB and synced, its
source dropped from the page cache before. Updates that the last step has put off are made before. Everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import swapio
from swapio.checkpoint import export
from swapio.cli._data import Corpus
from swapio.cli._meter import peak_rss
from swapio.cli.gpt import GPT, GPTConfig
from swapio.report import machine

MIB = 2**20


@dataclasses.dataclass
class Part:
    """One thing that was measured: bytes that it reads or writes on the drive, and beside it the seconds to copy as many."""

    what: str
    seconds: float
    nbytes: int
    above: int  # bytes of peak memory above training
    copy_s: float | None = None


def reset_peak() -> None:
    """Let `peak_rss` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def forget(path: Path) -> None:
    """Drop a file or a folder from the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy(source: Path, target: Path) -> float:
    """Seconds to copy a folder."""
    forget(source)
    start = time.perf_counter()
    target.mkdir()
    for path in source.iterdir():
        with path.open("rb", buffering=0) as reader, (target / path.name).open("wb", buffering=0) as writer:
            while piece := reader.read(4 * MIB):
                writer.write(piece)
            os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    shutil.rmtree(target)
    return seconds


def nbytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def measure(args: argparse.Namespace, work: Path) -> tuple[list[Part], dict[str, Any]]:
    """All parts, in order."""
    place = {"device": "nvme", "nvme_path": str(work)}
    config = {
        "train_batch_size": args.batch,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "swapio": {"host_memory": args.host_memory},
    }
    corpus, shape = Corpus(), GPTConfig(256, args.seq, args.layers, args.dim, args.dim // 64)
    with swapio.zero.Init(config_dict_or_path=config):
        model = GPT(shape)
    engine: Any = swapio.initialize(model=model, config=config)[0]

    def step(number: int) -> float:
        loss = engine(*corpus.batch(number, seed=0, batch=args.batch, seq=args.seq))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def timed(run: Callable[[], Any]) -> tuple[float, int]:
        reset_peak()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start, peak_rss()

    step(0)
    plain = [timed(functools.partial(step, n)) for n in range(1, 1 + args.steps)]
    training, step_s = max(p for _, p in plain), min(s for s, _ in plain)
    parts: list[Part] = []
    saved, out = work / "saved", work / "out"

    def part(what: str, run: Callable[[], Any], folder: Path) -> None:
        if engine.zero.closed is None:
            engine.zero.stepper.apply_all_due()
        forget(folder) if folder.exists() else None
        seconds, peak = timed(run)
        parts.append(Part(what, seconds, nbytes_in(folder), peak - training))

    part("save", lambda: engine.save_checkpoint(saved, tag="a"), saved)
    copy_s = copy(saved / "a", work / "copy")
    expected = step(args.steps + 1)
    part("load", lambda: engine.load_checkpoint(saved, "a"), saved)
    losses = expected, step(args.steps + 1)
    parts[0].copy_s = parts[1].copy_s = copy_s
    engine.load_checkpoint(saved, "a")
    shutil.rmtree(saved)

    during: list[float] = []

    def save_meanwhile() -> None:
        engine.save_checkpoint(saved, tag="b", async_save=True)
        while not (saved / "latest").exists():
            during.append(timed(lambda: step(args.steps + 1 + len(during)))[0])
        engine.wait_for_checkpoint()

    part("save, training", save_meanwhile, saved)
    engine.abandon()
    part("export", lambda: export(saved, out), out)
    parts[-1].copy_s = copy(out, work / "copy")
    shutil.rmtree(saved)
    made: list[Any] = []
    part("load_pretrained", lambda: made.append(swapio.load_pretrained(lambda: GPT(shape), out, config)), out)
    parts[-1].copy_s = parts[-2].copy_s
    return parts, {
        "parameters": shape.num_params,
        "host_memory": args.host_memory,
        "training_peak_rss": training,
        "step_s": step_s,
        "steps_while_saving_s": during,
        "losses": losses,
    }


def table(parts: list[Part], facts: dict[str, Any], command: str) -> str:
    during, here = facts["steps_while_saving_s"], machine()
    lines = [
        f"`{command}`",
        "",
        f"{facts['parameters'] / 1e6:.1f}M parameters in {facts['host_memory']}, everything on the drive; {here['processor']}, "
        f"{here['cores']} cores. A training step takes {facts['step_s']:.2f} s and {facts['training_peak_rss'] / MIB:.0f} MiB at "
        f"most; {len(during)} steps while saving took {sum(during):.2f} s.",
        "",
        "| | bytes | seconds | copying as many | ratio | peak RSS above training |",
        "|---|---|---|---|---|---|",
    ]
    for p in parts:
        copying = "-" if p.copy_s is None else f"{p.copy_s:.2f} s"
        ratio = "-" if p.copy_s is None else f"{p.seconds / p.copy_s:.2f}"
        lines.append(f"| {p.what} | {p.nbytes / 1e6:.0f} MB | {p.seconds:.2f} | {copying} | {ratio} | {p.above / MIB:+.0f} MiB |")
    same = facts["losses"][0] == facts["losses"][1]
    lines += ["", "After the load: " + ("losses equal." if same else f"LOSSES DIFFER: {facts['losses']}.")]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("dim", 768), ("seq", 128), ("batch", 1), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--host-memory", default="384MiB")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.dim, args.seq, args.host_memory = 2, 64, 32, "2MiB"
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="swapio-checkpoint-") as work:
        parts, facts = measure(args, Path(work))
    text = table(parts, facts, "python bench/checkpoint.py " + " ".join(argv))
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "checkpoint.md").write_text(text)
        found = {"facts": facts, "machine": machine(), "parts": [dataclasses.asdict(p) for p in parts]}
        (args.out / "checkpoint.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if facts["losses"][0] == facts["losses"][1] else 1


if __name__ == "__main__":
    raise SystemExit(main())
