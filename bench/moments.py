"""Loss curves with the optimizer's state as fp32, as bfloat16 and in 8 bits, on real text; and what a step of each costs.

    python bench/moments.py --nvme-path /mnt/nvme0 --out bench/results      # some minutes
    python bench/moments.py --tiny                                          # seconds, for the tests

A GPT learns the text of `help("topics")`, byte by byte, with AdamW (beta2 = 0.999): the same first weights and batches for each dtype, and
fp32 weights, so that nothing but the state differs. *Train* is the mean loss of the last 50 steps, *test* that of other windows of the same
text. How much two seeds differ says how much a difference between dtypes means. Before that, a few steps with all state on the drive under
the least budget must give the losses of state in memory, to the bit. Times are of the step alone, with bfloat16 weights: the least of some
rounds, as CPU time on one thread, which others on the machine disturb less, and as time on the clock on all threads.

The exit status is 1 if losses on the drive differ, or if the test loss is more than `--margin` above that of fp32 (mean over seeds).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import swapio
from bench._run import Cells, save
from swapio.cli._data import Corpus
from swapio.cli.gpt import GPT, GPTConfig
from swapio.optim import ChunkStepper, StateDtype, StepRange, chunk_layout, from_torch, with_state_dtype

DTYPES: tuple[StateDtype, ...] = ("fp32", "bf16", "int8")
LAST = 50


# --- loss ---


def settings(dtype: str, args: argparse.Namespace, place: str) -> dict[str, Any]:
    where = {"device": place} | ({"nvme_path": args.nvme_path} if place == "nvme" else {})
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": args.lr, "betas": [0.9, 0.999], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": args.lr, "warmup_num_steps": 50, "warmup_type": "linear"}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"offload_param": where, "offload_optimizer": where},
        "swapio": {"device": "cpu", "optimizer_state_dtype": dtype},
    }


def train(dtype: str, seed: int, steps: int, args: argparse.Namespace, *, place: str = "none") -> dict[str, Any]:
    """Losses of a run, and the test loss after it."""
    corpus, config = Corpus(), settings(dtype, args, place)
    torch.manual_seed(seed)
    model = GPT(GPTConfig(corpus.vocab_size, args.seq, args.layers, args.dim, args.dim // 32))
    if place == "nvme":
        try:
            swapio.initialize(model=model, config=config | {"swapio": config["swapio"] | {"host_memory": 4096}})
        except swapio.BudgetError as error:
            config["swapio"]["host_memory"] = error.works_nbytes
    losses = []
    with swapio.initialize(model=model, config=config)[0] as engine:
        for step in range(steps):
            loss = engine(*corpus.batch(step, seed=seed, batch=args.batch, seq=args.seq))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            tests = [engine(*corpus.batch(step, seed=10_000, batch=args.batch, seq=args.seq)).item() for step in range(args.tests)]
        nbytes = engine.memory()["optimizer"]
        engine.abandon()
    return {
        "dtype": dtype, "seed": seed, "losses": losses, "train": sum(losses[-LAST:]) / len(losses[-LAST:]),
        "test": sum(tests) / len(tests), "nbytes": sum(nbytes.values()), "numel": model.config.num_params,
    }  # fmt: skip


def table_of_losses(runs: Sequence[Mapping[str, Any]]) -> Cells:
    rows: Cells = [("state", "seed", "bytes per parameter", "train", "test", "test, less that of fp32")]
    for r in runs:
        fp32 = next(f for f in runs if (f["dtype"], f["seed"]) == ("fp32", r["seed"]))
        each = r["nbytes"] / r["numel"]
        rows.append(
            (r["dtype"], str(r["seed"]), f"{each:.2f}", f"{r['train']:.4f}", f"{r['test']:.4f}", f"{r['test'] - fp32['test']:+.4f}")
        )
    return rows


def check(runs: Sequence[Mapping[str, Any]], margin: float) -> list[str]:
    """What is not as it should be."""
    mean = {d: sum(r["test"] for r in runs if r["dtype"] == d) / sum(r["dtype"] == d for r in runs) for d in DTYPES}
    worse = [d for d in DTYPES if not mean[d] <= mean["fp32"] + margin]
    return [f"{d}: the test loss is {mean[d]:.4f}, that of fp32 {mean['fp32']:.4f}" for d in worse]


# --- time ---


def steppers(numel: int) -> Iterator[tuple[str, float, Callable[[int], None]]]:
    """A way to step `numel` parameters: its name, its bytes per parameter, and the step of a number."""
    weights, grads = torch.empty(numel, dtype=torch.bfloat16), torch.randn(numel).mul_(1e-3).bfloat16()
    plain = torch.randn(numel).mul_(0.02).requires_grad_()
    plain.grad = torch.empty(numel)
    optimizer = torch.optim.AdamW([plain], fused=True)

    def by_pytorch(_: int) -> None:
        if plain.grad is not None:
            plain.grad.copy_(grads)
        optimizer.step()
        weights.copy_(plain.detach())

    yield "PyTorch: fp32 masters and a bfloat16 copy", 12, by_pytorch
    for dtype, split in (("fp32", False), *((d, True) for d in DTYPES)):
        spec = with_state_dtype(from_torch(torch.optim.AdamW([torch.zeros(1)]))[0], dtype, key="dtype")
        layout = chunk_layout(spec, numel, torch.bfloat16)
        layout = layout if split else layout.whole
        views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
        own = torch.empty(numel, dtype=torch.bfloat16)
        views.store_master(plain.detach(), own, start=0)
        stepper = ChunkStepper(spec)
        ranges = lambda number, spec=spec: [StepRange(0, numel, spec.groups[0], number)]  # noqa: E731
        step = lambda number, own=own, views=views, stepper=stepper, ranges=ranges: stepper.step(own, grads, views, ranges(number))  # noqa: E731
        yield f"state {dtype}, {'split' if split else 'whole'} masters", layout.nbytes / numel, step


def table_of_times(numel: int, rounds: int) -> Cells:
    ways = list(steppers(numel))
    head = ["a step of", "bytes per parameter, without the weight"]
    rows = [[name, f"{nbytes:.2f}"] for name, nbytes, _ in ways]
    number, threads = 0, torch.get_num_threads()
    for num_threads, clock in ((1, time.thread_time), (threads, time.perf_counter)):
        torch.set_num_threads(num_threads)
        best = [float("inf")] * len(ways)
        for _ in range(rounds):
            number += 1
            for i, (_, _, step) in enumerate(ways):
                begin = clock()
                step(number)
                best[i] = min(best[i], clock() - begin)
        head += [f"{num_threads} thread{'s' * (num_threads > 1)}: ns per parameter", "times PyTorch"]
        for row, seconds in zip(rows, best, strict=True):
            row += [f"{seconds / numel * 1e9:.2f}", f"{seconds / best[0]:.2f}"]
    return [tuple(head), *map(tuple, rows)]


# --- what is shown ---


def draw(figure: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    """Losses as means of 20 steps, and how far they are from those of fp32."""
    figure.set_size_inches(9, 7)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for r in runs:
        fp32 = next(f for f in runs if (f["dtype"], f["seed"]) == ("fp32", r["seed"]))
        ends = range(20, len(r["losses"]) + 1, 10)
        mine, its = ([sum(run["losses"][e - 20 : e]) / 20 for e in ends] for run in (r, fp32))
        style = {"color": f"C{DTYPES.index(r['dtype'])}", "alpha": 0.8, "linewidth": 1}
        label = r["dtype"] if r["seed"] == runs[0]["seed"] else ""
        upper.plot(list(ends), mine, label=label, **style)
        lower.plot(list(ends), [a - b for a, b in zip(mine, its, strict=True)], **style)
    upper.set_ylabel("loss, mean of 20 steps; a line per seed")
    lower.set_ylabel("less that of fp32, same seed")
    lower.set_xlabel("step")
    upper.legend(title="optimizer's state")
    for axes in (upper, lower):
        axes.grid(alpha=0.3)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 2, "dim": 128, "seq": 64, "batch": 8, "steps": 500, "tests": 50, "few": 20, "rounds": 20, "numel": 1 << 22}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--margin", type=float, default=0.03, help="test loss above that of fp32 that is no error")
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.dim, args.seq, args.batch, args.steps, args.tests, args.few, args.seeds = 2, 32, 16, 2, 20, 2, 4, [0]
        args.rounds, args.numel, args.margin = 1, 1 << 16, 1.0
    times = table_of_times(args.numel, args.rounds)
    torch.set_num_threads(1)  # the model is small
    wrong = []
    for dtype in DTYPES:
        in_memory, on_drive = (train(dtype, 0, args.few, args, place=place)["losses"] for place in ("none", "nvme"))
        if in_memory != on_drive:
            wrong.append(f"{dtype}: losses on the drive DIFFER")
    runs = []
    for seed in args.seeds:
        for dtype in DTYPES:
            runs.append(train(dtype, seed, args.steps, args))
            print(f"{dtype} seed {seed}: train {runs[-1]['train']:.4f}, test {runs[-1]['test']:.4f}", flush=True)
    title = f"Loss after {args.steps} steps of {args.batch} x {args.seq} bytes, {runs[0]['numel'] / 1e6:.2f}M parameters, fp32 weights"
    sections = {title: table_of_losses(runs), f"A step of {args.numel / 1e6:.1f}M parameters with bfloat16 weights": times}
    save("moments", args, argv, sections, {"runs": runs, "times": times}, lambda figure: draw(figure, runs))
    wrong += check(runs, args.margin)
    for line in wrong:
        print(line)
    if not wrong:
        print(f"losses equal in memory and on the drive for {', '.join(DTYPES)}; test losses within {args.margin} of fp32")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
