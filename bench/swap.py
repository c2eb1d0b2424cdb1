"""The manager alone: how much of the transfers hides behind compute, and how much of the drive's bandwidth they reach.

    python bench/swap.py --nvme-path /mnt/nvme0 --out bench/results     # 32 records of 32 MiB, one or two minutes; writes some GB
    python bench/swap.py --tiny                                         # seconds, for the tests

Each pass acquires every record in turn, changes it and releases it, with the next ones prefetched and the last ones written back beside
it, under a budget of a few records; it ends when all is written. *alone* computes nothing, *compute* computes beside no record, then both
together, for compute that takes 0.5, 1 and 2 times as long as the transfers. *hidden* is the part of the shorter of the two that cost no
time. fio runs on a file of the same size at the same mix, half reads. At the end every record must hold what all passes wrote.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

import swapio
from bench._run import Cells, bandwidth, front_parser, save, settle

RATIOS = (0.5, 1.0, 2.0)


class Work:
    """Compute of a known length, on a matrix that stays in the cache."""

    def __init__(self) -> None:
        self._a = torch.randn(192, 192)
        self._out = torch.empty(192, 192)
        self._time(200)  # threads start, and the library chooses
        self._product_s = self._time(1000) / 1000

    def _time(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            torch.mm(self._a, self._a, out=self._out)
        return time.perf_counter() - start

    def run(self, seconds: float) -> None:
        """As many products as take so long when nothing else runs."""
        self._time(round(seconds / self._product_s))


def one_pass(manager: swapio.SwapManager, keys: list[str], ahead: int, work: Work, seconds: float) -> float:
    """Change every record, with so much compute at each; seconds until all is written."""
    start = time.perf_counter()
    for i, key in enumerate(keys):
        manager.prefetch(keys[i + 1 : i + 1 + ahead])
        with manager.acquire(key) as lease:
            work.run(seconds)
            lease.tensor[::1024].add_(1)  # a value on each page
            lease.mark_dirty()
    manager.flush().wait()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> dict[str, Any]:
    numel = args.record_kib << 8
    keys = [f"record {i}" for i in range(args.records)]
    moved = 2 * args.records * numel * 4
    runs: list[dict[str, Any]] = []
    work = Work()
    fio = [bandwidth(args.nvme_path, nbytes=moved // 2, read_share=0.5)]
    with swapio.SwapManager(
        [args.nvme_path], host_memory=(args.ahead + 3) * (numel * 4 + (1 << 16)), backend=args.backend, queue_depth=args.queue_depth
    ) as manager:
        for i, key in enumerate(keys):
            manager.put(key, torch.full((numel,), float(i)))
        manager.flush().wait()
        passes = 1
        one_pass(manager, keys, args.ahead, work, 0.0)
        for _ in range(args.rounds):
            alone = one_pass(manager, keys, args.ahead, work, 0.0)
            passes += 1
            for ratio in RATIOS:
                each = ratio * alone / args.records
                start = time.perf_counter()
                for _ in keys:
                    work.run(each)
                compute = time.perf_counter() - start
                both = one_pass(manager, keys, args.ahead, work, each)
                passes += 1
                hidden = (alone + compute - both) / min(alone, compute)
                runs.append({"ratio": ratio, "alone_s": alone, "compute_s": compute, "both_s": both, "hidden": hidden})
        equal = True
        for i, key in enumerate(keys):
            with manager.acquire(key) as lease:
                equal &= bool((lease.tensor[::1024] == i + passes).all()) and float(lease.tensor[1]) == i
        stats = manager.stats()
    fio.append(bandwidth(args.nvme_path, nbytes=moved // 2, read_share=0.5))
    return {"moved_nbytes": moved, "runs": runs, "fio": fio, "equal": equal, "stats": stats}


def table(data: dict[str, Any]) -> Cells:
    rows: Cells = [("compute / transfers", "transfers alone", "compute alone", "both", "both / longer", "hidden")]
    for ratio in RATIOS:
        mine = [r for r in data["runs"] if r["ratio"] == ratio]
        alone, compute, both, hidden = (statistics.median(r[k] for r in mine) for k in ("alone_s", "compute_s", "both_s", "hidden"))
        longer = statistics.median(r["both_s"] / max(r["alone_s"], r["compute_s"]) for r in mine)
        rows.append((f"{ratio}", f"{alone:.3f} s", f"{compute:.3f} s", f"{both:.3f} s", f"{longer:.2f}", f"{hidden:.0%}"))
    return rows


def speeds(data: dict[str, Any]) -> Cells:
    ours = [data["moved_nbytes"] / r["alone_s"] for r in data["runs"]]
    rows: Cells = [("", "GB/s", "of fio's best")]
    fio = statistics.mean(f["best_bytes_per_s"] for f in data["fio"]) if None not in data["fio"] else None
    middle = statistics.median(ours)
    rows.append(("the manager, nothing computed", f"{middle / 1e9:.2f}", f"{middle / fio:.0%}" if fio else "-"))
    if fio:
        rows.append(("fio, best of its settings, before and after", f"{fio / 1e9:.2f}", "100%"))
        beside = [f["beside"] for f in data["fio"]]
        there = statistics.mean(b["bytes_per_s"] for b in beside)
        speed = statistics.mean(b["compute"] for b in beside)
        rows.append(
            (f"fio beside products on all cores, which have {speed:.0%} of their speed then", f"{there / 1e9:.2f}", f"{there / fio:.0%}")
        )
    return rows


def draw(figure: Any, data: dict[str, Any]) -> None:
    axes = figure.subplots()
    for offset, key, label in ((-0.25, "alone_s", "transfers alone"), (0.0, "compute_s", "compute alone"), (0.25, "both_s", "both")):
        middle = [statistics.median(r[key] for r in data["runs"] if r["ratio"] == ratio) for ratio in RATIOS]
        axes.bar([i + offset for i in range(len(RATIOS))], middle, 0.22, label=label)
    axes.set_xticks(range(len(RATIOS)), [f"compute {ratio} x transfers" for ratio in RATIOS])
    axes.set_ylabel("seconds of a pass")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    for name, value in (("records", 32), ("record-kib", 32 << 10), ("ahead", 3), ("rounds", 3), ("queue-depth", 4), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args(argv)
    if args.tiny:
        args.records, args.record_kib, args.rounds = 16, 512, 1
    torch.set_num_threads(args.threads)
    data = measure(args)
    title = f"{args.records} records of {args.record_kib / 1024:.3g} MiB, {args.ahead} prefetched, backend {data['stats']['backend']}"
    save("swap", args, argv, {title: table(data), "Bandwidth, half reads": speeds(data)}, data, lambda figure: draw(figure, data))
    print("contents equal" if data["equal"] else "contents DIFFER")
    return 0 if data["equal"] else 1


if __name__ == "__main__":
    settle()
    raise SystemExit(main(sys.argv[1:]))
