"""Train the bench's model with DeepSpeed ZeRO-3, in this process: the other side of `versus_deepspeed.py`.

Runs in an environment of its own (`pip install torch==2.13.0 deepspeed==0.19.8`; needs Debian's libaio-dev, g++ and ninja-build, and
compiles for some minutes the first time), on one rank and DeepSpeed's CPU accelerator, and prints one line of JSON. With the defaults of
`--cfg` and `max_in_cpu` DeepSpeed crashes in step 2, or keeps the weights in memory.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
os.environ.setdefault("MASTER_PORT", str(29500 + os.getpid() % 1000))

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

from bench._models import GPT
from bench._steps import add_flags, age_s, io_nbytes, rss, run_steps, say, shape_of

logging.getLogger("DeepSpeed").setLevel(logging.WARNING)


def worker_parser() -> argparse.ArgumentParser:
    """The shared flags and DeepSpeed's own."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("--sub-group-size", type=float, default=1.5e7)
    parser.add_argument("--aio", default="{}", help="JSON merged into the section aio")
    parser.add_argument(
        "--cfg", default='{"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 30000000}', help="into zero_optimization"
    )
    return parser


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    shape = shape_of(args)
    largest = max(shape.vocab * shape.dim, 4 * shape.dim**2)
    zero: dict[str, Any] = {"stage": 3, "overlap_comm": False, "sub_group_size": int(args.sub_group_size)}
    if args.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": args.offload_optimizer, "pin_memory": True}
        if args.offload_optimizer == "nvme":
            zero["offload_optimizer"] |= {"nvme_path": args.nvme_path, "buffer_count": 4}
    if args.offload_param != "none":
        zero["offload_param"] = {"device": args.offload_param, "pin_memory": True}
        if args.offload_param == "nvme":
            zero["offload_param"] |= {"nvme_path": args.nvme_path, "max_in_cpu": 0, "buffer_size": -(-largest // 4096) * 4096}
    aio = {"block_size": 1 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}
    return {
        "train_micro_batch_size_per_gpu": args.batch,
        "gradient_accumulation_steps": args.gas,
        "gradient_clipping": args.clipping,
        "steps_per_print": 10**9,
        "zero_optimization": zero | json.loads(args.cfg),
        "aio": aio | json.loads(args.aio),
        "bf16": {"enabled": args.dtype == "bf16"},
    }


def main(argv: list[str]) -> None:
    import_s = age_s()
    args = worker_parser().parse_args(argv)
    torch.set_num_threads(args.threads)
    folder = Path(args.nvme_path) / f"deepspeed-{os.getpid()}"  # it leaves its files, after a failure too
    folder.mkdir(parents=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that finally runs
    args.nvme_path = str(folder)
    try:
        train(args, import_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def train(args: argparse.Namespace, import_s: float) -> None:
    config = config_of(args)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    result: dict[str, Any] = {"import_s": import_s, "rss_after_import": rss()}
    torch.manual_seed(1234)
    start, io = time.perf_counter(), io_nbytes()
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=bool(args.zero_init)):
        model = GPT(shape_of(args), checkpoints=args.checkpoints)
    constructed = time.perf_counter()
    optimizer = DeepSpeedCPUAdam(model.parameters(), lr=1e-4, weight_decay=0.01)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    ended, io_init = time.perf_counter(), io_nbytes()
    result |= {"zero_init_s": round(constructed - start, 2), "initialize_s": round(ended - constructed, 2), "rss_after_init": rss()}
    result |= {"init_read": io_init[0] - io[0], "init_written": io_init[1] - io[1]}
    result |= run_steps(engine, args)
    files = [p for p in Path(args.nvme_path).rglob("*") if p.is_file()]
    result |= {"swap_files": len(files), "swap_bytes": sum(p.stat().st_size for p in files)}
    result["grad_norm"] = float(engine.get_global_grad_norm() or 0)
    say(args, "deepspeed", deepspeed.__version__, result)


if __name__ == "__main__":
    main(sys.argv[1:])
