"""The same training with everything on a drive, in host memory, and not offloaded: equal losses, and the memory each takes.

    python bench/offload.py --nvme-path /mnt/nvme0 --out bench/results          # 86M parameters, 20 steps each, some minutes
    python bench/offload.py --tiny                                              # seconds, for the tests

Each run is a process of its own. `bound` is what peak RSS may be: baseline + host_memory + activations + 64 MiB, where *baseline* is the
RSS after imports and one step of a one-layer model, and *activations* are the bytes that autograd saves and the logits, measured by hooks.
While a model is constructed in the ordinary way it lies in memory whole, so the larger of the budget and the constructed model counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench._run import Cells, save

SLACK = 64 << 20
MIB = 2**20


def train(args: argparse.Namespace, offload: str, host_memory: str) -> dict[str, Any]:
    """One run, in this process."""
    import psutil
    import torch

    import swapio
    from swapio.cli._data import Corpus
    from swapio.cli.gpt import GPT, GPTConfig

    corpus = Corpus()
    numel = 0

    def make(layers: int) -> torch.nn.Module:
        nonlocal numel
        torch.manual_seed(0)
        model = GPT(GPTConfig(256, args.seq, layers, args.dim, args.dim // 64))
        numel = sum(p.numel() for p in model.parameters())
        return model

    def run(layers: int, where: str, budget: str, steps: int) -> tuple[list[float], dict[str, Any], float, int]:
        section = {"device": where} | ({"nvme_path": args.nvme_path} if where == "nvme" else {})
        config = {
            "train_batch_size": args.batch,
            "bf16": {"enabled": args.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
            "zero_optimization": {"stage": 3, "offload_param": section, "offload_optimizer": section},
            "swapio": {"host_memory": budget},
        }
        engine = swapio.initialize(model=make(layers), config=config)[0]
        losses, seen, saved = [], set(), 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal saved
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                saved += storage.nbytes()
            return tensor.detach()

        start = time.perf_counter()
        for step in range(steps):
            x, y = corpus.batch(step, seed=0, batch=args.batch, seq=args.seq)
            if step == steps - 1 and where == "none":
                with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
                    loss = engine(x, y)
            else:
                loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            del loss
        seconds = (time.perf_counter() - start) / max(steps, 1)
        stats = engine.stats()
        engine.abandon()
        return losses, stats, seconds, saved + args.batch * args.seq * 256 * 4

    run(1, "none", "auto", 1)
    gc.collect()
    baseline = psutil.Process().memory_info().rss
    losses, stats, seconds, activations = run(args.layers, offload, host_memory, args.steps)
    return {
        "offload": offload, "host_memory": host_memory, "losses": losses, "seconds_per_step": seconds, "numel": numel,
        "baseline": baseline, "activations": activations, "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "budget": stats["host_memory_budget"], "host_memory_peak": stats["host_memory_peak"],
        "bytes_read": stats["bytes_read"], "bytes_written": stats["bytes_written"], "stall_seconds": stats["stall_seconds"],
    }  # fmt: skip


def child(argv: list[str], offload: str, host_memory: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *argv, "--one", offload, "--host-memory", host_memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: list[dict[str, Any]]) -> tuple[Cells, bool]:
    """The rows, and whether losses are equal and memory is within its bound."""
    rows: Cells = [
        ("offload", "host_memory", "s/step", "peak RSS", "bound", "read/step", "written/step", "waiting", "losses equal")
    ]  # fmt: skip
    reference, good = results[0], True
    for r in results:
        same = r["losses"] == reference["losses"]
        bound = None
        if r["offload"] == "nvme":
            # the baseline of this very process: it varies by some MiB between processes
            bound = r["baseline"] + max(r["budget"], reference["numel"] * 4) + reference["activations"] + SLACK
        inside = bound is None or r["peak_rss"] <= bound
        good &= same and inside
        steps = len(r["losses"])
        limit = "-" if bound is None else f"{bound / MIB:.0f} MiB" + ("" if inside else " EXCEEDED")
        rows.append(
            (
                r["offload"], r["host_memory"], f"{r['seconds_per_step']:.2f}", f"{r['peak_rss'] / MIB:.0f} MiB", limit,
                f"{r['bytes_read'] / steps / 1e6:.0f} MB", f"{r['bytes_written'] / steps / 1e6:.0f} MB",
                f"{r['stall_seconds'] / (r['seconds_per_step'] * steps):.0%}", "yes" if same else "NO",
            )
        )  # fmt: skip
    return rows, good


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("dim", 768), ("seq", 128), ("batch", 1), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="fp32")
    parser.add_argument("--budgets", nargs="+", default=["768MiB", "384MiB"])
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--host-memory", default="auto", help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.dim, args.seq, args.steps, args.budgets = 2, 64, 32, 3, ["2MiB"]
    if args.one:
        print(json.dumps(train(args, args.one, args.host_memory)))
        return 0
    plan = [("none", "auto"), ("cpu", "auto"), *(("nvme", b) for b in args.budgets)]
    results = [child(argv, *one) for one in plan]
    rows, good = table(results)
    first, *_, last = results[0]["losses"]
    title = (
        f"{results[0]['numel'] / 1e6:.1f}M parameters, {args.steps} steps, loss {first:.4f} to {last:.4f}, "
        f"activations {results[0]['activations'] / MIB:.0f} MiB"
    )
    save("offload", args, argv, {title: rows}, results)
    print("losses equal, memory within its bounds" if good else "losses DIFFER or memory is above its bound")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
