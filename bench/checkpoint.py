"""Saving, loading and exporting a model that trains from a drive: time against copying as many bytes there, and memory above training.

    python bench/checkpoint.py --nvme-path /mnt/nvme0 --out bench/results     # 134M parameters, some minutes, 6 GB on the drive
    python bench/checkpoint.py --preset 1.64B --host-memory 700MiB --nvme-path /mnt/nvme0       # 50 GB on the drive
    python bench/checkpoint.py --tiny                                         # seconds, for the tests

Everything rests on the drive. Each part is measured alone, in one process: the peak of resident memory is reset before it (`clear_refs`),
and what it is above the peak of a training step is the cost of the part; bytes read and written are what the kernel counted for the
process. Beside each part, right after it, a copy moves what the part has to move at least, however it is made: an export reads fp32 masters
and writes weights. A copy is read and written in pieces of 4 MiB and synced, its source dropped from the page cache before. Updates that
the last step has put off are made before. *load* is into an engine that has trained, which stays as it is if something is damaged, so
everything is read twice; *load, fresh* is into a new one. In the end all is deleted. `--parts 'save; export'` measures only these.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from bench._models import GPT
from bench._run import Cells, save, settle
from bench._steps import DTYPES, add_flags, batches, io_nbytes, peak_rss, reset_peak, shape_of
from swapio.checkpoint import export

MIB = 2**20
PARTS = ("save", "load", "save_16bit_model", "save, training", "load, fresh", "export", "load_pretrained")


@dataclasses.dataclass
class Part:
    """One thing that was measured: bytes that it reads and writes on the drive, and beside it the seconds to copy what it must at least."""

    what: str
    seconds: float
    moved: tuple[int, int]  # bytes read and written
    above: int  # bytes of peak memory above training
    least: tuple[int, int] = 0, 0  # bytes that it must read and write
    copy_s: float | None = None


def forget(path: Path) -> None:
    """Drop a file or a folder from the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy(source: Path, target: Path, nbytes: tuple[int, int]) -> float:
    """Seconds to read the first of the bytes from a folder, and to write the second of them, in turns."""
    forget(source)
    read, written = nbytes
    start, copied = time.perf_counter(), 0
    with target.open("wb", buffering=0) as writer:
        for path in sorted(source.iterdir(), key=lambda p: -p.stat().st_size):
            with path.open("rb", buffering=0) as reader:
                while copied < read and (piece := reader.read(4 * MIB)):
                    copied += len(piece)
                    writer.write(piece[: len(piece) * written // read])
        os.fsync(writer.fileno())
    seconds = time.perf_counter() - start
    target.unlink()
    return seconds * read / copied  # a folder may have less than an export reads


def nbytes_in(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def measure(args: argparse.Namespace, work: Path) -> tuple[list[Part], dict[str, Any]]:
    """All parts, in order."""
    place = {"device": "nvme", "nvme_path": str(work)}
    config = {
        "train_batch_size": args.batch,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "swapio": {"host_memory": args.host_memory},
    }
    shape = shape_of(args)
    ids, targets = next(batches(shape, args.batch))

    def start() -> Any:
        with swapio.zero.Init(config_dict_or_path=config):
            model = GPT(shape)
        return swapio.initialize(model=model, config=config)[0]

    engine = start()

    def step() -> float:
        loss = engine(ids, targets)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def timed(run: Callable[[], Any]) -> tuple[float, int]:
        reset_peak()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start, peak_rss()

    step()
    plain = [timed(step) for _ in range(args.steps)]
    training, step_s = max(p for _, p in plain), min(s for s, _ in plain)
    parts: list[Part] = []
    saved, out, live = work / "saved", work / "out", work / "live"

    def part(what: str, run: Callable[[], Any], *, dropped: Path | None = None) -> bool:
        """Whether it is wanted, and was run."""
        if what not in args.parts:
            return False
        if engine.zero.closed is None:
            engine.zero.stepper.apply_all_due()
            engine.manager.flush().wait()  # what is still being written belongs to the part before
        if dropped is not None:
            forget(dropped)
        before = io_nbytes()
        seconds, peak = timed(run)
        read, written = (b - a for a, b in zip(before, io_nbytes(), strict=True))
        parts.append(Part(what, seconds, (read, written), peak - training))
        return True

    def beside(source: Path, read: int, written: int) -> None:
        parts[-1].least, parts[-1].copy_s = (read, written), copy(source, work / "copy", (read, written))

    def save_now() -> None:
        engine.save_checkpoint(saved, tag="a")

    if not part("save", save_now):
        save_now()
    nbytes, weights, masters = nbytes_in(saved), shape.num_params * DTYPES[args.dtype].itemsize, 4 * shape.num_params
    if "save" in args.parts:
        beside(saved / "a", nbytes, nbytes)
    expected, losses = step(), []
    if part("load", lambda: engine.load_checkpoint(saved, "a"), dropped=saved):
        beside(saved / "a", nbytes, nbytes)
        losses = [expected, step()]
        engine.load_checkpoint(saved, "a")
    if part("save_16bit_model", lambda: engine.save_16bit_model(live)):
        beside(saved / "a", weights, weights)
        shutil.rmtree(live)

    during: list[float] = []

    def save_meanwhile() -> None:
        engine.save_checkpoint(saved, tag="b", async_save=True, save_latest=False)
        while not (saved / "b").exists():
            during.append(timed(step)[0])
        engine.wait_for_checkpoint()
        shutil.rmtree(saved / "b")

    part("save, training", save_meanwhile)
    engine.abandon()
    if "load, fresh" in args.parts:
        engine = start()
        part("load, fresh", lambda: engine.load_checkpoint(saved, "a"), dropped=saved)
        beside(saved / "a", nbytes, nbytes)
        losses += [expected, step()]
        engine.abandon()
    if part("export", lambda: export(saved, out), dropped=saved):
        beside(saved / "a", masters, weights)
    shutil.rmtree(saved)
    made: list[Any] = []
    if out.exists() and part("load_pretrained", lambda: made.append(swapio.load_pretrained(lambda: GPT(shape), out, config)), dropped=out):
        beside(out, weights, weights)
    return parts, {
        "parameters": shape.num_params,
        "host_memory": args.host_memory,
        "training_peak_rss": training,
        "step_s": step_s,
        "steps_while_saving_s": during,
        "losses": losses,
    }


def table(parts: list[Part], facts: dict[str, Any]) -> Cells:
    rows: Cells = [("", "reads + writes", "seconds", "a copy of", "takes", "ratio", "peak RSS above training")]
    for p in parts:
        copying = ("-", "-", "-") if p.copy_s is None else (_sum(p.least), f"{p.copy_s:.2f} s", f"{p.seconds / p.copy_s:.2f}")
        rows.append((p.what, _sum(p.moved), f"{p.seconds:.2f} s", *copying, f"{p.above / MIB:+.0f} MiB"))
    during = facts["steps_while_saving_s"]
    if not during:
        return rows
    slow = f"{len(during)} steps, of {facts['step_s']:.2f} s alone"
    rows.append(("training meanwhile", "-", f"{sum(during):.2f} s", slow, "-", f"{sum(during) / len(during) / facts['step_s']:.2f}", "-"))
    return rows


def _sum(moved: tuple[int, int]) -> str:
    return f"{moved[0] / 1e6:.0f} + {moved[1] / 1e6:.0f} MB"


def draw(figure: Any, parts: list[Part]) -> None:
    axes = figure.subplots()
    shown = [p for p in parts if p.copy_s]
    axes.bar([p.what for p in shown], [p.seconds / p.copy_s for p in shown if p.copy_s])
    axes.axhline(1.0, color="tab:gray", linestyle=":")
    axes.set_ylabel("seconds / seconds of a copy")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser)
    parser.set_defaults(steps=2, nvme_path=tempfile.gettempdir())
    parser.add_argument("--host-memory", default="384MiB")
    parser.add_argument("--parts", default=PARTS, type=lambda text: [p.strip() for p in text.split(";")], help=f"of {'; '.join(PARTS)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {', '.join(unknown)}: use {'; '.join(PARTS)}")
    if args.tiny:
        args.layers, args.dim, args.vocab, args.seq, args.host_memory, args.dtype = 2, 64, 256, 32, "2MiB", "fp32"
    settle()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(dir=args.nvme_path, prefix="swapio-checkpoint-") as work:
        parts, facts = measure(args, Path(work))
    same = len(set(facts["losses"])) < 2
    title = (
        f"{facts['parameters'] / 1e6:.1f}M parameters in {facts['host_memory']}, everything on the drive; a step takes "
        f"{facts['step_s']:.2f} s and {facts['training_peak_rss'] / MIB:.0f} MiB at most; "
        f"after loading losses {'equal' if same else 'DIFFER'}"
    )
    data = {"facts": facts, "parts": [dataclasses.asdict(p) for p in parts]}
    save("checkpoint", args, argv, {title: table(parts, facts)}, data, lambda figure: draw(figure, parts))
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
