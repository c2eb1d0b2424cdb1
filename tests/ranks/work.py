"""What single ranks do in the tests."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
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


class Branches(torch.nn.Module):
    """Blocks of which each call uses those that it is told to."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 24)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(24, 24), torch.nn.Tanh()) for _ in range(num_blocks))
        self.last = torch.nn.Linear(24, 1)

    def forward(self, x: torch.Tensor, path: list[int]) -> torch.Tensor:
        x = self.first(x)
        for block in path:
            x = x + self.blocks[block](x)
        loss: torch.Tensor = self.last(x).square().mean()
        return loss


def branch(rank: int, step: int) -> tuple[torch.Tensor, list[int]]:
    """Block 4 is used by nobody, block 3 by rank 1 alone, the others at random, in any order, now and then twice."""
    draw = random.Random(1000 * step + rank)
    path = [draw.randrange(3) for _ in range(draw.randrange(4))] + ([3] if rank == 1 and step % 3 == 0 else [])
    draw.shuffle(path)
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)), path


def _branch_settings(path: str, stage: int) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": path}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "offload_param": nvme, "offload_optimizer": nvme},
        "swapio": {"timeout_s": 30, "device": "cpu"},
    }


def train_branches(rank: int, path: str, stage: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    with swapio.initialize(model=Branches(), config=_branch_settings(path, stage))[0] as engine:
        losses = []
        for step in range(steps):
            loss = engine(*branch(rank, step))
            engine.backward(loss)
            if rank == 0 and step % 50 == 7:  # one rank looks at weights that the others do not need
                assert torch.isfinite(engine.module.get_parameter("blocks.4.0.weight").sum())
            engine.step()
            losses.append(loss.item())
        return losses, {k: v.clone() for k, v in engine.module.state_dict().items()}


def plain_branches(world: int, steps: int) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """One process. A parameter that some ranks did not use counts as zero there; one that none used is skipped."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    losses: list[list[float]] = [[] for _ in range(world)]
    for step in range(steps):
        for rank in range(world):
            loss = model(*branch(rank, step))
            (loss / world).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def die(rank: int, path: str, when: str) -> tuple[str, str, float]:
    """Rank 1 dies; what the others are told, and after how long."""
    torch.manual_seed(0)
    settings = _branch_settings(path, 3)
    settings["swapio"]["timeout_s"] = 15
    engine = swapio.initialize(model=Branches(), config=settings)[0]
    start = time.monotonic()
    try:
        for step in range(1000):
            x, _ = branch(rank, step)
            loss = engine(x, [0, 1, 2])
            if rank == 1 and step == 2 and when == "backward":
                os._exit(3)
            engine.backward(loss)
            if rank == 1 and step == 2 and when == "step":
                os._exit(3)
            engine.step()
    except swapio.RankError as error:
        engine.abandon()
        return type(error).__name__, str(error), time.monotonic() - start
    raise AssertionError("nobody noticed")


def smallest_budget(rank: int, path: str, stage: int) -> tuple[int, list[float], int]:
    """Train with the budget that the error names; the peak of host memory tells whether it was kept."""
    torch.manual_seed(0)
    settings = _branch_settings(path, stage)
    settings["swapio"]["host_memory"] = 4096
    try:
        swapio.initialize(model=Branches(), config=settings)
        raise AssertionError("a page of memory was accepted")
    except swapio.BudgetError as error:
        needed = error.works_nbytes
        assert needed is not None
    needed = max(int(t) for t in _gather(needed))
    settings["swapio"]["host_memory"] = needed
    torch.manual_seed(0)
    with swapio.initialize(model=Branches(), config=settings)[0] as engine:
        losses = []
        for step in range(5):
            loss = engine(*branch(rank, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return needed, losses, engine.stats()["host_memory_peak"]


def _gather(value: int) -> list[torch.Tensor]:
    found = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(found, torch.tensor([value]))
    return found


def drop_and_go_on(rank: int, path: str, stage: int) -> list[float]:
    """Gradients that are dropped, on all ranks, leave nothing behind."""
    torch.manual_seed(0)
    losses = []
    with swapio.initialize(model=Branches(), config=_branch_settings(path, stage))[0] as engine:
        for step in range(6):
            if step % 2 == 0:
                if step != 2 or rank == 0:  # once by one rank alone
                    engine.backward(engine(torch.full((4, 8), 100.0 * (rank + 1)), [0, 1]))
                    if stage >= 2:
                        with pytest.raises(swapio.UsageError, match="safe_set_full_grad"):
                            engine.module.get_parameter("first.weight").grad = None
                engine.zero_grad()
            loss = engine(*branch(rank, step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def writes(rank: int, path: str, stage: int) -> str:
    """A write to a weight in the ordinary way: kept where every rank has it whole, an error where each has a slice."""
    torch.manual_seed(0)
    with swapio.initialize(model=Branches(), config=_branch_settings(path, stage))[0] as engine:
        try:
            with torch.no_grad():
                engine.module.get_parameter("blocks.0.0.weight").mul_(2)
            engine.empty_partition_cache()
            engine(*branch(rank, 0))
            engine.empty_partition_cache()
        except swapio.UsageError as error:
            engine.abandon()
            return str(error)
    return ""
