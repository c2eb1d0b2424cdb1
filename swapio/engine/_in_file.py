"""Frozen weights that stay in the files they are mapped from."""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence

import torch
from torch import nn

from ..spec import format_nbytes
from ..swap import FilePart, file_part
from ..zero import UnitLayout, UnitSpec, managed
from ._load import some

__all__ = ["in_file", "parts_in_files", "same_bytes"]

logger = logging.getLogger("swapio")

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parts_in_files(specs: Sequence[UnitSpec], trained: Container[int], weights: torch.dtype | None) -> list[list[FilePart | None]]:
    """Of each unit's parameters, where the bytes are of those that can stay there; says which mapped ones cannot.

    Args:
        trained: ids of parameters.
        weights: what floating weights are converted to.
    """
    copied: list[str] = []
    found = [[_part(name, param, trained, weights, copied) for name, param in spec.params] for spec in specs]
    files = {part.file.path: part for unit in found for part in unit if part is not None}
    nbytes = sum(part.nbytes for unit in found for part in unit if part is not None)
    if files:
        logger.info("%s of frozen weights stay where they are, in %s", format_nbytes(nbytes), some(files))
    if copied:
        logger.warning("frozen, but copied from their files, as they were written or become %s here: %s", weights, some(copied))
    return found


def _part(name: str, param: nn.Parameter, trained: Container[int], weights: torch.dtype | None, copied: list[str]) -> FilePart | None:
    part = None if managed(param) is not None or id(param) in trained else file_part(param)
    if part is None:
        return None
    if param._version or (weights is not None and param.is_floating_point() and param.dtype is not weights):
        copied.append(name)
        return None
    return part


def in_file(layout: UnitLayout, parts: Sequence[FilePart | None]) -> list[tuple[int, FilePart]]:
    """The parts, by byte of the unit."""
    return sorted(((slot.offset, part) for slot, part in zip(layout.slots, parts, strict=True) if part is not None), key=lambda p: p[0])


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one dtype are equal, NaNs and signs of zero too."""
    as_integers = _INTEGERS.get(a.dtype.itemsize)
    return as_integers is not None and torch.equal(a.view(as_integers), b.detach().view(as_integers))
