"""A model, and checkpoints of it that DeepSpeed made: `python -m tests.checkpoint.deepspeed.make`, with a Python that has DeepSpeed.

They were made with DeepSpeed 0.19.8 on the CPU, by two ranks that offload what the stage can: three steps, a checkpoint, three steps more,
whose losses are in `losses.json` (the mean of both ranks).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

HERE = Path(__file__).parent
CASES = [(1, "bf16"), (2, "fp32"), (2, "fp16"), (3, "bf16"), (3, "fp16"), (3, "fp32")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Net(nn.Module):
    """A tied weight, a frozen layer, a buffer, and sizes that two ranks cannot halve."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.still = nn.Linear(13, 13).requires_grad_(False)
        self.last = nn.Linear(13, 7, bias=False)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.first.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        out = self.last(self.still(self.first(x).tanh())).float().square().mean()
        loss: torch.Tensor = out + self.head(x).float().square().mean()
        return loss

    def groups(self) -> list[dict[str, Any]]:
        matrices = [self.first.weight, self.last.weight]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": [self.first.bias], "weight_decay": 0.0}]


def config(stage: int, dtype: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 16, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
    }


def batch(step: int, rank: int, dtype: str) -> torch.Tensor:
    """In fp16 the gradients of step 1 overflow."""
    rows = torch.randn(4, 7, generator=torch.Generator().manual_seed(2 * step + rank))
    return (rows * 1e4 if dtype == "fp16" and step == 1 else rows).to(DTYPES[dtype])


def _make(out: str, stage: int, dtype: str) -> None:
    import deepspeed  # type: ignore[import-not-found,unused-ignore]

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # it would compile
    type(deepspeed.accelerator.get_accelerator()).is_fp16_supported = lambda _: True  # by PyTorch, if not by oneDNN
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    net = Net()
    settings = config(stage, dtype) | {"zero_force_ds_cpu_optimizer": False}
    settings["optimizer"]["params"]["torch_adam"] = True
    settings["zero_optimization"] |= {"sub_group_size": 40, "offload_optimizer": {"device": "cpu"}}
    if stage == 3:
        settings["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.groups(), config=settings)
    losses = []
    for step in range(6):
        if step == 3:
            engine.save_checkpoint(out, client_state={"epoch": 7})
        loss = engine(batch(step, engine.global_rank, dtype))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 2)
    if engine.global_rank == 0:
        for path in Path(out).iterdir():
            if path.name not in ("latest", "global_step3"):
                path.unlink()
        (Path(out) / "losses.json").write_text(json.dumps(losses) + "\n")


def main() -> None:
    """All cases, one after the other."""
    for stage, dtype in CASES:
        out = HERE / f"stage{stage}_{dtype}"
        shutil.rmtree(out, ignore_errors=True)
        command = f"{sys.executable} -m torch.distributed.run --nproc_per_node 2 {__file__} {out} {stage} {dtype}"
        if os.system(f"DS_ACCELERATOR=cpu {command}"):
            sys.exit(1)


if __name__ == "__main__":
    _make(sys.argv[1], int(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 1 else main()
