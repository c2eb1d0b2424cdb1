"""Folders of safetensors: one file, or several with `model.safetensors.index.json`, a stretch at a time.

[Note: No library] A file is 8 bytes with the length of a header, the header in JSON, and the bytes of each tensor, contiguous. The library
writes and reads whole tensors or maps whole files; here neither is wanted, and what is needed of the format is less than a page.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from ..errors import StorageError, UsageError
from ..io import drop_cache
from ..swap import FileMap
from ._boxes import Box, boxes

__all__ = ["Entry", "SafetensorsFolder", "SafetensorsWriter"]

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_TEMPORARY = ".tmp-export"
_MAX_HEADER_NBYTES = 100_000_000  # as the library


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a folder."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where its bytes are."""

    path: Path
    offset: int
    entry: Entry


class SafetensorsWriter:
    """Writes the tensors of a model into `folder`, in place of what was exported there before. `create`, then `write` by any number of
    processes, then `sync` by each, then `publish`.

    Args:
        ties: other names of tensors, by that under which they are stored: in the metadata, where the library looks for them.
        texts: other files of the folder, by name.
        filename: of a model that fits in one file; of others `-00001-of-0000N` is added.
        max_shard_nbytes: of a file, unless one tensor is larger.

    Raises:
        UsageError: a dtype that the format does not have.
    """

    def __init__(
        self,
        folder: Path,
        entries: Sequence[Entry],
        *,
        ties: Mapping[str, str],
        texts: Mapping[str, str] = MappingProxyType({}),
        filename: str = "model.safetensors",
        max_shard_nbytes: int,
    ) -> None:
        if max_shard_nbytes < 1:
            raise UsageError(f'max_shard_size: {max_shard_nbytes} bytes hold no tensor; use for example "5GB"')
        self.folder = folder
        self._filename = filename
        self.nbytes = sum(e.nbytes for e in entries)
        shards = list(_cut(entries, max_shard_nbytes))
        self._headers: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._places: dict[str, _Place] = {}
        for number, shard in enumerate(shards, 1):
            name = filename if len(shards) == 1 else f"{_stem(filename)}-{number:05}-of-{len(shards):05}.safetensors"
            self._add(name, shard, ties)
        self._texts = dict(texts)
        if len(shards) > 1:
            weights = {name: place.path.name.removesuffix(_TEMPORARY) for name, place in self._places.items()}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weights.items()))}
            self._texts[f"{filename}.index.json"] = json.dumps(index, indent=2) + "\n"  # the last that gets its name

    def _add(self, name: str, shard: Iterable[Entry], ties: Mapping[str, str]) -> None:
        stop, spans = 0, []
        for entry in sorted(shard, key=lambda e: -e.dtype.itemsize):  # so each begins at a multiple of its element
            if entry.dtype not in _NAMES:
                raise UsageError(f"{entry.name!r} is {entry.dtype}, which safetensors has not; export with another dtype")
            spans.append((entry, stop, stop := stop + entry.nbytes))
        here = {entry.name for entry, _, _ in spans}
        header: dict[str, object] = {"__metadata__": {"format": "pt"} | {other: kept for other, kept in ties.items() if kept in here}}
        header |= {e.name: {"dtype": _NAMES[e.dtype], "shape": e.shape, "data_offsets": [first, last]} for e, first, last in spans}
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 8) * 8)
        self._headers[name] = len(text).to_bytes(8, "little") + text
        self._sizes[name] = len(self._headers[name]) + stop
        path = self.folder / (name + _TEMPORARY)
        self._places |= {e.name: _Place(path, len(self._headers[name]) + first, e) for e, first, _ in spans}

    def create(self) -> None:
        """Make the files, at their full size.

        Raises:
            StorageError: no room.
        """
        with _named(self.folder, self.folder.name, self.nbytes):
            self.folder.mkdir(parents=True, exist_ok=True)
        for name, header in self._headers.items():
            path = self.folder / (name + _TEMPORARY)
            with _named(path, name, self._sizes[name]), path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, self._sizes[name])
                file.write(header)
        for name, text in self._texts.items():
            path = self.folder / (name + _TEMPORARY)
            with _named(path, name, len(text)), path.open("w", encoding="utf-8") as texts:
                texts.write(text)

    def write(self, name: str, values: torch.Tensor, start: int = 0, *, stride: Sequence[int] | None = None) -> None:
        """Elements of a tensor from `start` on, in the order of a memory with these strides; default: contiguous. In any dtype."""
        place = self._places[name]
        entry = place.entry
        if stride is None or tuple(stride) == torch.empty(entry.shape, device="meta").stride():
            content = memoryview(values.to(entry.dtype).contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            with _named(place.path, name, content.nbytes), place.path.open("r+b", buffering=0) as file:
                offset, nbytes = file.seek(place.offset + start * entry.dtype.itemsize), content.nbytes
                while content.nbytes:
                    content = content[file.write(content) :]
                drop_cache(file.fileno(), offset, nbytes)  # and so have the drive write it now
            return
        whole = _mapped(place)
        for box in boxes(entry.shape, stride, start, start + values.numel()):
            _part(whole, box).copy_(box.view(values, start))

    def sync(self) -> None:
        """Make what this process wrote durable."""
        for name in (*self._headers, *self._texts):
            path = self.folder / (name + _TEMPORARY)
            with _named(path, name, self._sizes.get(name, 0)), path.open("rb") as file:
                os.fsync(file.fileno())

    def publish(self) -> None:
        """Give the files their names, texts first but for the index, and remove those of another export."""
        with _named(self.folder, self.folder.name, self.nbytes):
            self._publish()

    def _publish(self) -> None:
        index = f"{self._filename}.index.json"
        kept = {*self._headers, *self._texts}
        for name in sorted(kept, key=lambda name: (name == index, name not in self._texts, name)):
            (self.folder / (name + _TEMPORARY)).rename(self.folder / name)
        digits = "[0-9]" * 5
        for pattern in (self._filename, index, f"{_stem(self._filename)}-{digits}-of-{digits}.safetensors"):
            for path in self.folder.glob(pattern):
                if path.name not in kept:
                    path.unlink()

    def abandon(self) -> None:
        """Remove what was written."""
        for name in (*self._headers, *self._texts):
            with contextlib.suppress(OSError):  # what went wrong before says more
                (self.folder / (name + _TEMPORARY)).unlink()


class SafetensorsFolder:
    """Reads a folder of safetensors, or one file.

    Attributes:
        entries: by name.

    Raises:
        UsageError: there are none; StorageError: a file is missing, too short, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._places: dict[str, _Place] = {}
        self._maps: dict[Path, FileMap] = {}
        for file in self._files(path):
            self._places |= {place.entry.name: place for place in _read_header(file)}
        self.entries = {name: place.entry for name, place in self._places.items()}

    @staticmethod
    def _files(path: Path) -> list[Path]:
        if path.is_file():
            return [path]
        found = sorted(path.glob("*.safetensors"))
        if (path / "model.safetensors") in found:  # before an index, as `transformers`
            return [path / "model.safetensors"]
        index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None)
        if index is not None:
            try:
                weights: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                return [path / name for name in dict.fromkeys(weights.values())]
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                why = f"it is no index of safetensors: {type(error).__name__}: {error}"
                raise _short(index, index.name, 0, index.stat().st_size, 0, why) from error
        if len(found) != 1:
            there = ", ".join(p.name for p in found) or "none"
            raise UsageError(f"{path} has no model.safetensors and no index of several files; safetensors there: {there}")
        return found

    def map(self, name: str) -> torch.Tensor | None:
        """A tensor over its bytes in the file, see `FileMap`; None where that cannot be: it has none, or they are not aligned.

        Raises:
            StorageError: the file became shorter, or is gone.
        """
        place = self._places[name]
        entry = place.entry
        if not entry.nbytes or place.offset % entry.dtype.itemsize:
            return None
        mapped = self._maps.get(place.path) or self._maps.setdefault(place.path, FileMap(place.path))
        if place.offset + entry.nbytes > mapped.nbytes:
            raise _short(place.path, name, place.offset, entry.nbytes, max(0, mapped.nbytes - place.offset))
        return mapped.tensor(place.offset, entry.dtype, entry.shape, name=name)

    def read(self, name: str) -> torch.Tensor:
        """A tensor, in memory of its own."""
        place = self._places[name]
        entry = place.entry
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        content = memoryview(tensor.view(-1).view(torch.uint8).numpy()) if entry.nbytes else memoryview(b"")  # type: ignore[arg-type]
        done = 0
        with place.path.open("rb", buffering=0) as file:
            file.seek(place.offset)
            while done < entry.nbytes and (read := file.readinto(content[done:])):
                done += read
        if done < entry.nbytes:
            raise _short(place.path, name, place.offset, entry.nbytes, done)
        return tensor


def _read_header(path: Path) -> Iterator[_Place]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            content = dict(json.loads(file.read(min(length, _MAX_HEADER_NBYTES))))
    except FileNotFoundError as error:
        raise _short(path, path.name, 0, 0, 0, "it is missing") from error
    except (ValueError, TypeError) as error:
        raise _short(path, path.name, 0, 8, 0, f"it is no file of safetensors: {error}") from error
    for name, found in content.items():
        if name != "__metadata__":
            if found["dtype"] not in _DTYPES:
                known = ", ".join(_DTYPES)
                raise UsageError(f"{name!r} in {path} is {found['dtype']}, which is not supported; convert it to one of {known}")
            entry = Entry(name, _DTYPES[found["dtype"]], tuple(found["shape"]))
            first, last = found["data_offsets"]
            if last - first != entry.nbytes or 8 + length + last > size:
                raise _short(path, name, 8 + length + first, entry.nbytes, max(0, min(last, size - 8 - length) - first))
            yield _Place(path, 8 + length + first, entry)


def _short(path: Path, name: str, offset: int, wanted: int, got: int, why: str = "the file is too short") -> StorageError:
    return StorageError("read", name=name, path=str(path), offset=offset, wanted=wanted, got=got, why=why)


def _cut(entries: Sequence[Entry], max_nbytes: int) -> Iterator[list[Entry]]:
    shard: list[Entry] = []
    nbytes = 0
    for entry in entries:
        if shard and nbytes + entry.nbytes > max_nbytes:
            yield shard
            shard, nbytes = [], 0
        shard.append(entry)
        nbytes += entry.nbytes
    yield shard


def _stem(filename: str) -> str:
    return filename.removesuffix(".safetensors")


def _mapped(place: _Place) -> torch.Tensor:
    """The tensor in its file: what is written to it is written there."""
    shape = (place.entry.nbytes,)
    raw = torch.from_numpy(np.memmap(place.path, mode="r+", offset=place.offset, shape=shape, dtype=np.uint8))
    return raw.view(place.entry.dtype).view(place.entry.shape)


def _part(whole: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        whole = whole.narrow(dim, offset, length)
    return whole


@contextlib.contextmanager
def _named(path: Path, name: str, wanted: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        code = error.errno or errno.EIO
        raise StorageError("write", name=name, path=str(path), offset=0, wanted=wanted, got=0, errno=code, why=os.strerror(code)) from error
