"""swapio beside DeepSpeed: the same model, clipping and batches, in turns in one run.

    python bench/versus_deepspeed.py --python ds/bin/python --preset 134M --nvme-path /mnt/nvme0 --out bench/results
    python bench/versus_deepspeed.py --python ds/bin/python --preset 1.64B --cases fp32@1.25GiB int8@1.25GiB fp32@6GiB bf16@6GiB --rounds 2
    python bench/versus_deepspeed.py --tiny                                 # seconds, for the tests; swapio alone without --python

`--python` is an environment with DeepSpeed (`_deepspeed.py` says how it is made). A *case* is swapio with a dtype of the optimizer's state
at a budget of host memory, `fp32@1GiB`; `default@...` leaves the dtype to swapio. Each round runs DeepSpeed and then all cases, each in a
process of its own that is gone, with its files, before the next; a ratio is DeepSpeed's seconds per step over swapio's in the same round.
DeepSpeed runs with the best settings found for each size, swapio with `--malloc lean`, both with as many threads. A case whose peak RSS is
above DeepSpeed's says so.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from bench._run import MALLOC, TINY, Cells, front_parser, save, spread, train, work

AIO = '--aio={"block_size": 8388608, "queue_depth": 32, "intra_op_parallelism": 2}'
DEEPSPEED: dict[str, list[str]] = {
    "134M": ["--sub-group-size=1.5e7", '--cfg={"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 30000000}', AIO],
    "1.64B": ["--sub-group-size=3e7", '--cfg={"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 100000000}', AIO],
}
"""Best of what was tried; larger blocks make it faster, and leave tensors below 8 MiB in memory."""
CASES = {"134M": ["default@min", "default@2GiB"], "1.64B": ["default@1.25GiB", "default@8GiB"]}

Result = dict[str, Any]


def run_case(case: str, options: list[str]) -> Result:
    dtype, _, budget = case.partition("@")
    own = [f"--host-memory={budget}"] + ([f"--state-dtype={dtype}"] if dtype != "default" else [])
    return train([*options, *own])


def rounds(args: argparse.Namespace, cases: list[str], options: list[str]) -> dict[str, list[Result]]:
    """Results by name, one per round."""
    found: dict[str, list[Result]] = {name: [] for name in (["deepspeed"] if args.python else []) + cases}
    for number in range(args.rounds):
        for name, results in found.items():
            if name == "deepspeed":
                result = work("_deepspeed.py", [*DEEPSPEED[args.preset], *options], malloc=args.deepspeed_malloc, python=args.python)
            else:
                result = run_case(name, options)
            results.append(result)
            print(f"round {number + 1}, {name}: {result['median_step_s']:.2f} s, {result['peak_rss'] / 2**20:.0f} MiB", file=sys.stderr)
    return found


def table(found: dict[str, list[Result]]) -> Cells:
    rows: Cells = [
        ("", "s/step", "of all steps", "DeepSpeed / this", "peak RSS", "bytes per parameter", "moved", "initialise", "first loss")
    ]
    theirs = found.get("deepspeed", [])
    most = max((r["peak_rss"] for r in theirs), default=None)
    for name, results in found.items():
        low, _, high = spread(s for r in results for s in r["step_s"][1:])
        ratios = [t["median_step_s"] / r["median_step_s"] for t, r in zip(theirs, results, strict=False)]
        peak = max(r["peak_rss"] for r in results)
        above = " (more than DeepSpeed)" if most is not None and peak > most else ""
        middle = "{1:.2f} ({0:.2f} - {2:.2f})".format(*spread(ratios)) if ratios else "-"
        first = results[0]
        start = spread(r["zero_init_s"] + r["initialize_s"] for r in results)[1]
        rows.append(
            (
                name, f"{spread(r['median_step_s'] for r in results)[1]:.2f}", f"{low:.2f} - {high:.2f}", middle,
                f"{peak / 2**20:.0f} MiB{above}", f"{first['bytes_per_param_step']:.1f}", f"{first['moved_nbytes'] / 1e9:.2f} GB",
                f"{start:.1f} s", f"{first['loss'][0]:.4f}",
            )
        )  # fmt: skip
    return rows


def draw(figure: Any, found: dict[str, list[Result]]) -> None:
    time_axes, memory_axes = figure.subplots(1, 2)
    for axes, what, values in (
        (time_axes, "seconds per step", {n: spread(s for r in rs for s in r["step_s"][1:]) for n, rs in found.items()}),
        (memory_axes, "peak RSS, GiB", {n: spread(r["peak_rss"] / 2**30 for r in rs) for n, rs in found.items()}),
    ):
        middle = [v[1] for v in values.values()]
        ends = [[v[1] - v[0] for v in values.values()], [v[2] - v[1] for v in values.values()]]
        axes.bar(list(values), middle, 0.6, yerr=ends, capsize=4, color=["tab:gray" if n == "deepspeed" else "tab:blue" for n in values])
        axes.set_ylabel(what)
        axes.tick_params(axis="x", labelrotation=30, labelsize=8)
        axes.grid(axis="y", alpha=0.3)


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    parser.add_argument("--python", help="of the environment with DeepSpeed; none: swapio alone")
    parser.add_argument("--preset", choices=tuple(DEEPSPEED), default="134M")
    parser.add_argument("--cases", nargs="+", help='default: "default@min" and as much as DeepSpeed takes')
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--deepspeed-malloc", choices=tuple(MALLOC), default="default")
    args, options = parser.parse_known_args(argv)
    cases = args.cases or CASES[args.preset]
    if args.tiny:
        args.rounds, cases, options = 1, args.cases or ["default@min"], [*TINY, *options]
    options += [f"--preset={args.preset}", f"--nvme-path={args.nvme_path}"]
    found = rounds(args, cases, options)
    shown = next(iter(found.values()))[0]
    title = f"{shown['params'] / 1e6:.1f}M parameters, clipping {shown['config']['clipping']}, {args.rounds} rounds in turns"
    save("versus_deepspeed", args, argv, {title: table(found)}, found, lambda figure: draw(figure, found))
    firsts = [r["loss"][0] for results in found.values() for r in results]
    near = max(firsts) - min(firsts) < 0.2  # DeepSpeed draws the weights in 16 bits, so they are others
    print("first losses near" if near else f"first losses are APART: {firsts}")
    return 0 if near else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
