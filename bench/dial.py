"""Step time over host memory, from the least that is accepted to everything, beside a plain PyTorch loop.

    python bench/dial.py --nvme-path /mnt/nvme0 --out bench/results         # 134M parameters, seven budgets, some minutes; writes with fio
    python bench/dial.py --tiny                                             # seconds, for the tests

Each round runs the plain loop (`_plain.py`) and every budget, in turns and with the same settings of malloc (`--malloc`, default `keep`:
memory that went back to the system would be faulted in again each step, on both sides). The *model* is `max(compute, bytes / bandwidth)`:
*compute* is the step with everything in memory, *bytes* what the step at that budget moved, *bandwidth* fio's best at that ratio of reads
to writes, before and after. *This machine* is the same where compute and drive share the cores: while the bytes move, at the bandwidth that
fio reaches beside products of matrices, compute has the speed that those have beside fio (`_run.bandwidth`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

from bench._run import MALLOC, TINY, Cells, bandwidth, front_parser, save, spread, train, work
from bench._steps import shape_of
from bench._train import worker_parser

FRACTIONS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8)
"""Of the way from the least to everything, which comes last."""
EVERYTHING_NBYTES = 16
"""Per parameter: weight, fp32 master, two moments and a 16-bit gradient."""

Result = dict[str, Any]


def measure(args: argparse.Namespace, options: list[str]) -> Result:
    """By budget, one result per round; `plain` beside, and what the drive gave before and after."""
    shape = shape_of(worker_parser().parse_args(options))
    plain: list[Result] = []
    found: dict[int, list[Result]] = {}
    nbytes = args.fio_mib << 20 or 12 * shape.num_params
    drive = [bandwidth(args.nvme_path, nbytes=nbytes, read_share=14 / 26)]
    least = train([*options, "--host-memory=min", "--steps=1"], malloc=args.malloc)["host_memory"]
    everything = EVERYTHING_NBYTES * shape.num_params + least
    budgets = [int(least + f * (everything - least)) for f in args.fractions] + [2 * everything]
    for _ in range(args.rounds):
        plain.append(work("_plain.py", options, malloc=args.malloc))
        for budget in budgets:
            result = train([*options, f"--host-memory={budget}"], malloc=args.malloc)
            found.setdefault(budget, []).append(result)
            print(f"{budget / 2**20:.0f} MiB: {result['median_step_s']:.3f} s", file=sys.stderr)
    drive.append(bandwidth(args.nvme_path, nbytes=nbytes, read_share=found[budgets[0]][0]["read_share"] or 14 / 26))
    return {"plain": plain, "budgets": [{"budget": b, "runs": runs} for b, runs in found.items()], "drive": drive}


def points(data: Result) -> list[dict[str, float]]:
    """For each budget: medians, and what the model says."""
    compute = statistics.median(r["median_step_s"] for r in data["budgets"][-1]["runs"])
    drive = [d for d in data["drive"] if d is not None]
    speed = statistics.mean(d["best_bytes_per_s"] for d in drive) if drive else None
    found = []
    for one in data["budgets"]:
        low, seconds, high = spread(s for r in one["runs"] for s in r["step_s"][1:])
        moved = statistics.median(r["moved_nbytes"] for r in one["runs"])
        model = shared = compute
        if speed:
            model = max(compute, moved / speed)
            moving_s = moved / statistics.mean(d["beside"]["bytes_per_s"] for d in drive)
            shared = moving_s + max(compute - statistics.mean(d["beside"]["compute"] for d in drive) * moving_s, 0)
        found.append(
            {
                "budget": one["budget"], "peak_rss": max(r["peak_rss"] for r in one["runs"]), "seconds": seconds, "least_s": low,
                "most_s": high, "moved_nbytes": moved, "bytes_per_param": moved / one["runs"][0]["params"], "model_s": model,
                "shared_s": shared,
                "stall_s": statistics.median(s for r in one["runs"] for s in r["step_stall_s"][1:]),
            }
        )  # fmt: skip
    return found


def table(data: Result) -> Cells:
    rows: Cells = [
        (
            "host_memory", "peak RSS", "s/step", "of all steps", "bytes per parameter", "stalled", "model", "above", "this machine",
            "above", "plain x",
        )
    ]  # fmt: skip
    _, plain, _ = spread(s for r in data["plain"] for s in r["step_s"][1:])
    for p in points(data):
        rows.append(
            (
                f"{p['budget'] / 2**20:.0f} MiB", f"{p['peak_rss'] / 2**20:.0f} MiB", f"{p['seconds']:.3f}",
                f"{p['least_s']:.3f} - {p['most_s']:.3f}",
                f"{p['bytes_per_param']:.1f}", f"{p['stall_s']:.3f} s", f"{p['model_s']:.3f}", f"{p['seconds'] / p['model_s'] - 1:+.0%}",
                f"{p['shared_s']:.3f}", f"{p['seconds'] / p['shared_s'] - 1:+.0%}",
                f"{p['seconds'] / plain:.3f}",
            )
        )  # fmt: skip
    low, plain, high = spread(s for r in data["plain"] for s in r["step_s"][1:])
    peak = max(r["peak_rss"] for r in data["plain"])
    rows.append(("plain PyTorch", f"{peak / 2**20:.0f} MiB", f"{plain:.3f}", f"{low:.3f} - {high:.3f}", "0", "-", "-", "-", "-", "-", "1"))
    return rows


def draw(figure: Any, data: Result) -> None:
    axes = figure.subplots()
    shown = points(data)
    gib = [p["budget"] / 2**30 for p in shown]
    seconds = [p["seconds"] for p in shown]
    ends = [[p["seconds"] - p["least_s"] for p in shown], [p["most_s"] - p["seconds"] for p in shown]]
    axes.errorbar(gib, seconds, yerr=ends, marker="o", capsize=3, label="swapio, median and range")
    axes.plot(gib, [p["model_s"] for p in shown], linestyle="--", color="tab:red", label="max(compute, bytes / bandwidth)")
    axes.plot(gib, [p["shared_s"] for p in shown], linestyle=":", color="tab:orange", label="the same, sharing the cores of this machine")
    _, plain, _ = spread(s for r in data["plain"] for s in r["step_s"][1:])
    axes.axhline(plain, color="tab:gray", linestyle=":", label="plain PyTorch, all in memory")
    axes.set_xlabel("host_memory, GiB (the last: everything)")
    axes.set_ylabel("seconds per step")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fractions", type=float, nargs="+", default=list(FRACTIONS))
    parser.add_argument("--malloc", choices=tuple(MALLOC), default="keep")
    parser.add_argument("--fio-mib", type=int, default=0, help="of the file that fio reads and writes; 0: as large as the swap file")
    args, options = parser.parse_known_args(argv)
    if args.tiny:
        args.rounds, args.fractions, args.fio_mib, options = 1, [0.0], 16, [*TINY, *options]
    options.append(f"--nvme-path={args.nvme_path}")
    data = measure(args, options)
    shape = shape_of(worker_parser().parse_args(options))
    title = f"{shape.num_params / 1e6:.1f}M parameters, {args.rounds} rounds in turns, malloc {args.malloc}"
    save("dial", args, argv, {title: table(data)}, data, lambda figure: draw(figure, data))
    losses = {tuple(r["loss"]) for one in data["budgets"] for r in one["runs"]}
    print("losses equal" if len(losses) == 1 else "losses DIFFER between budgets")
    return 0 if len(losses) == 1 else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
