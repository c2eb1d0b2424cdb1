"""Bytes by kind per rank, for each ZeRO stage, offload and number of ranks: measured, beside the formula; and whether 1.5B parameters fit.

    python bench/memory.py --nvme-path /mnt/nvme0 --out bench/results       # some minutes
    python bench/memory.py --tiny                                           # seconds, for the tests

A rank is a process, over gloo on this machine; all train the same GPT with bf16 weights and AdamW. Bytes are those that `engine.memory()`
counts between backward and step, when a rank holds the most; of the rank that has the most. *Activations* are the storages that autograd
saves in a forward, *in host* is what lies in host memory for the engine (with a drive: under the least budget that works), *peak RSS* is
the most that the process took in the run, with Python and PyTorch.

The formula, bytes per parameter with N ranks, is that of Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (SC 2020): 2 (weights) + 2 (gradients) + 12 (fp32 master, two moments) = 16. On a drive it is 2 + 2 + 10: the weight is the upper
half of its master, and only the lower 2 bytes lie with the moments. Gradients of several ranks are summed in fp32, each rank its slice:

    weights    2, at stage 3: 2/N
    gradients  2, of several ranks at stage 0: 4 + 4/N, 1: 2 + 4/N, 2 and 3: 4/N
    optimizer  12, on a drive 10; from stage 1 on divided by N

The exit status is 1 unless all bytes are the formula's, up to the padding that is allowed for, and all losses of one number of ranks equal.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._run import Cells, save

OFFLOADS = ("none", "cpu", "nvme")
FORMULA_KINDS = ("weights", "gradients", "optimizer")
KINDS = (*FORMULA_KINDS, "activations", "buffers")
FAMILY = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
"""Layers, dim and heads of each."""
VOCAB, SEQ = 50257, 1024
CARDS, CARD_NBYTES = 4, 24 << 30
MIB, GIB = 1 << 20, 1 << 30

Result = dict[str, Any]


def formula(kind: str, stage: int, ranks: int, offload: str) -> float:
    """Bytes per parameter on one rank."""
    if kind == "weights":
        return 2 / (ranks if stage == 3 else 1)
    if kind == "optimizer":
        return (10 if offload == "nvme" else 12) / (ranks if stage else 1)
    return 2.0 if ranks == 1 else (4, 2, 0, 0)[stage] + 4 / ranks


def paper(stage: int, ranks: int) -> float:
    """Bytes per parameter on one rank, of all three kinds, in the paper."""
    partitioned = (0, 12, 14, 16)[stage]
    return 16 - partitioned + partitioned / ranks


# --- one rank ---


def train(case: Mapping[str, Any], rank: int, nvme_path: str) -> Result:
    """A run of one rank."""
    import torch

    import swapio
    from bench._steps import peak_rss, reset_peak
    from swapio.cli.gpt import GPT, GPTConfig

    ranks, shape = case["ranks"], GPTConfig(**case["shape"])
    place = {"device": case["offload"]} | ({"nvme_path": nvme_path} if case["offload"] == "nvme" else {})
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case["batch"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": case["stage"], "offload_param": place, "offload_optimizer": place},
        "swapio": {"device": "cpu"},
    }
    storages: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # keeps the storage, so that no other gets its address

    reset_peak()
    torch.manual_seed(0)
    model = GPT(shape)
    numel = sum(p.numel() for p in model.parameters())
    if case["offload"] == "nvme":  # as little host memory as works
        try:
            swapio.initialize(model=model, config=config | {"swapio": {"device": "cpu", "host_memory": 4096}})
        except swapio.BudgetError as error:
            config["swapio"]["host_memory"] = error.works_nbytes
    losses, seen = [], {}
    with swapio.initialize(model=model, config=config)[0] as engine:
        units = engine.describe_units()
        for step in range(case["steps"]):
            generator = torch.Generator().manual_seed(step * ranks + rank)
            ids = torch.randint(0, shape.vocab_size, (case["batch"], shape.seq_len + 1), generator=generator)
            storages.clear()
            with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
                loss = engine(ids[:, :-1], ids[:, 1:])
            engine.backward(loss)
            seen = engine.memory()
            engine.step()
            losses.append(loss.item())
            del loss
        engine.abandon()
    seen["activations"] = {"host": sum(storages.values())}
    return {
        "losses": losses, "numel": numel, "memory": seen, "peak_rss": peak_rss(), "num_units": len(units),
        "num_params": sum(len(u["params"]) for u in units),
    }  # fmt: skip


def work(args: argparse.Namespace) -> None:
    """All cases of one number of ranks, as one of them; a line of JSON for each."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if args.world > 1:
        dist.init_process_group("gloo", init_method=f"file://{args.meet}", rank=args.rank, world_size=args.world)
    for case in json.loads(args.cases):
        print(json.dumps(train(case, args.rank, args.nvme_path)), flush=True)
    if args.world > 1:
        dist.destroy_process_group()


