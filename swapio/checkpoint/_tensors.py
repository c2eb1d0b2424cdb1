"""Tensors from `torch.distributed.checkpoint`'s format, a stretch at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import numpy as np
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from ..errors import StorageError, UsageError
from ..io import read_as_told
from ..memory import copy_to
from ._boxes import Box, boxes
from ._pipeline import ahead

if TYPE_CHECKING:
    from ._folder import Check

__all__ = ["Stored", "Stretch"]

_HEAD_NBYTES = 1 << 16
"""Of a stored tensor, in which its elements begin: what stands before them is its dtype and shape."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stretch:
    """Elements `start` to `stop`, in memory order, of a dense tensor.

    Attributes:
        name: of the whole tensor, which has `shape` and `stride`.
        read: gives the values, `[stop - start]` in host memory, good until anything else is read.
        write: takes them.
        put: takes parts of them, as they were read: the first element in the whole tensor, and the values. In place of `write`.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int
    read: Callable[[], torch.Tensor] | None = None
    write: Callable[[torch.Tensor], None] | None = None
    put: Callable[[int, torch.Tensor], None] | None = None

    def boxes(self) -> Iterator[Box]:
        return boxes(self.shape, self.stride, self.start, self.stop)

    def __str__(self) -> str:
        return f"{self.name} [{self.start}:{self.stop}]"


class Stored:
    """What a folder holds.

    Args:
        check: is given every part that is read.

    Attributes:
        shapes, dtypes: of the tensors, by name; complete ones.
    """

    def __init__(self, path: Path, *, check: Check | None = None) -> None:
        self.path = path
        self._check = check
        self.metadata: Metadata = FileSystemReader(path).read_metadata()
        tensors = {n: m for n, m in self.metadata.state_dict_metadata.items() if isinstance(m, TensorStorageMetadata)}
        for name, tensor in tensors.items():
            found, wanted = sum(math.prod(c.sizes) for c in tensor.chunks), math.prod(tensor.size)
            if found != wanted:
                why = f"{found} of its {wanted} elements were stored"
                raise StorageError("read", name=name, path=str(path), offset=0, wanted=wanted, got=found, why=why)
        self.shapes = {n: tuple(t.size) for n, t in tensors.items()}
        self.dtypes = {n: t.properties.dtype for n, t in tensors.items()}

    def get(self, name: str) -> Any:
        """An object that was stored, its tensors in host memory. It is unpickled: load from a folder that you trust.

        Raises:
            UsageError: its classes are not here; StorageError: of the check.
        """
        if not isinstance(self.metadata.state_dict_metadata.get(name), BytesStorageMetadata):
            return None
        info: _StorageInfo = self.metadata.storage_data[MetadataIndex(name)]
        with (self.path / info.relative_path).open("rb") as file:
            content = _content(file, info, self._check)
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=False)
        except (AttributeError, ImportError) as error:
            raise UsageError(
                f"{name!r} in {self.path} has objects that cannot be made here: {error}; import or define their class"
            ) from error

    def load(self, stretches: Sequence[Stretch]) -> None:
        """Read and `write` the stretches one after the other, with some that are read ahead. This rank alone."""
        reader = _Reader(self.path, self._check)
        try:
            with _alone():
                load({}, storage_reader=reader, planner=_LoadPlanner(stretches), no_dist=True)
        except CheckpointException as failed:
            raise next(iter(failed.failures.values()))[0] from None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without PyTorch's remark that this process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


class _LoadPlanner(LoadPlanner):
    def __init__(self, stretches: Sequence[Stretch]) -> None:
        self._stretches = stretches
        self._boxes: dict[MetadataIndex, tuple[Stretch, Box]] = {}
        self._current: Stretch | None = None
        self._flat = torch.empty(0)
        self._missing = 0
        self.stored: dict[str, TensorStorageMetadata] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        if metadata is None:
            raise RuntimeError("there is no metadata")
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        wanted: dict[str, list[tuple[int, Stretch, Box]]] = {}
        for number, stretch in enumerate(self._stretches):
            wanted.setdefault(stretch.name, []).extend((number, stretch, box) for box in stretch.boxes())
        items: list[tuple[tuple[int, int], ReadItem]] = []
        for name, parts in wanted.items():
            stored = self.stored[name] = cast(TensorStorageMetadata, self._metadata.state_dict_metadata[name])
            chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for _, _, b in parts]
            self._boxes |= {MetadataIndex(name, box.offsets): (stretch, box) for _, stretch, box in parts}
            for item in create_read_items_for_chunk_list(name, stored, chunks):
                number, _, box = parts[item.dest_index.index or 0]
                items.append(((number, box.start), item))
        items.sort(key=lambda i: (i[0], tuple(i[1].dest_offsets)))  # as it lies in memory: what is stored is read once
        return LoadPlan([item for _, item in items])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise RuntimeError(f"{read_item.dest_index.fqn!r} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        stretch, box = self._boxes[read_item.dest_index]
        if self._current is not stretch:
            if self._missing:
                raise RuntimeError(f"{self._missing} elements of {self._current} are not there")
            self._current, self._missing = stretch, stretch.stop - stretch.start
            self._flat = torch.empty(self._missing, dtype=stretch.dtype, device="cpu" if stretch.put is None else "meta")
        return _narrow(box.view(self._flat, stretch.start), read_item.dest_offsets, read_item.lengths)

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Let the part of a stretch that `resolve_tensor` gave have these values."""
        current = self._current
        if current is None or current.put is None:
            copy_to(target, values)
        elif target.is_contiguous():
            current.put(current.start + int(target.storage_offset()), values.reshape(-1))
        else:
            for part, its_values in zip(target, values, strict=True):
                self.fill(part, its_values)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._missing -= tensor.numel()
        if not self._missing and self._current is not None and self._current.write is not None:
            self._current.write(self._flat)


