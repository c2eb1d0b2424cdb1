"""The cost of the control path: of a hit, of a miss, of the thread that decides, and of an engine with nothing to move.

    python bench/hop.py --nvme-path /mnt/nvme0 --out bench/results      # about a minute
    python bench/hop.py --tiny                                          # seconds, for the tests

A *hit* is acquiring and releasing a record that is in memory: it must not reach the manager's thread. A *hop* is a miss of a 4 KiB record
that rests in memory (no drive, next to no copy): from `acquire` to the lease, with the main thread idle; and from `prefetch` to its end
while the main thread runs Python without a pause, so that the manager's thread has to wait for the interpreter's lock. The *control path*
of a step is what the manager's thread computes, and what the step waited, while each block of a model that rests on the drive runs Python
without a pause for longer than its transfers take. The small Llama trains in turns with a plain loop (`_plain.py`), everything in memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import swapio
from bench._plain import PlainLoop
from bench._run import TINY, Cells, front_parser, save, settle, train
from bench._train import manager_cpu_s

SMALL_NUMEL = 1024
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def quantiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {"p50_us": 1e6 * statistics.median(ordered), "p99_us": 1e6 * ordered[int(0.99 * (len(ordered) - 1))]}


# --- one record ---


def hit(rounds: int) -> dict[str, float]:
    """Microseconds, and what the manager's thread computed in them."""
    with swapio.SwapManager(backend="memory", host_memory="64MiB") as manager:
        manager.put("a", torch.zeros(SMALL_NUMEL)).wait()
        cpu, misses, start = manager_cpu_s(), manager.stats()["misses"], time.perf_counter()
        for _ in range(rounds):
            with manager.acquire("a"):
                pass
        seconds, cpu = time.perf_counter() - start, manager_cpu_s() - cpu
        return {"us": 1e6 * seconds / rounds, "manager_us": 1e6 * cpu / rounds, "misses": manager.stats()["misses"] - misses}


def hop_idle(rounds: int) -> dict[str, float]:
    found = []
    with swapio.SwapManager(backend="memory", host_memory="64MiB") as manager:
        manager.put("a", torch.zeros(SMALL_NUMEL)).wait()
        for _ in range(rounds):
            manager.evict(["a"]).wait()
            start = time.perf_counter()
            with manager.acquire("a"):
                found.append(time.perf_counter() - start)
    return quantiles(found)


def hop_busy(rounds: int) -> dict[str, float]:
    found = []
    with swapio.SwapManager(backend="memory", host_memory="64MiB") as manager:
        manager.put("a", torch.zeros(SMALL_NUMEL)).wait()
        for _ in range(rounds):
            manager.evict(["a"]).wait()
            ended: list[float] = []
            start = time.perf_counter()
            manager.prefetch(["a"]).add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))  # type: ignore[misc]
            while not ended:
                sum(range(50))
            found.append(ended[0] - start)
    return quantiles(found)


def transfers(path: str, nbytes: int, count: int) -> dict[str, float]:
    """Reads and writes of `nbytes` on the drive, the main thread busy in Python: seconds and the manager's CPU seconds of each."""
    keys = [f"record {i}" for i in range(4)]
    with swapio.SwapManager([path], host_memory=6 * (nbytes + (1 << 16))) as manager:
        for key in keys:
            manager.put(key, torch.zeros(nbytes, dtype=torch.uint8))
        manager.flush().wait()
        manager.evict(keys).wait()
        done = 0
        cpu, start = manager_cpu_s(), time.perf_counter()
        while done < count:
            for work in (manager.prefetch, manager.evict):
                transfer = work(keys)
                while not transfer.done():
                    sum(range(50))
                done += len(keys)
                if work is manager.prefetch:
                    for key in keys:
                        with manager.acquire(key) as lease:
                            lease.mark_dirty()
        seconds, cpu = time.perf_counter() - start, manager_cpu_s() - cpu
        return {"count": done, "seconds": seconds / done, "manager_cpu_s": cpu / done}


def busy_step(args: argparse.Namespace) -> dict[str, float]:
    """Of a model of 134M parameters in 1/7 of the memory of its state: seconds of a step, and of them the shares of the control path."""
    model = (
        [*TINY, "--slow-compute=0.02", "--host-memory=6MiB"] if args.tiny else ["--seq=16", "--slow-compute=0.25", "--host-memory=256MiB"]
    )
    options = [*model, "--slow-with=python", f"--nvme-path={args.nvme_path}", f"--threads={args.threads}"]
    found = train(options)
    seconds = found["median_step_s"]
    return {
        "step_s": seconds,
        "manager": statistics.median(found["step_manager_cpu_s"][1:]) / seconds,
        "stall": statistics.median(found["step_stall_s"][1:]) / seconds,
    }


