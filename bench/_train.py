"""Train the bench's model with swapio, in this process: `train_step.py` starts this with the right environment."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from typing import Any

import torch

import swapio
from bench._models import GPT
from bench._steps import DTYPES, add_flags, age_s, io_nbytes, rss, run_steps, say, shape_of

__all__ = ["config_of", "manager_cpu_s", "worker_parser"]


def worker_parser() -> argparse.ArgumentParser:
    """The shared flags and swapio's own. What is not given is not in the config, so that every version runs this."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("--host-memory", default="auto", help='bytes, a text like "1GiB", "auto", or "min": the least that is accepted')
    parser.add_argument("--device-memory")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="direct", help="direct: nothing hides in the page cache")
    parser.add_argument("--optimizer-step", choices=("auto", "in_forward", "in_backward", "at_step"))
    parser.add_argument("--state-dtype", choices=("fp32", "bf16", "int8"))
    parser.add_argument("--block-size", type=int, help="bytes of one transfer's piece")
    parser.add_argument("--queue-depth", type=int)
    parser.add_argument("--init-dtype", choices=("bf16", "fp32"), default="bf16", help="of the weights as constructed, with --dtype bf16")
    parser.add_argument("--slow-compute", type=float, default=0.0, help="seconds that each block loses in forward and in backward")
    parser.add_argument("--slow-with", choices=("sleep", "python"), default="sleep", help="python: holding the interpreter's lock")
    parser.add_argument("--cfg", default="{}", help="JSON merged into the section swapio")
    return parser


def config_of(args: argparse.Namespace, host_memory: int | str) -> dict[str, Any]:
    """The config, in DeepSpeed's format."""

    def place(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": args.nvme_path} if device == "nvme" else {})

    own = {
        "host_memory": host_memory, "device_memory": args.device_memory, "device": args.device, "backend": args.backend,
        "optimizer_step": args.optimizer_step, "optimizer_state_dtype": args.state_dtype,
    }  # fmt: skip
    aio = {"block_size": args.block_size, "queue_depth": args.queue_depth}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.gas,
        "gradient_clipping": args.clipping,
        "bf16": {"enabled": args.dtype == "bf16"},
        "fp16": {"enabled": args.dtype == "fp16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": place(args.offload_param), "offload_optimizer": place(args.offload_optimizer)},
        "aio": {k: v for k, v in aio.items() if v is not None},
        "swapio": {k: v for k, v in own.items() if v is not None} | json.loads(args.cfg),
    }


def least_host_memory(args: argparse.Namespace) -> int:
    """What `initialize` says it needs, asked with a model that takes no memory."""
    with torch.device("meta"):
        model = GPT(shape_of(args))
    model.to_empty(device="cpu")  # pages that nobody touches
    try:
        swapio.initialize(model=model, config=config_of(args, 4096))
    except swapio.BudgetError as error:
        return error.works_nbytes or 0
    raise RuntimeError("4096 bytes of host memory were enough")


def slow_down(blocks: Any, seconds: float, how: str) -> None:
    """Let each block take longer, without using the processor or in Python: compute that is slower than the drive."""

    def lose(*_: Any) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left) if how == "sleep" else sum(range(50))

    for block in blocks:
        block.register_forward_pre_hook(lose)
        block.register_full_backward_pre_hook(lose)


def manager_cpu_s() -> float:
    """CPU seconds of the thread that decides."""
    thread = next(t for t in threading.enumerate() if t.name == "swapio-manager")
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def main(argv: list[str]) -> None:
    import_s = age_s()
    args = worker_parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    host_memory = least_host_memory(args) if args.host_memory == "min" else args.host_memory
    config = config_of(args, host_memory)
    result: dict[str, Any] = {"import_s": import_s, "rss_after_import": rss()}
    torch.manual_seed(1234)
    start, io = time.perf_counter(), io_nbytes()
    cast = DTYPES[args.init_dtype if args.dtype == "bf16" else "fp32"]
    with swapio.zero.Init(config_dict_or_path=config, enabled=bool(args.zero_init), dtype=cast):
        model = GPT(shape_of(args), checkpoints=args.checkpoints)
    if args.slow_compute:
        slow_down(model.blocks, args.slow_compute, args.slow_with)
    constructed = time.perf_counter()
    engine = swapio.initialize(model=model, config=config)[0]
    ended, io_init = time.perf_counter(), io_nbytes()
    result |= {"zero_init_s": round(constructed - start, 2), "initialize_s": round(ended - constructed, 2), "rss_after_init": rss()}
    result |= {"init_read": io_init[0] - io[0], "init_written": io_init[1] - io[1]}

    def counters() -> dict[str, float]:
        stats = engine.stats()
        return {"stall_s": stats["stall_seconds"], "hits": stats["hits"], "misses": stats["misses"], "manager_cpu_s": manager_cpu_s()}

    result |= run_steps(engine, args, counters=counters)
    stats = engine.stats()
    result |= {"stats": stats, "swap_bytes": stats["bytes_on_nvme"], "grad_norm": engine.get_global_grad_norm() or 0.0}
    result |= {"host_memory": stats["host_memory_budget"], "optimizer_step": args.optimizer_step, "state_dtype": args.state_dtype}
    engine.abandon()
    say(args, "swapio", swapio.__version__, result)


if __name__ == "__main__":
    main(sys.argv[1:])
