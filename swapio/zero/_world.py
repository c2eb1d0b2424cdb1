"""How many ranks there are."""

from __future__ import annotations

import os

import torch

__all__ = ["world"]


def world() -> tuple[int, str]:
    """The number of ranks, and where it was read; `load_config` says which numbers work."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size(), "torch.distributed"
    return int(os.environ.get("WORLD_SIZE", "1")), "WORLD_SIZE" if "WORLD_SIZE" in os.environ else "one process"
