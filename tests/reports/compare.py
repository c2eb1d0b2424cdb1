"""Small models trained by the engine, with as little memory as it takes, and by plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapio
from tests.engine.models import LossFn, check_same, config, smallest_budget, train, train_plain, train_plain_bf16, with_budget

DIM = 64
PLACES = [
    ("none", "none", "cpu"),
    ("cpu", "nvme", "cpu"),
    ("nvme", "nvme", "cpu"),
    ("none", "cpu", "simulated"),
    ("nvme", "nvme", "simulated"),
]
"""Where weights and optimizer state rest, and the device."""
every_place = pytest.mark.parametrize("place", PLACES, ids="-".join)
both_devices = pytest.mark.parametrize("place", [PLACES[2], PLACES[4]], ids="-".join)


@contextlib.contextmanager
def managed(
    path: Path, model: nn.Module, *, place: tuple[str, str, str] = PLACES[2], extra: int = 0, optimizer: Any = None, **own: Any
) -> Iterator[swapio.Engine]:
    """An engine over `model` that has the smallest `host_memory` that works and `extra` bytes.

    Args:
        optimizer: a function from a model to what `swapio.initialize` is given; default: AdamW from the config.
    """
    settings = config(path, params=place[0], state=place[1], device=place[2], **own)
    if optimizer is not None:
        del settings["optimizer"]
    settings = with_budget(settings, smallest_budget(model, settings, optimizer) + extra)
    given = optimizer(model) if optimizer is not None else None
    with swapio.initialize(model=model, optimizer=given, config=settings)[0] as engine:
        yield engine


def same_as_pytorch(path: Path, make: Callable[[], Any], fn: LossFn, *, steps: int = 3, dtype: str = "fp32", **kwargs: Any) -> None:
    """Losses and weights of both are equal to the bit."""
    with managed(path, make(), dtype=dtype, **kwargs) as engine:
        got = train(engine, fn, steps)
    check_same(got, (train_plain if dtype == "fp32" else train_plain_bf16)(make(), fn, steps))


def plain_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What the engine steps like, for the weights of a plain model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def layers(*, count: int = 3, seed: int = 0) -> nn.Sequential:
    """`count` units of one linear layer each."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(count)))


def rows(step: int, num: int = 8) -> torch.Tensor:
    """The inputs of one step, `[num, DIM]`."""
    return torch.randn(num, DIM, generator=torch.Generator().manual_seed(step))


def mean_square(model: Any, step: int) -> torch.Tensor:
    """A loss of `layers()`, in the dtype of its weights."""
    loss: torch.Tensor = model(rows(step).to(next(model.parameters()).dtype)).float().pow(2).mean()
    return loss
