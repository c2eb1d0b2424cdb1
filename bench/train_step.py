"""One training run: seconds, bytes and memory of each step, and what the drive gives at the step's own mix of reads and writes.

    python bench/train_step.py --nvme-path /mnt/nvme0 --host-memory 1GiB --fio              # 134M parameters, all on the drive
    python bench/train_step.py --preset 1.64B --clipping 0 --optimizer-step in_backward --host-memory min --nvme-path /mnt/nvme0 --fio
    python bench/train_step.py --tiny                                                       # seconds, for the tests

Prints one line of JSON, with the fields of DeepSpeed's side (`_deepspeed.py`): `step_s`, `phase_s_fwd_bwd_step`, `loss`,
`step_io_read_write_bytes` (by /proc/self/io), `peak_rss`, `initialize_s`, and the medians of all steps but the first. The run is a process
of its own, with the settings of malloc that `--malloc` names (`_run.MALLOC`) and OpenMP threads that do not spin (`_run.environment`).
`--fio` measures the bandwidth before and after, on a file as large as the swap file, which it writes: `of_bandwidth` is bytes moved per
second over the mean of both. It also gives `init`: what construction and `initialize` took, read and wrote, beside the seconds in which as
many bytes are written once, and those in which the same modules are constructed in memory, one after the other. `--forecast` runs
`swapio bench` before and after: `of_forecast` is seconds per step over the mean of what it foretells.
All other flags are the worker's: `python bench/_train.py --help`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch

from bench._models import Block, Linear
from bench._run import MALLOC, TINY, Cells, bandwidth, front_parser, save, train
from bench._steps import shape_of
from bench._train import worker_parser
from swapio.drive import QUICK, STANDARD, STATES, DriveFile, forecast, run_bench
from swapio.drive import TINY as TINY_PLAN
from swapio.io import aligned_buffer

PLANS = {"quick": QUICK, "standard": STANDARD}

STATES_BY_DTYPE = {"fp32": "bf16, fp32 moments", "bf16": "bf16, bf16 moments", "int8": "bf16, 8-bit moments"}
"""How `swapio bench` calls 16-bit weights with moments of a dtype."""


def measure(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """The run, with fio around it."""
    flags = worker_parser().parse_args(options)
    num_params, state = shape_of(flags).num_params, STATES_BY_DTYPE[flags.state_dtype or "fp32"]
    read, written = STATES[state]
    nbytes = args.fio_mib << 20 or written * num_params

    def foretold_s() -> float:
        mix = run_bench(args.nvme_path, plan=TINY_PLAN if args.tiny else PLANS[args.forecast])["best"]["mix_bytes_per_s"]
        return next(f.seconds_per_step for f in forecast(mix, {"this": num_params}) if f.state == state)

    before = bandwidth(args.nvme_path, nbytes=nbytes, read_share=read / (read + written)) if args.fio else None
    forecasts = [foretold_s()] if args.forecast else []
    result = train(options, malloc=args.malloc)
    if forecasts:
        forecasts.append(foretold_s())
        result |= {"forecast_step_s": forecasts, "of_forecast": result["median_step_s"] / statistics.mean(forecasts)}
    if args.fio and result["init_written"]:
        result["init"] = start_up(args.nvme_path, flags, result)
    if before is not None and result["moved_nbytes"]:
        after = bandwidth(args.nvme_path, nbytes=nbytes, read_share=result["read_share"])
        both = [b["best_bytes_per_s"] for b in (before, after) if b is not None]
        result |= {"bandwidth": [before, after], "of_bandwidth": result["bytes_per_s"] / (sum(both) / len(both))}
    return result


def start_up(path: str, flags: argparse.Namespace, result: dict[str, Any]) -> dict[str, float]:
    """Seconds and bytes per parameter of construction and `initialize`, and the seconds of what cannot be saved."""
    content = aligned_buffer(8 << 20, os.urandom(1 << 20))
    with DriveFile(path, backend="direct", nbytes=result["init_written"]) as file:
        start = time.perf_counter()
        file.fill(content)
        write_s = time.perf_counter() - start
    shape = shape_of(flags)
    start = time.perf_counter()
    for _ in range(shape.layers):
        Block(shape)
    torch.nn.Embedding(shape.vocab, shape.dim)
    Linear(shape.dim, shape.vocab, bias=False)
    construct_s = time.perf_counter() - start
    init_s = result["zero_init_s"] + result["initialize_s"]
    return {
        "init_s": init_s, "write_s": write_s, "construct_s": construct_s,
        "of_write": init_s / write_s, "of_construct_and_write": init_s / (construct_s + write_s),
        "read_per_param": result["init_read"] / result["params"], "written_per_param": result["init_written"] / result["params"],
    }  # fmt: skip


def table(result: dict[str, Any]) -> Cells:
    rows: Cells = [("step", "s", "forward", "backward", "step()", "read", "written", "stalled", "stolen CPU", "loss")]
    columns = ("step_s", "phase_s_fwd_bwd_step", "step_io_read_write_bytes", "step_stall_s", "step_steal_s", "loss")
    for i, (seconds, phases, io, stall, steal, loss) in enumerate(zip(*(result[c] for c in columns), strict=True)):
        moved = (f"{n / 1e9:.3f} GB" for n in io)
        rows.append((str(i), f"{seconds:.2f}", *(f"{p:.2f}" for p in phases), *moved, f"{stall:.2f}", f"{steal:.2f} s", f"{loss:.4f}"))
    return rows


def draw(figure: Any, result: dict[str, Any]) -> None:
    axes = figure.subplots()
    bottom = [0.0] * len(result["step_s"])
    for i, name in enumerate(("forward", "backward", "step()")):
        part = [phases[i] for phases in result["phase_s_fwd_bwd_step"]]
        axes.bar(range(len(part)), part, 0.7, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, part, strict=True)]
    if "bandwidth" in result:
        limit = result["median_step_s"] * result["of_bandwidth"]
        axes.axhline(limit, color="tab:red", linestyle="--", label="bytes moved / the drive's bandwidth")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.legend(fontsize=8)


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    parser.add_argument("--malloc", choices=tuple(MALLOC), default="lean")
    parser.add_argument(
        "--fio", action="store_true", help="measure the drive before and after; each writes as much as the swap file, and more"
    )
    parser.add_argument("--forecast", choices=tuple(PLANS), help="how thoroughly; each writes as much as it says")
    parser.add_argument("--fio-mib", type=int, default=0, help="another size of that file")
    args, options = parser.parse_known_args(argv)
    if args.tiny:
        args.fio, args.fio_mib, args.forecast = True, 16, "quick"
        options = [*TINY, "--host-memory=min", *options]
    result = measure(args, [*options, "--nvme-path", args.nvme_path])
    print(json.dumps(result))
    if args.out:
        per_param = f"{result['bytes_per_param_step']:.1f} bytes per parameter and step"
        title = f"{result['params'] / 1e6:.1f}M parameters, peak RSS {result['peak_rss'] / 2**20:.0f} MiB, {per_param}"
        save("train_step", args, argv, {title: table(result)}, result, lambda figure: draw(figure, result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
