"""Copies on one thread."""

from __future__ import annotations

import torch

__all__ = ["copied", "copy_to"]


def copy_to(target: torch.Tensor, source: torch.Tensor) -> None:
    """`target.copy_(source)`. PyTorch shares a copy of more than 32K elements among all threads; beside busy cores, waiting for the last
    of them takes longer than the copy (7 s of 27, measured while saving 1 GB on two cores at a load of 8).
    """
    plain = source.dtype is target.dtype and source.is_contiguous() and target.is_contiguous()
    if plain and source.device.type == target.device.type == "cpu" and source.shape == target.shape and source.numel():
        target.detach().view(-1).view(torch.uint8).numpy()[:] = source.detach().view(-1).view(torch.uint8).numpy()
    else:
        target.copy_(source)


def copied(source: torch.Tensor) -> torch.Tensor:
    """A contiguous copy."""
    target = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    copy_to(target, source)
    return target