# --- a small model that is resident ---


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention and SwiGLU (Touvron et al., 2023)."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(dim, 11 * dim // 4, bias=False) for _ in range(2))
        self.down = nn.Linear(11 * dim // 4, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, dim = x.shape
        y = self.norm1(x)
        q, k, v = (layer(y).view(batch, seq, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., t.shape[-1] // 2 :], t[..., : t.shape[-1] // 2]), -1) * sin for t in (q, k))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, dim))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Token numbers and targets to the mean loss."""

    def __init__(self, *, layers: int, dim: int, vocab: int = 1024) -> None:
        super().__init__()
        self.head_dim = 64
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaBlock(dim, dim // self.head_dim) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1])[:, None] * 10000 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.cat((steps, steps), -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def llama(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step of both, taken in turns."""

    def make() -> Llama:
        torch.manual_seed(0)
        return Llama(layers=args.layers, dim=args.dim)

    def steps(loop: Any, count: int, losses: list[float]) -> float:
        start = time.perf_counter()
        for _ in range(count):
            loss = loop(ids[:, :-1], ids[:, 1:])
            loop.backward(loss)
            loop.step()
            losses.append(loss.item())
        return (time.perf_counter() - start) / count

    ids = torch.randint(0, 1024, (args.batch, args.seq + 1), generator=torch.Generator().manual_seed(7))
    config = {
        "train_batch_size": args.batch,
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
    }
    plain = PlainLoop(make(), **ADAMW)
    losses: dict[str, list[float]] = {"plain": [], "swapio": []}
    times: dict[str, list[float]] = {"plain": [], "swapio": []}
    with swapio.initialize(model=make(), config=config)[0] as engine:
        loops: dict[str, Callable[..., Any]] = {"plain": plain, "swapio": engine}
        for round_number in range(args.rounds + 1):
            for name, loop in loops.items():
                seconds = steps(loop, args.steps, losses[name])
                if round_number:  # the first warms up
                    times[name].append(seconds)
    near = max(abs(a - b) for a, b in zip(losses["plain"], losses["swapio"], strict=True))
    ratios = [b / a for a, b in zip(times["plain"], times["swapio"], strict=True)]
    return {"seconds": times, "ratio": statistics.median(ratios), "ratios": ratios, "losses_apart": near}


def table(data: dict[str, Any]) -> Cells:
    step, moved, model = data["step"], data["transfer"], data["llama"]
    rows: Cells = [("what", "figure", "")]
    rows.append(("a hit", f"{data['hit']['us']:.1f} us", f"{data['hit']['manager_us']:.2f} us of it on the manager's thread"))
    rows.append(("a hop, main thread idle", f"{data['hop_idle']['p50_us']:.0f} us", f"99%: {data['hop_idle']['p99_us']:.0f} us"))
    rows.append(("a hop, main thread in Python", f"{data['hop_busy']['p50_us']:.0f} us", f"99%: {data['hop_busy']['p99_us']:.0f} us"))
    rows.append(("a transfer", f"{1e3 * moved['seconds']:.1f} ms", f"{1e6 * moved['manager_cpu_s']:.0f} us of CPU on the manager's thread"))
    rows.append(
        ("a step, blocks in Python", f"{step['step_s']:.2f} s", f"{step['manager']:.2%} on the manager's thread, {step['stall']:.2%} waits")
    )
    low, high = min(model["ratios"]), max(model["ratios"])
    rows.append(
        ("small Llama, resident / plain", f"{model['ratio']:.3f}", f"{low:.3f} - {high:.3f}; losses {model['losses_apart']:.1e} apart")
    )
    return rows


def draw(figure: Any, data: dict[str, Any]) -> None:
    hops, model = figure.subplots(1, 2)
    names = ["hit", "hop, idle", "hop, in Python"]
    hops.bar(names, [data["hit"]["us"], data["hop_idle"]["p50_us"], data["hop_busy"]["p50_us"]])
    hops.set_yscale("log")
    hops.set_ylabel("microseconds")
    for name, seconds in data["llama"]["seconds"].items():
        model.plot([1e3 * s for s in seconds], marker="o", label=name)
    model.set_ylabel("milliseconds per step")
    model.set_xlabel("round")
    model.set_ylim(bottom=0)
    model.legend(fontsize=8)


def main(argv: list[str]) -> int:
    parser = front_parser(__doc__)
    sizes = (("hops", 2000), ("mib", 32), ("transfers", 64), ("layers", 4), ("dim", 256), ("seq", 128), ("batch", 4), ("steps", 10))
    for name, value in (*sizes, ("rounds", 7), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args(argv)
    if args.tiny:
        args.hops, args.mib, args.transfers, args.layers, args.dim, args.seq, args.steps, args.rounds = 100, 1, 8, 2, 64, 16, 2, 2
    torch.set_num_threads(args.threads)
    data: dict[str, Any] = {"hit": hit(args.hops * 10), "hop_idle": hop_idle(args.hops), "hop_busy": hop_busy(args.hops // 4)}
    data["transfer"] = transfers(args.nvme_path, args.mib << 20, args.transfers)
    data["step"] = busy_step(args)
    data["llama"] = llama(args)
    save("hop", args, argv, {f"The control path; transfers of {args.mib} MiB": table(data)}, data, lambda figure: draw(figure, data))
    good = data["hit"]["misses"] == 0 and data["llama"]["losses_apart"] < 1e-3
    print("a hit makes no hop, losses near" if good else "a hit HOPS, or losses are APART")
    return 0 if good else 1


if __name__ == "__main__":
    settle()
    raise SystemExit(main(sys.argv[1:]))
