"""Flags, training loop and figures that the workers share: `_train.py` (swapio), `_deepspeed.py`, `_plain.py`.

A worker is a process that trains `_models.GPT` on random tokens and prints one line of JSON. DeepSpeed's runs in an environment of its own,
so this file imports PyTorch alone.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from bench._models import PRESETS, Shape, bf16_product

__all__ = [
    "DTYPES",
    "add_flags",
    "age_s",
    "batches",
    "io_nbytes",
    "peak_rss",
    "reset_peak",
    "rss",
    "run_steps",
    "say",
    "shape_of",
    "summary",
]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The model, the batches, and what both engines know."""
    parser.add_argument("--preset", choices=tuple(PRESETS), help="sizes of the model; single ones that are given count more")
    for name in ("layers", "dim", "heads", "vocab", "seq"):
        parser.add_argument(f"--{name}", type=int, help=f"default: {getattr(PRESETS['134M'], name)}; heads: dim / 64")
    for name, value in (("batch", 1), ("gas", 1), ("steps", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--checkpoints", action="store_true", help="compute each block again in backward")
    parser.add_argument("--clipping", type=float, default=1.0, help="0: off")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    parser.add_argument("--zero-init", type=int, default=1, help="construct the model where it rests")
    for name in ("offload-param", "offload-optimizer"):
        parser.add_argument(f"--{name}", choices=("none", "cpu", "nvme"), default="nvme")
    parser.add_argument("--nvme-path", default=".")
    parser.add_argument("--tag", default="")


def shape_of(args: argparse.Namespace) -> Shape:
    """The shape that the flags name."""
    base = PRESETS[args.preset or "134M"]
    sizes = {name: getattr(args, name) or getattr(base, name) for name in ("layers", "dim", "vocab", "seq")}
    heads = args.heads or (base.heads if sizes["dim"] == base.dim else max(1, sizes["dim"] // 64))
    return Shape(heads=heads, **sizes)


def io_nbytes() -> tuple[int, int]:
    """Bytes that this process made the drives read and write since it started."""
    text = Path("/proc/self/io").read_text()
    read, written = (int(re.search(rf"^{name}: (\d+)", text, re.M)[1]) for name in ("read_bytes", "write_bytes"))  # type: ignore[index]
    return read, written


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def age_s() -> float:
    """Seconds since this process started: at the beginning of `main`, those of its imports."""
    started: float = psutil.Process().create_time()
    return round(time.time() - started, 2)


def rss() -> int:
    return _status("VmRSS")


def peak_rss() -> int:
    """The most bytes resident; unlike `ru_maxrss` without those of the process that started this one."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Let `peak_rss` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def batches(shape: Shape, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random tokens and targets, the same in every worker."""
    generator = torch.Generator().manual_seed(7)
    while True:
        ids = torch.randint(0, shape.vocab, (batch, shape.seq + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def run_steps(engine: Any, args: argparse.Namespace, *, counters: Callable[[], Mapping[str, float]] = dict) -> dict[str, Any]:
    """Train `args.steps` steps; one entry per step in each list.

    Args:
        engine: called with a batch, then `backward(loss)` and `step()`, as swapio's and DeepSpeed's.
        counters: numbers that only grow; what each step added comes as `step_<name>`.

    `step_steal_s` are CPU seconds that a hypervisor took from this machine, for its own threads (those of the drive too) or others.
    """
    lists: dict[str, list[Any]] = {"step_s": [], "phase_s_fwd_bwd_step": [], "loss": [], "step_io_read_write_bytes": []}

    def grown() -> dict[str, float]:
        return {"steal_s": getattr(psutil.cpu_times(), "steal", 0.0), **counters()}

    source, device = batches(shape_of(args), args.batch), getattr(engine, "device", torch.device("cpu"))
    for _ in range(args.steps):
        io, before, start = io_nbytes(), grown(), time.perf_counter()
        phases, total = [0.0, 0.0, 0.0], 0.0
        for _ in range(args.gas):
            ids, targets = (t.to(device) for t in next(source))
            times = [time.perf_counter()]
            loss = engine(ids, targets)
            times.append(time.perf_counter())
            engine.backward(loss)
            times.append(time.perf_counter())
            engine.step()
            times.append(time.perf_counter())
            phases = [sum_ + b - a for sum_, a, b in zip(phases, times, times[1:], strict=False)]
            total += loss.item() / args.gas
            del loss
        lists["step_s"].append(round(time.perf_counter() - start, 4))
        lists["phase_s_fwd_bwd_step"].append([round(p, 4) for p in phases])
        lists["loss"].append(total)
        lists["step_io_read_write_bytes"].append([b - a for a, b in zip(io, io_nbytes(), strict=True)])
        for name, value in grown().items():
            lists.setdefault(f"step_{name}", []).append(value - before[name])
    return lists


def summary(result: Mapping[str, Any]) -> dict[str, float]:
    """Medians over all steps but the first, which ends no step before it: seconds, bytes per parameter and per second, read share."""
    later = slice(1 if len(result["step_s"]) > 1 else 0, None)
    seconds = statistics.median(result["step_s"][later])
    read, written = (statistics.median(io[i] for io in result["step_io_read_write_bytes"][later]) for i in (0, 1))
    moved = read + written
    return {
        "median_step_s": seconds, "bytes_per_param_step": moved / result["params"], "bytes_per_s": moved / seconds,
        "moved_nbytes": moved, "read_share": read / moved if moved else 0.0,
    }  # fmt: skip


def say(args: argparse.Namespace, lib: str, version: str, result: Mapping[str, Any]) -> None:
    """Print the line: what was run, its figures, and their medians."""
    shape = shape_of(args)
    config = {
        name: getattr(args, name) for name in ("batch", "gas", "offload_optimizer", "offload_param", "dtype", "clipping", "checkpoints")
    }
    config |= {"layers": shape.layers, "dim": shape.dim, "heads": shape.heads, "vocab": shape.vocab, "seq": shape.seq}
    found: dict[str, Any] = {"lib": lib, "version": version, "torch": torch.__version__, "tag": args.tag, "config": config}
    found |= {"params": shape.num_params, "bf16_product": bf16_product() if args.dtype == "bf16" else "not used"}
    found |= result
    found |= {"peak_rss": peak_rss(), "rss_end": rss(), "locked_bytes": _status("VmLck")}
    found["disk_read"], found["disk_written"] = io_nbytes()
    print(json.dumps(found | summary(found)), flush=True)