# --- all ranks ---


def spawn(cases: Sequence[Mapping[str, Any]], nvme_path: str) -> list[Result]:
    """Run cases of one number of ranks; what the largest rank took of each kind, and what all ranks said."""
    world = cases[0]["ranks"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--cases", json.dumps(cases), "--world", str(world), "--nvme-path", nvme_path]
        command += ["--meet", str(Path(folder) / "meet")]
        outputs = [Path(folder) / f"{rank}.out" for rank in range(world)]
        workers = []
        try:
            for rank, path in enumerate(outputs):
                with path.open("wb") as out, path.with_suffix(".err").open("wb") as err:
                    workers.append(subprocess.Popen([*command, "--rank", str(rank)], stdout=out, stderr=err))
            for rank, worker in enumerate(workers):
                if worker.wait(timeout=3600):
                    raise SystemExit(f"rank {rank} of {world} failed:\n{outputs[rank].with_suffix('.err').read_text()}")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(timeout=60)
        told = [[json.loads(line) for line in path.read_text().splitlines()] for path in outputs]
    return [_joined(case, [ranks[i] for ranks in told]) for i, case in enumerate(cases)]


def _joined(case: Mapping[str, Any], ranks: Sequence[Result]) -> Result:
    at_rest = "nvme" if case["offload"] == "nvme" else "host"
    tiers = {
        kind: (at_rest,) if kind in ("weights", "optimizer") else ("host", "nvme") for kind in KINDS
    }  # gradients are in one of the two
    nbytes = {kind: max(sum(r["memory"][kind].get(tier, 0) for tier in places) for r in ranks) for kind, places in tiers.items()}
    host = max(sum(r["memory"][kind].get("host", 0) for kind in r["memory"] if kind != "activations") for r in ranks)
    expected = {kind: ranks[0]["numel"] * formula(kind, case["stage"], case["ranks"], case["offload"]) for kind in FORMULA_KINDS}
    return dict(case) | {
        "numel": ranks[0]["numel"], "losses": [r["losses"] for r in ranks], "nbytes": nbytes, "formula": expected,
        "allowance": {kind: padding(kind, case["stage"], case["ranks"], ranks[0]) for kind in FORMULA_KINDS},
        "in_host": host, "peak_rss": max(r["peak_rss"] for r in ranks),
    }  # fmt: skip


def padding(kind: str, stage: int, ranks: int, told: Result) -> float:
    """Bytes beyond the formula: parameters end at multiples of 64 elements, slices of 2048, and each part at a page's end."""
    elements: int = 64 * told["num_params"] + 2048 * told["num_units"]
    pages: float = 4 * (told["num_units"] + told["numel"] / 2**20)
    return 4096 * pages + elements * (12 if kind == "optimizer" else 8)


def check(results: Sequence[Result]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for r in results:
        name = f"{r['ranks']} ranks, stage {r['stage']}, offload {r['offload']}"
        for kind in FORMULA_KINDS:
            more = r["nbytes"][kind] - r["formula"][kind]
            if not 0 <= more <= r["allowance"][kind]:
                wrong.append(f"{name}: {r['nbytes'][kind]} bytes of {kind}, by the formula {r['formula'][kind]:.0f}")
        first = next(o for o in results if (o["ranks"], o["shape"]) == (r["ranks"], r["shape"]))
        if r["losses"] != first["losses"]:
            wrong.append(f"{name}: losses DIFFER from those of stage {first['stage']}, offload {first['offload']}")
    return wrong


# --- what is shown ---


def stages(results: Sequence[Result]) -> Cells:
    rows: Cells = [
        ("ranks", "stage", "offload", *KINDS, "states", "formula", "paper", "on drive", "in host", "peak RSS"),
    ]
    for r in results:
        states = sum(r["nbytes"][kind] for kind in FORMULA_KINDS)
        drive = sum(r["nbytes"][kind] for kind in ("weights", "optimizer")) if r["offload"] == "nvme" else 0
        figures = [*(r["nbytes"][k] for k in KINDS), states, sum(r["formula"].values()), r["numel"] * paper(r["stage"], r["ranks"]), drive]
        shown = (f"{n / MIB:.2f}" for n in (*figures, r["in_host"]))
        rows.append((str(r["ranks"]), str(r["stage"]), r["offload"], *shown, f"{r['peak_rss'] / MIB:.0f}"))
    return rows


def family(results: Sequence[Result]) -> Cells:
    """Measured at the reduced shapes; and what that is per parameter."""
    rows: Cells = [("shape of", "parameters", "measured", "formula", "bytes per parameter", "formula per parameter", "more")]
    for r in results:
        measured, expected = (sum(r[what][k] for k in FORMULA_KINDS) for what in ("nbytes", "formula"))
        rows.append(
            (
                r["name"], f"{r['numel'] / 1e6:.2f}M", f"{measured / MIB:.2f} MiB", f"{expected / MIB:.2f} MiB",
                f"{measured / r['numel']:.3f}", f"{expected / r['numel']:.3f}", f"{measured / expected - 1:+.1%}",
            )
        )  # fmt: skip
    return rows


def full_numel(name: str) -> int:
    from swapio.cli.gpt import GPTConfig

    layers, dim, heads = FAMILY[name]
    return GPTConfig(VOCAB, SEQ, layers, dim, heads).num_params


def cards(results: Sequence[Result]) -> Cells:
    """The largest of the family on real cards: by the formula for each stage, and with what the last reduced shape took beyond it."""
    numel, dim = full_numel("gpt2-xl"), FAMILY["gpt2-xl"][1]
    moving = 6 * VOCAB * dim  # the largest unit whole in bf16, its gradient, and the one before that is still sent
    last = results[-1]
    more = sum(last["nbytes"][k] for k in FORMULA_KINDS) / sum(last["formula"].values())
    plans = [(f"stage {s}, formula", sum(formula(k, s, CARDS, "none") for k in FORMULA_KINDS), moving if s == 3 else 0) for s in range(4)]
    plans.append((f"stage 3, and {more - 1:.1%} more as measured on the shape of {last['name']}", plans[3][1] * more, moving))
    rows: Cells = [("GiB on each card", "bytes per parameter", "states", "in transit", "together", "left for activations", "fits")]
    for name, each, transit in plans:
        total = each * numel + transit
        left = CARD_NBYTES - total
        rows.append((name, f"{each:.2f}", *(f"{n / GIB:.2f}" for n in (each * numel, transit, total, left)), "yes" if left > 0 else "no"))
    return rows


def draw(figure: Any, results: Sequence[Result]) -> None:
    """Bars by kind for each stage, the formula as a line across; below, where stage 3 rests."""
    worlds = sorted({r["ranks"] for r in results})
    figure.set_size_inches(4 * len(worlds), 7)
    axes = figure.subplots(2, len(worlds), sharey="row", squeeze=False)
    for (upper, lower), world in zip(axes.T, worlds, strict=True):
        mine = [r for r in results if r["ranks"] == world]
        plain = [r for r in mine if r["offload"] == "none"]
        _bars(upper, [f"stage {r['stage']}" for r in plain], {k: [r["nbytes"][k] / MIB for r in plain] for k in KINDS})
        for i, r in enumerate(plain):
            upper.hlines(sum(r["formula"].values()) / MIB, i - 0.45, i + 0.45, color="black", label="" if i else "formula, of states")
        upper.set_title(f"{world} rank{'s' * (world > 1)}", fontsize=10)
        third = [r for r in mine if r["stage"] == 3]
        drive = [sum(r["nbytes"][k] for k in ("weights", "optimizer")) * (r["offload"] == "nvme") / MIB for r in third]
        _bars(
            lower,
            [f"offload {r['offload']}" for r in third],
            {"on the drive": drive, "in host memory": [r["in_host"] / MIB for r in third]},
        )
    axes[0][0].set_ylabel("MiB on the largest rank, by kind")
    axes[1][0].set_ylabel("MiB at stage 3, by place")
    for row in axes:
        row[-1].legend(fontsize=8)


def _bars(axes: Any, labels: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    bottom = [0.0] * len(labels)
    for name, heights in parts.items():
        axes.bar(labels, heights, 0.7, bottom=bottom, label=name)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="y", alpha=0.3)


# --- what is run ---


def plan(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    shape = {"vocab_size": 256, "seq_len": args.seq, "num_layers": args.layers, "dim": args.dim, "num_heads": args.dim // 32}
    base = {"shape": shape, "batch": args.batch, "steps": args.steps}
    for ranks in args.ranks:
        cases = [base | {"ranks": ranks, "stage": s, "offload": o} for s, o in itertools.product(range(4), OFFLOADS)]
        yield cases + (reduced(args) if ranks == max(args.ranks) else [])


def reduced(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The family with vocabulary, length and width divided by a constant."""
    cases = []
    for name in args.family:
        layers, dim, heads = FAMILY[name]
        shape = {"vocab_size": VOCAB // args.scale, "seq_len": SEQ // args.scale, "num_layers": layers}
        shape |= {"dim": dim // args.scale, "num_heads": heads}
        cases.append({"name": name, "shape": shape, "ranks": max(args.ranks), "stage": 3, "offload": "none", "batch": 1, "steps": 1})
    return cases


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("dim", 256), ("seq", 64), ("batch", 2), ("steps", 2), ("scale", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--family", nargs="+", choices=tuple(FAMILY), default=list(FAMILY))
    parser.add_argument("--nvme-path", default=tempfile.gettempdir())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    for name in ("cases", "meet"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("world", "rank"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    argv = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(argv)
    if args.tiny:
        args.layers, args.dim, args.seq, args.ranks, args.scale, args.family = 2, 64, 16, [1, 2], 32, ["gpt2"]
    if args.cases:
        work(args)
        return 0
    runs = [r for cases in plan(args) for r in spawn(cases, args.nvme_path)]
    results = [r for r in runs if "name" not in r]
    case_study = [r for r in runs if "name" in r]
    billions = f"{full_numel('gpt2-xl') / 1e9:.2f}B parameters"
    trained = f"{results[0]['numel'] / 1e6:.2f}M parameters"
    sections = {
        f"MiB on the largest rank between backward and step (states: the first three kinds); {trained}": stages(results),
        f"The GPT-2 family, {1 / args.scale:.3g} as wide, stage 3 on {max(args.ranks)} ranks": family(case_study),
        f"GPT-2 XL ({billions} with a head of its own) on {CARDS} x {CARD_NBYTES / GIB:.0f} GiB": cards(case_study),
    }
    save("memory", args, argv, sections, {"runs": results, "family": case_study}, lambda figure: draw(figure, results))
    wrong = check(runs)
    for line in wrong:
        print(line)
    if not wrong:
        measured = len(FORMULA_KINDS) * len(runs)
        print(f"{measured} of {measured} figures as the formula says, losses equal")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
