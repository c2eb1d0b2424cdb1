"""Time and memory over the size of the model, everything on the drive and the least host memory that is accepted.

    python bench/scale.py --nvme-path /mnt/nvme0 --out bench/results                        # 134M to 1.64B
    python bench/scale.py --sizes 7B --state-dtype int8 --steps 2 --nvme-path /mnt/nvme0    # about 42 GB on the drive, gone after
    python bench/scale.py --tiny                                                            # seconds, for the tests

Room on the drive is checked first: each size says what it needs, and is left out with a word where there is less.
"""

from __future__ import annotations

import shutil
import sys
from typing import Any

from bench._models import PRESETS, Shape
from bench._run import TINY, Cells, front_parser, save, train
from bench._steps import shape_of
from bench._train import worker_parser

SIZES: dict[str, Shape] = {
    "134M": PRESETS["134M"],
    "355M": Shape(24, 1024, 16, 32000, 128),
    "0.77B": Shape(36, 1280, 20, 32000, 128),
    "1.64B": PRESETS["1.64B"],
    "7B": PRESETS["7B"],
}
ROOM_NBYTES = {"fp32": 14.5, "bf16": 10.5, "int8": 8.5}
"""Per parameter: weights, state, and a 16-bit gradient that is spilled."""
KEPT_FREE_NBYTES = 8 << 30

Result = dict[str, Any]


def room_lacks(path: str, shape: Shape, state_dtype: str) -> str | None:
    """Why a size is left out."""
    need, free = ROOM_NBYTES[state_dtype] * shape.num_params, shutil.disk_usage(path).free
    short = need > free - min(KEPT_FREE_NBYTES, free // 2)
    return f"needs {need / 1e9:.1f} GB of {free / 1e9:.1f} GB that are free" if short else None


def table(results: dict[str, Result]) -> Cells:
    rows: Cells = [
        ("", "parameters", "s/step", "ns per parameter", "bytes per parameter", "GB/s", "host_memory", "peak RSS", "initialise", "on drive")
    ]
    for name, r in results.items():
        rows.append(
            (
                name, f"{r['params'] / 1e6:.1f}M", f"{r['median_step_s']:.2f}", f"{1e9 * r['median_step_s'] / r['params']:.2f}",
                f"{r['bytes_per_param_step']:.1f}", f"{r['bytes_per_s'] / 1e9:.2f}", f"{r['host_memory'] / 2**20:.0f} MiB",
                f"{r['peak_rss'] / 2**20:.0f} MiB", f"{r['zero_init_s'] + r['initialize_s']:.1f} s", f"{r['swap_bytes'] / 1e9:.2f} GB",
            )
        )  # fmt: skip
    return rows


def draw(figure: Any, results: dict[str, Result]) -> None:
    time_axes, memory_axes = figure.subplots(1, 2)
    billions = [r["params"] / 1e9 for r in results.values()]
    time_axes.plot(billions, [1e9 * r["median_step_s"] / r["params"] for r in results.values()], marker="o")
    time_axes.set_ylabel("nanoseconds per parameter and step")
    memory_axes.plot(billions, [r["peak_rss"] / 2**30 for r in results.values()], marker="o", label="peak RSS")
    memory_axes.plot(billions, [r["swap_bytes"] / 2**30 for r in results.values()], marker="s", linestyle="--", label="on the drive")
    memory_axes.set_ylabel("GiB")
    memory_axes.set_yscale("log")
    memory_axes.legend(fontsize=8)
    for axes in (time_axes, memory_axes):
        axes.set_xlabel("parameters, 1e9")
        axes.grid(alpha=0.3)
    time_axes.set_ylim(bottom=0)


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["134M", "355M", "0.77B", "1.64B"])
    args, options = parser.parse_known_args(argv)
    sizes: dict[str, list[str]] = {}
    for name in args.sizes:
        shape = SIZES[name]
        sizes[name] = [f"--{field}={getattr(shape, field)}" for field in ("layers", "dim", "heads", "vocab", "seq")]
    if args.tiny:
        sizes = {"two": list(TINY), "four": [*TINY, "--layers=4"]}
    options = ["--host-memory=min", f"--nvme-path={args.nvme_path}", *options]
    results: dict[str, Result] = {}
    for name, flags in sizes.items():
        parsed = worker_parser().parse_args([*flags, *options])
        if (why := room_lacks(args.nvme_path, shape_of(parsed), parsed.state_dtype or "fp32")) is not None:
            print(f"{name} left out: {why}")
            continue
        results[name] = train([*flags, *options])
        print(f"{name}: {results[name]['median_step_s']:.2f} s", file=sys.stderr)
    if not results:
        return 1
    save("scale", args, argv, {"Everything on the drive": table(results)}, results, lambda figure: draw(figure, results))
    print(f"{len(results)} sizes trained")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
