"""What activation checkpointing saves and costs: memory against time, with none, with every block, and with a few inputs kept.

    python bench/checkpointing.py --out bench/results                           # 38M parameters, some minutes
    python bench/checkpointing.py --offload nvme --nvme-path /mnt/nvme0         # with weights and optimizer state on a drive
    python bench/checkpointing.py --tiny                                        # seconds, for the tests

Each run is a process of its own and trains the same GPT, its blocks in an `nn.Sequential`, through an engine. *Kept* are the bytes that
autograd holds between forward and backward: every storage that is given to saved-tensor hooks counts once, weights do not; it is taken in a
step that is not timed, as the first is not. *Peak RSS* is the most that the process ever took, and *above* how much that is over its RSS
after imports and a step of a one-layer model: with weights, gradients and optimizer state in it, the same in all runs, and with what
backward computes again. The exit status is 1 unless all losses are equal digit for digit and each way keeps less than the one before.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench._run import Cells, save

COLUMNS = ("checkpoints", "inputs kept", "kept", "peak RSS", "above", "s/step", "losses")
MIB = 2**20


def train(args: argparse.Namespace, ways: dict[str, int], way: str) -> dict[str, Any]:
    """One run, in this process."""
    import psutil
    import torch

    import swapio
    from swapio.cli._data import Corpus
    from swapio.cli.gpt import GPT, GPTConfig

    corpus = Corpus()
    place = {"device": args.offload} | ({"nvme_path": args.nvme_path} if args.offload == "nvme" else {})
    config = {
        "train_batch_size": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }

    def run(layers: int, inputs: int, steps: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(256, args.seq, layers, args.dim, args.dim // 64))
        model.blocks = torch.nn.ModuleList([torch.nn.Sequential(*model.blocks)])
        if inputs:
            swapio.checkpointing.checkpoint_blocks(model, number_checkpoints=inputs)
        storages: dict[int, int] = {}

        def count(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # keeps the storage, so that no other gets its address

        losses, seconds = [], []
        with swapio.initialize(model=model, config=config)[0] as engine:
            for step in range(steps + 2):
                start = time.perf_counter()
                x, y = corpus.batch(step, seed=0, batch=args.batch, seq=args.seq)
                if step > steps:
                    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
                        loss = engine(x, y)
                else:
                    loss = engine(x, y)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                seconds.append(time.perf_counter() - start)
                del loss
            engine.abandon()
        return {
            "losses": losses, "seconds_per_step": sum(seconds[1:-1]) / max(steps, 1), "kept_nbytes": sum(storages.values()),
            "numel": sum(p.numel() for p in model.parameters()),
        }  # fmt: skip

    run(1, 0, 0)
    gc.collect()
    baseline = psutil.Process().memory_info().rss
    result = run(args.layers, ways[way], args.steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"checkpoints": way, "inputs_kept": ways[way]} | result | {"baseline_rss": baseline, "peak_rss": peak}


def child(argv: list[str], way: str) -> dict[str, Any]:
    command = [sys.executable, __file__, *argv, "--one", way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(results: list[dict[str, Any]]) -> Cells:
    return [
        COLUMNS,
        *(
            (
                r["checkpoints"], str(r["inputs_kept"] or "-"), f"{r['kept_nbytes'] / MIB:.1f} MiB", f"{r['peak_rss'] / MIB:.0f} MiB",
                f"{(r['peak_rss'] - r['baseline_rss']) / MIB:.0f} MiB", f"{r['seconds_per_step']:.2f}",
                "equal" if r["losses"] == results[0]["losses"] else "DIFFER",
            )
            for r in results
        ),
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("dim", 512), ("seq", 512), ("batch", 4), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="none")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.dim, args.seq, args.batch, args.steps = 4, 64, 64, 2, 2
    few = math.isqrt(args.layers)
    ways = {"none": 0, "every block": args.layers, "segments": few}
    if args.one:
        print(json.dumps(train(args, ways, args.one)))
        return 0
    results = [child(argv, way) for way in ways]
    title = (
        f"{results[0]['numel'] / 1e6:.1f}M parameters, {args.layers} blocks, batch {args.batch} x {args.seq} tokens, offload {args.offload}"
    )
    save("checkpointing", args, argv, {title: table(results)}, results)
    equal = all(r["losses"] == results[0]["losses"] for r in results)
    less = all(b["kept_nbytes"] < a["kept_nbytes"] for a, b in itertools.pairwise(results))
    print("losses equal" if equal else "losses DIFFER", "and each keeps less" if less else "but one does NOT keep less", sep=", ")
    return 0 if equal and less else 1


if __name__ == "__main__":
    raise SystemExit(main())
