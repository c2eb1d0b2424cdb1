"""Where the optimizer state of one chunk of a unit lies in a block of bytes.

    bfloat16 weights:  [lo int16 | field fp32 | field fp32 ...]      (the weight itself is the upper half of the master)
      or, not split:   [master fp32 | field fp32 | field fp32 ...]   (faster, where the state stays in memory; see [Note: Whole master])
    float16 weights:   [master fp32 | field fp32 | field fp32 ...]   (the weight is the master rounded: float16 is no half of fp32)
    fp32 weights:      [field fp32 | field fp32 ...]                 (the weight is the master)

A field may be narrower: bfloat16, or uint8 codes and after them a scale for each 256 (`OptimizerSpec.state_dtype`; see [Note: 8 bits]).
Each part starts at a multiple of 4096 bytes. The fields start as zeros, so only the head must be stored at first; zeros
in `lo` say that the weight is the master, while a `master` must be stored in any case.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..spec import PAGE_NBYTES, round_up
from ._spec import OptimizerSpec
from ._split import merge_, round_, split_
from ._state import SCALE_NUMEL, SQUARES, StateDtype, field_nbytes, load_, store_

__all__ = ["CHUNK_MULTIPLE", "ChunkLayout", "ChunkViews", "chunk_layout"]

CHUNK_MULTIPLE = 2048
"""Chunks but the last of a unit are a multiple of this many elements: no padding between parts of any dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkViews:
    """Tensors over the bytes of one chunk's state, all `[numel]`.

    Attributes:
        lo: int16, the lower halves of split masters; `None` unless the weights are bfloat16 and split.
        master: fp32; `None` if the weights are split, or fp32.
        fields: by name, fp32 or bfloat16, or uint8 codes `[numel rounded up to 256]`.
        scales: of the codes, by name, fp32 `[numel / 256 rounded up]`; empty unless fields are codes.
    """

    lo: Tensor | None
    master: Tensor | None
    fields: dict[str, Tensor]
    scales: dict[str, Tensor]

    @torch.no_grad()
    def store_master(self, master: Tensor, weights: Tensor, *, start: int) -> None:
        """Make `master` (fp32 `[n]`, on the device of the chunk) that of the `n` elements from `start` on, and round it into `weights`.

        Args:
            weights: of the whole chunk, `[numel]`.
        """
        part = slice(start, start + master.numel())
        if self.lo is not None:
            split_(master, weights[part], self.lo[part])
            return
        if self.master is not None:
            self.master[part].copy_(master)
        round_(master, weights[part])

    @torch.no_grad()
    def read_master(self, master: Tensor, weights: Tensor, *, start: int) -> None:
        """Fill `master` (fp32 `[n]`) with that of the elements from `start` on: the reverse of `store_master`."""
        part = slice(start, start + master.numel())
        if self.lo is not None:
            merge_(weights[part], self.lo[part], master)
        else:
            master.copy_((weights if self.master is None else self.master)[part])

    @torch.no_grad()
    def store_field(self, name: str, values: Tensor, *, start: int) -> None:
        """Make `values` (fp32 `[n]`, on the device of the chunk) those of the `n` elements from `start` on, rounded to nearest.

        Fields of codes are cut at multiples of 256, or where the chunk ends; what is after `n` in the last block becomes 0.
        """
        stored, scales = self.part(name, start, values.numel())
        if scales is not None:
            padded = values.new_zeros(stored.numel())
            padded[: values.numel()] = values
            values = padded
        scratch = values if scales is None else torch.empty_like(values)
        store_(values, stored, scales, square=name in SQUARES, dither=None, scratch=scratch)

    @torch.no_grad()
    def read_field(self, name: str, values: Tensor, *, start: int) -> None:
        """Fill `values` (fp32 `[n]`) with those of the elements from `start` on: the reverse of `store_field`."""
        stored, scales = self.part(name, start, values.numel())
        padded = values if stored.numel() == values.numel() else values.new_empty(stored.numel())
        load_(stored, scales, padded, square=name in SQUARES)
        if padded is not values:
            values.copy_(padded[: values.numel()])

    def part(self, name: str, start: int, numel: int) -> tuple[Tensor, Tensor | None]:
        """What a field is stored as from element `start` on: `[numel]`, or of codes whole blocks, and their scales."""
        if name not in self.scales:
            return self.fields[name][start : start + numel], None
        if start % SCALE_NUMEL:
            raise ValueError(
                f"{name!r} is kept in blocks of {SCALE_NUMEL} elements; one starts before {start}, and cannot be taken in part"
            )
        first, stop = start // SCALE_NUMEL, -(-(start + numel) // SCALE_NUMEL)
        return self.fields[name][start : stop * SCALE_NUMEL], self.scales[name][first:stop]

    @torch.no_grad()
    def adopt_weights(self, weights: Tensor, *, start: int, stop: int) -> None:
        """Make the weights from `start` to `stop` their own masters, as after a write by someone else. `weights` as in `store_master`."""
        if self.lo is not None:
            self.lo[start:stop].zero_()
        if self.master is not None:
            self.master[start:stop].copy_(weights[start:stop])


_HEADS = {torch.bfloat16: torch.int16, torch.float16: torch.float32, torch.float32: None}


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkLayout:
    """The layout for `numel` elements.

    Attributes:
        head: dtype of what lies before the fields: int16 lower halves of split masters, fp32 masters, or nothing.
        state_dtype: of the fields.
    """

    numel: int
    fields: tuple[str, ...]
    head: torch.dtype | None
    state_dtype: StateDtype = "fp32"

    @property
    def split(self) -> bool:
        """The chunk holds the lower halves of split masters."""
        return self.head is torch.int16

    @property
    def whole(self) -> ChunkLayout:
        """The same with whole masters."""
        return dataclasses.replace(self, head=torch.float32) if self.split else self

    @property
    def head_nbytes(self) -> int:
        """Bytes before the fields, a multiple of 4096."""
        return 0 if self.head is None else round_up(self.head.itemsize * self.numel, PAGE_NBYTES)

    @property
    def field_nbytes(self) -> int:
        """Bytes from one field to the next, a multiple of 4096."""
        return round_up(field_nbytes(self.state_dtype, self.numel), PAGE_NBYTES)

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
        head = None if self.head is None else buffer[: self.head.itemsize * self.numel].view(self.head)
        codes = self.state_dtype == "int8"
        numel = round_up(self.numel, SCALE_NUMEL) if codes else self.numel
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}[self.state_dtype]
        ends = {name: start + numel * dtype.itemsize for name, start in starts.items()}
        return ChunkViews(
            lo=head if self.split else None,
            master=None if self.split else head,
            fields={name: buffer[start : ends[name]].view(dtype) for name, start in starts.items()},
            scales={n: buffer[end : end + numel // SCALE_NUMEL * 4].view(torch.float32) for n, end in ends.items()} if codes else {},
        )


def chunk_layout(spec: OptimizerSpec, numel: int, weight_dtype: torch.dtype) -> ChunkLayout:
    """The layout of the state of `numel` elements (0 or more) whose weights are bfloat16, with split masters, float16 or fp32.

    Raises:
        ValueError: another dtype, or a negative `numel`.
    """
    if numel < 0:
        raise ValueError(f"numel must not be negative, got {numel}")
    if weight_dtype not in _HEADS:
        raise ValueError(f"no layout for weights of {weight_dtype}; bfloat16, float16 and float32 have one")
    return ChunkLayout(numel, spec.fields, _HEADS[weight_dtype], spec.state_dtype)
