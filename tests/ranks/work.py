"""What single ranks do in the tests."""

from __future__ import annotations

from typing import Any

import torch

import swapio
from tests.engine.models import batch, make

Result = tuple[list[float], list[torch.Tensor], dict[str, Any]]


def settings(path: str, *, stage: int, params: str, state: str, dtype: str, accumulate: int, clip: float, world: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "offload_param": {"device": params} | ({"nvme_path": path} if params == "nvme" else {}),
            "offload_optimizer": {"device": state} | ({"nvme_path": path} if state == "nvme" else {}),
        },
        "swapio": {"timeout_s": 30, "device": "cpu"},
    }


def micro_batch(rank: int, world: int, step: int, micro: int, accumulate: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch((step * accumulate + micro) * world + rank)


def train_many(rank: int, path: str, cases: list[dict[str, Any]], steps: int = 3) -> list[Result]:
    return [train_one(rank, path, case, steps) for case in cases]


def train_one(rank: int, path: str, case: dict[str, Any], steps: int) -> Result:
    world = torch.distributed.get_world_size()
    accumulate = case["accumulate"]
    model = make(seed=rank)  # rank 0's values must win
    engine = swapio.initialize(model=model, config=settings(path, world=world, **case))[0]
    losses = []
    with engine:
        for step in range(steps):
            for micro in range(accumulate):
                loss = engine(*micro_batch(rank, world, step, micro, accumulate))
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
        weights = [v.clone() for v in engine.module.state_dict().values()]
        stats = engine.stats() | {"norm": engine.get_global_grad_norm()}
    return losses, weights, stats


def plain(world: int, case: dict[str, Any], steps: int = 3) -> tuple[list[list[float]], list[torch.Tensor], float]:
    """The same by plain PyTorch in fp32 in one process: micro-batches of all ranks, one after the other."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses: list[list[float]] = [[] for _ in range(world)]
    norm = 0.0
    for step in range(steps):
        for micro in range(case["accumulate"]):
            for rank in range(world):
                loss = model(*micro_batch(rank, world, step, micro, case["accumulate"]))
                (loss / (case["accumulate"] * world)).backward()
                losses[rank].append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"] or float("inf")).item()
        optimizer.step()
        optimizer.zero_grad()
    return losses, [v.clone() for v in model.state_dict().values()], norm
