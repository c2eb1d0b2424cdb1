"""An accelerator: all nine pairs of offload give the same losses, `device_memory` is kept, and copies run beside compute.

    python bench/gpu.py --nvme-path /mnt/nvme0 --out bench/results      # 134M parameters, below 8 minutes on one GPU
    python bench/gpu.py --tiny                                          # seconds, for the tests

Where there is no GPU the simulated accelerator is used (`--device simulated` asks for it): its copies land as late as the events allow and
undefined memory reads NaN, so equal losses say that no wait is missing; its times say nothing. *On device* is the most that the store held
there at the ends of the blocks' forward passes. The overlap is the manager's, with records at home in host memory: uploads and downloads
alone, products alone, then both; on the simulated accelerator, how many copies were still queued when the host had gone on to compute.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from typing import Any

import torch

import swapio
from bench._models import GPT
from bench._run import TINY, Cells, front_parser, save, settle
from bench._steps import add_flags, batches, shape_of
from swapio.memory import SimulatedDevice, get_device
from swapio.spec import parse_nbytes

PLACES = ("none", "cpu", "nvme")
Result = dict[str, Any]


def train(args: argparse.Namespace, param: str, optimizer: str, device_memory: int | None) -> Result:
    """One pair, with so much device memory."""

    def place(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": args.nvme_path} if device == "nvme" else {})

    config = {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_clipping": args.clipping,
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": place(param), "offload_optimizer": place(optimizer)},
        "swapio": {"device": args.device} | ({"device_memory": device_memory} if device_memory is not None else {}),
    }
    torch.manual_seed(0)
    model = GPT(shape_of(args))
    most, losses, seconds = 0, [], []
    with swapio.initialize(model=model, config=config)[0] as engine:

        def look(*_: Any) -> None:
            nonlocal most
            most = max(most, engine.stats()["bytes_on_device"])

        for block in model.blocks:
            block.register_forward_hook(look)
        source = batches(shape_of(args), args.batch)
        for _ in range(args.steps):
            start = time.perf_counter()
            ids, targets = (t.to(engine.device) for t in next(source))
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - start)
        stats = engine.stats()
        engine.abandon()
    return {
        "param": param, "optimizer": optimizer, "device_memory": device_memory, "losses": losses,
        "median_step_s": statistics.median(seconds[1:]), "on_device_nbytes": most,
        "uploads": stats["uploads"], "downloads": stats["downloads"], "stall_s": stats["stall_seconds"],
    }  # fmt: skip


def pairs(args: argparse.Namespace) -> list[Result]:
    """All nine, then weights from a drive with half the device memory that they would fill."""
    results = [train(args, param, optimizer, None) for param, optimizer in itertools.product(PLACES, PLACES)]
    shape = shape_of(args)
    width = 2 if args.dtype == "bf16" else 4
    largest = width * max(shape.vocab * shape.dim, 12 * shape.dim**2 + 13 * shape.dim)
    limit = max(width * shape.num_params // 2, 3 * largest)
    return [*results, train(args, "nvme", "nvme", parse_nbytes(limit, key="device_memory"))]


# --- copies beside compute ---


def overlap(args: argparse.Namespace) -> Result:
    """Bytes per second of the copies, and how much of them hid behind products."""
    device = get_device(args.device)
    nbytes, count = args.mib << 20, 8
    keys = [f"record {i}" for i in range(count)]
    matrix = torch.randn(args.width, args.width, device=device.torch_device)
    queued = 0
    with swapio.SwapManager(device=device, device_memory=4 * nbytes, host_memory=(count + 2) * (nbytes + (1 << 16))) as manager:
        for i, key in enumerate(keys):
            manager.put(key, torch.full((nbytes,), i, dtype=torch.uint8), home="cpu").wait()

        def run(copies: bool, products: int) -> float:
            nonlocal queued
            device.synchronize()
            start = time.perf_counter()
            for i, key in enumerate(keys):
                if copies:
                    manager.prefetch(keys[i + 1 : i + 3])
                    with manager.acquire(key) as lease:
                        lease.tensor.add_(1)
                        lease.mark_dirty()
                        if isinstance(device, SimulatedDevice):
                            queued = max(queued, device.num_pending)
                for _ in range(products):
                    torch.mm(matrix, matrix)
            if copies:
                manager.evict(keys).wait()
            device.synchronize()
            if device.torch_device.type == "cuda":
                torch.cuda.synchronize(device.torch_device)
            return time.perf_counter() - start

        run(True, 1)
        alone = run(True, 0)
        products = max(round(alone / max(run(False, 1), 1e-6)), 1)
        compute, both = run(False, products), run(True, products)
        good = True
        for i, key in enumerate(keys):
            with manager.acquire(key, on="host") as lease:
                good &= bool((lease.tensor == i + 3).all())
    hidden = (alone + compute - both) / min(alone, compute)
    return {
        "copies_s": alone, "compute_s": compute, "both_s": both, "hidden": hidden, "queued": queued, "equal": good,
        "bytes_per_s": 2 * count * nbytes / alone,
    }  # fmt: skip


def table(results: list[Result]) -> Cells:
    rows: Cells = [("offload_param", "offload_optimizer", "device_memory", "on device", "s/step", "uploads", "downloads", "losses")]
    for r in results:
        limit = "-" if r["device_memory"] is None else f"{r['device_memory'] / 2**20:.1f} MiB"
        equal = "equal" if r["losses"] == results[0]["losses"] else "DIFFER"
        held = f"{r['on_device_nbytes'] / 2**20:.1f} MiB"
        counts = (str(r["uploads"]), str(r["downloads"]))
        rows.append((r["param"], r["optimizer"], limit, held, f"{r['median_step_s']:.3f}", *counts, equal))
    return rows


def copies(found: Result, device: str) -> Cells:
    rows: Cells = [("copies alone", "products alone", "both", "hidden", "copies")]
    seconds = (f"{found[k]:.4f} s" for k in ("copies_s", "compute_s", "both_s"))
    hidden = "-" if device == "simulated" else f"{found['hidden']:.0%}"
    queued = f", {found['queued']} still queued beside compute" if device == "simulated" else ""
    return [*rows, (*seconds, hidden, f"{found['bytes_per_s'] / 1e9:.1f} GB/s{queued}")]


def draw(figure: Any, results: list[Result]) -> None:
    axes = figure.subplots()
    names = [f"{r['param']}, {r['optimizer']}" + (", limit" if r["device_memory"] else "") for r in results]
    axes.barh(names[::-1], [r["median_step_s"] for r in results[::-1]])
    axes.set_xlabel("seconds per step, by offload_param, offload_optimizer")


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    workers = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(workers)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "simulated")
    parser.add_argument("--mib", type=int, default=64, help="of a record, for the overlap")
    parser.add_argument("--width", type=int, default=4096, help="of the matrices, for the overlap")
    args, options = parser.parse_known_args(argv)
    if args.tiny:
        options, args.mib, args.width = [*TINY, *options], 1, 64
    flags = workers.parse_args([*options, f"--nvme-path={args.nvme_path}"], args)
    torch.set_num_threads(flags.threads)
    results, copied = pairs(flags), overlap(flags)
    sections = {f"Offload on the device {args.device}": table(results), "Copies beside compute": copies(copied, args.device)}
    save("gpu", args, argv, sections, {"pairs": results, "overlap": copied}, lambda figure: draw(figure, results))
    equal = all(r["losses"] == results[0]["losses"] for r in results) and copied["equal"]
    kept = all(r["on_device_nbytes"] <= r["device_memory"] for r in results if r["device_memory"] is not None)
    print("nine pairs, losses equal" if equal else "losses DIFFER", "device_memory kept" if kept else "device_memory EXCEEDED", sep=", ")
    return 0 if equal and kept else 1


if __name__ == "__main__":
    settle()
    raise SystemExit(main(sys.argv[1:]))
