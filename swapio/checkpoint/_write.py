"""Tensors and objects to `torch.distributed.checkpoint`'s format, a stretch at a time.

[Note: Own writer and reader] PyTorch's `FileSystemWriter` keeps a reference to each tensor until its file ends, and its reader goes file by
file, loading a stored chunk again for each part of it that is wanted. Here one stretch is in memory at a time; the files are the same, so
`torch.distributed.checkpoint.load` and its tools read them.
"""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils.serialization import config

from ..errors import StorageError, UsageError
from ..io import drop_cache
from ._boxes import Box
from ._folder import Part, part_of
from ._pipeline import WriteBehind
from ._tensors import Stretch

__all__ = ["StretchWriter", "finish_folder"]

Written = tuple[WriteItem, Part]


class StretchWriter:
    """Writes the file of one rank into the folder `path`, in any order and from any thread, one stretch behind.

    Raises:
        StorageError: no room, or another fault of the drive; each method, maybe of what was given to the one before.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self.name = f"__{rank}_0.distcp"
        self._path = path / self.name
        self._lock = threading.Lock()
        self._offset = 0
        self._written: list[Written] = []
        self._behind = WriteBehind()
        try:
            self._file = self._path.open("xb", buffering=0)
        except OSError as error:
            raise self._error(error, self.name, 0) from error

    def write(self, stretch: Stretch, values: torch.Tensor) -> None:
        """The values of a stretch, `[stop - start]` in host memory."""
        for box in stretch.boxes():
            stream = io.BytesIO()
            # for this thread alone: CRCs take most of the time, and the manifest has a checksum
            with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                torch.save(_alone(box.view(values, stretch.start)), stream)
            self._append(_shard(stretch, box), stream)

    def write_objects(self, objects: Mapping[str, Any]) -> None:
        """Objects, under names that no other rank uses.

        Raises:
            UsageError: one cannot be pickled.
        """
        for name, value in objects.items():
            stream = io.BytesIO()
            try:
                torch.save(value, stream)
            except Exception as error:
                raise UsageError(f"{name!r} has something that cannot be pickled: {type(error).__name__}: {error}; leave it out") from error
            self._append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO), stream)

    def _append(self, item: WriteItem, stream: io.BytesIO) -> None:
        with self._lock:
            self._behind.call(functools.partial(self._write, item, stream))

    def _write(self, item: WriteItem, stream: io.BytesIO) -> None:
        with stream.getbuffer() as content:
            try:
                done = 0
                while done < content.nbytes:
                    done += self._file.write(content[done:])
            except OSError as error:
                raise self._error(error, item.index.fqn, content.nbytes) from error
            drop_cache(self._file.fileno(), self._offset, content.nbytes)  # and so have the drive write it now
            self._offset += content.nbytes
            self._written.append((item, Part(item.index.fqn, content.nbytes, xxhash.xxh3_64_intdigest(content))))

    def finish(self) -> list[Written]:
        """Sync the file; what is in it."""
        with self._lock:
            self._behind.wait()
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise self._error(error, self.name, 0) from error
        self._behind.close()
        return self._written

    def abandon(self) -> None:
        """Close the file, whatever is in it. Idempotent."""
        with self._lock:
            self._behind.close()
            self._file.close()

    def _error(self, error: OSError, name: str, wanted: int) -> StorageError:
        code = error.errno or 0
        offset = self._offset
        return StorageError(
            "write", name=name, path=str(self._path), offset=offset, wanted=wanted, got=0, errno=code, why=os.strerror(code)
        )


def _alone(part: torch.Tensor) -> torch.Tensor:
    """A part of a tensor as a tensor of its own, for `torch.save` writes the whole storage; in the same memory if it can."""
    part = part.contiguous()
    return torch.from_numpy(part.view(-1).view(torch.uint8).numpy()).view(part.dtype).view(part.shape)


def _shard(stretch: Stretch, box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype=stretch.dtype), torch.Size(stretch.shape))
    return WriteItem(MetadataIndex(stretch.name, box.offsets), WriteItemType.SHARD, tensor_data=data)


def finish_folder(path: Path, written: Mapping[str, Sequence[Written]]) -> dict[str, Sequence[Part]]:
    """Write what `torch.distributed.checkpoint` looks for, `.metadata`, given what is in the file of each rank.

    Returns:
        The parts of all files.
    """
    plans, results, files = [], [], dict[str, Sequence[Part]]()
    for name, found in written.items():
        offset = 0
        plans.append(SavePlan([item for item, _ in found]))
        files[name] = [part for _, part in found]
        for item, part in found:
            results.append(WriteResult(item.index, part.nbytes, _StorageInfo(name, offset, part.nbytes)))
            offset += part.nbytes
    _, metadata = create_default_global_save_plan(plans)
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata, [results])
    return files | {".metadata": [part_of(path / ".metadata")]}