class _Reader(FileSystemReader):
    """Reads in the order of the plan, the next stored tensors while one is used."""

    def __init__(self, path: Path, check: Check | None) -> None:
        super().__init__(path)
        self._check = check
        self._chunks: dict[MetadataIndex, tuple[torch.dtype, torch.Size]] = {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        runs = [(index, list(items)) for index, items in itertools.groupby(plan.items, key=lambda i: i.storage_index)]
        planner = cast(_LoadPlanner, planner)
        self._chunks = {MetadataIndex(n, c.offsets): (t.properties.dtype, c.sizes) for n, t in planner.stored.items() for c in t.chunks}
        with contextlib.ExitStack() as stack:
            names = dict.fromkeys(self.storage_data[index].relative_path for index, _ in runs)
            files = {name: stack.enter_context((Path(self.path) / name).open("rb")) for name in names}
            tensors = ahead(functools.partial(self._load, files, index) for index, _ in runs)
            stack.enter_context(contextlib.closing(tensors))
            for file in files.values():
                read_as_told(file.fileno())
            for (_, items), tensor in zip(runs, tensors, strict=True):
                for item in items:
                    target = planner.resolve_tensor(item)
                    planner.fill(target, _narrow(tensor, item.storage_offsets, item.lengths))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _load(self, files: dict[str, BinaryIO], index: MetadataIndex) -> torch.Tensor:
        """A stored tensor over the bytes that were read: `torch.load` would copy them, which took longer than to read them."""
        info: _StorageInfo = self.storage_data[index]
        content = _content(files[info.relative_path], info, self._check)
        dtype, sizes = self._chunks[index]
        return torch.frombuffer(content, dtype=dtype, count=math.prod(sizes), offset=_first_byte(content)).view(sizes)


def _first_byte(content: memoryview) -> int:
    """Of the elements, in what `torch.save` made of one tensor that has its storage for itself: a zip file, nothing in it compressed."""
    head = bytes(content[:_HEAD_NBYTES])
    start = head.rfind(b"PK\3\4", 0, head.index(b"/data/0"))  # its header, 30 bytes and what has lengths at 26 and 28
    name, extra = (int.from_bytes(head[start + at : start + at + 2], "little") for at in (26, 28))
    return start + 30 + name + extra


def _content(file: BinaryIO, info: _StorageInfo, check: Check | None) -> memoryview:
    content, done = memoryview(np.empty(info.length, np.uint8)), 0  # type: ignore[arg-type]
    while more := os.preadv(file.fileno(), [content[done:]], info.offset + done) if done < info.length else 0:
        done += more
    if check is not None:
        check(info.relative_path, info.offset, content[:done])
    return content[:done]


def _narrow(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor
