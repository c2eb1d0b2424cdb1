"""What single ranks do with the models of `zoo`, and the same by plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import swapio
from tests.engine.models import smallest_budget, with_budget

from . import zoo

LR, MOMENTUM, STEPS = 0.05, 0.9, 4
Run = tuple[list[float], list[torch.Tensor], list[torch.Tensor]]  # losses, weights, what was seen in between


def two_units(model: nn.Module, settings: dict[str, Any]) -> dict[str, Any]:
    """With a budget in which a second unit just fits."""
    largest = max(
        sum(p.numel() * 4 + 256 for p in m.parameters()) for each in model.modules() if isinstance(each, nn.ModuleList) for m in each
    )
    return with_budget(settings, smallest_budget(model, settings) + largest)


def train_all(rank: int, cases: list[tuple[str, bool, dict[str, Any]]]) -> list[Run]:
    return [train(rank, *case) for case in cases]


def train(rank: int, name: str, reentrant: bool, settings: dict[str, Any]) -> Run:
    """With SGD, which shows a gradient of a wrong scale; AdamW does not. Only rank 0 looks in between: the others wait for nothing."""
    world = torch.distributed.get_world_size()
    model = zoo.make(name, reentrant=reentrant, dropout=0.0, seed=rank)  # rank 0's values must win
    seen: list[torch.Tensor] = []
    losses = []
    with swapio.initialize(model=model, config=two_units(model, settings))[0] as engine:
        for step in range(STEPS):
            loss = zoo.loss(engine, name, step * world + rank)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if step == 1 and not rank:
                seen = zoo.look(engine, name)
        return losses, [v.clone() for v in engine.module.state_dict().values()], seen


def plain(name: str, world: int) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    """One process with the samples of all ranks in one batch."""
    model = zoo.make(name, reentrant=None, dropout=0.0)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, momentum=MOMENTUM)
    seen: list[torch.Tensor] = []
    losses = []
    for step in range(STEPS):
        parts = [zoo.inputs(name, step * world + rank) for rank in range(world)]
        loss = model(**{key: torch.cat([part[key] for part in parts]) for key in parts[0]}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            seen = zoo.look(model, name)
    return losses, [v.clone() for v in model.state_dict().values()], seen
