"""Where the optimizer state of one chunk of a unit lies in a block of bytes.

    bfloat16 weights:  [lo int16 | field fp32 | field fp32 ...]      (the weight itself is the upper half of the master)
    fp32 weights:      [field fp32 | field fp32 ...]                 (the weight is the master)

Each part starts at a multiple of 4096 bytes. The fields start as zeros, so only the head must be stored at first.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..spec import PAGE_NBYTES, round_up
from ._spec import OptimizerSpec

__all__ = ["CHUNK_MULTIPLE", "ChunkLayout", "ChunkViews", "chunk_layout"]

CHUNK_MULTIPLE = 2048
"""Chunks but the last of a unit are a multiple of this many elements: no padding between parts of any dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkViews:
    """Tensors over the bytes of one chunk's state: `lo` int16 `[numel]` (`None` for fp32 weights), fields fp32 `[numel]`."""

    lo: Tensor | None
    fields: dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The layout for `numel` elements.

    Attributes:
        split: the chunk holds the lower halves of split masters.
    """

    numel: int
    fields: tuple[str, ...]
    split: bool

    @property
    def head_nbytes(self) -> int:
        """Bytes before the fields, a multiple of 4096."""
        return round_up(2 * self.numel, PAGE_NBYTES) if self.split else 0

    @property
    def field_nbytes(self) -> int:
        """Bytes from one field to the next, a multiple of 4096."""
        return round_up(4 * self.numel, PAGE_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole chunk, a multiple of 4096."""
        return self.head_nbytes + len(self.fields) * self.field_nbytes

    def views(self, buffer: Tensor) -> ChunkViews:
        """Typed views of a contiguous uint8 `buffer` of at least `nbytes` bytes, aligned to 4; nothing is copied.

        Raises:
            ValueError: the buffer is too small or of another dtype.
        """
        if buffer.dtype != torch.uint8 or buffer.numel() < self.nbytes:
            raise ValueError(f"a chunk of {self.numel} elements needs {self.nbytes} uint8, got {buffer.numel()} of {buffer.dtype}")
        starts = {name: self.head_nbytes + index * self.field_nbytes for index, name in enumerate(self.fields)}
        return ChunkViews(
            lo=buffer[: 2 * self.numel].view(torch.int16) if self.split else None,
            fields={name: buffer[start : start + 4 * self.numel].view(torch.float32) for name, start in starts.items()},
        )


def chunk_layout(spec: OptimizerSpec, numel: int, weight_dtype: torch.dtype) -> ChunkLayout:
    """The layout of the state of `numel` elements (0 or more) whose weights are bfloat16 or fp32.

    Raises:
        ValueError: another dtype, or a negative `numel`.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if weight_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"no layout for weights of {weight_dtype}; bfloat16 and float32 have one")
    return ChunkLayout(numel, spec.fields, split=weight_dtype == torch.bfloat16)
