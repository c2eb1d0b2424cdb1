"""`torch.no_grad` for functions that are called many times from within it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["without_grad"]

P = ParamSpec("P")
R = TypeVar("R")


def without_grad(function: Callable[P, R]) -> Callable[P, R]:
    """Like `@torch.no_grad()`, but entering it once more costs nothing; that was a tenth of the time of a step of 16K elements."""
    guarded = torch.no_grad()(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return guarded(*args, **kwargs) if torch.is_grad_enabled() else function(*args, **kwargs)

    return call
