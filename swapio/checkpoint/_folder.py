"""Checkpoints as folders: whole ones under their tag, half-written ones under another name, and which one is the latest.

[Note: Atomic] A checkpoint is written in `<tag>.tmp-<random>`: data files, `.metadata`, and last the manifest with size and checksum of
each, all of them synced. One rename gives it its name, then `latest` is replaced by another rename. Whoever dies in between leaves a folder
that is skipped by its name. Under a tag that exists already, old and new change their names in one system call where the filesystem can.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import xxhash

from ..errors import StorageError, UsageError

__all__ = [
    "FileSum", "check_tag", "find", "latest_tag", "leftovers", "publish", "set_latest", "sum_of", "tags", "temporary_folder", "verify",
]  # fmt: skip

_MANIFEST = "manifest.json"
_LATEST = "latest"
_TEMPORARY = ".tmp-"
_FORMAT = 1
_BLOCK_NBYTES = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@dataclasses.dataclass(frozen=True, slots=True)
class FileSum:
    """Size and xxh3 checksum of a file."""

    nbytes: int
    xxh3_64: int


def check_tag(tag: str) -> str:
    """

    Raises:
        UsageError: it cannot be the name of a folder.
    """
    if not re.fullmatch(r"[^/\0]{1,200}", tag) or tag in (".", "..", _LATEST) or _TEMPORARY in tag:
        raise UsageError(f'tag={tag!r} cannot be the name of a folder beside "latest"; use one like "global_step100"')
    return tag


def temporary_folder(directory: Path, tag: str, token: int) -> Path:
    return directory / f"{tag}{_TEMPORARY}{token:08x}"


def leftovers(directory: Path) -> list[str]:
    """What saves that did not end have left."""
    return sorted(p.name for p in directory.iterdir() if _TEMPORARY in p.name) if directory.is_dir() else []


def tags(directory: Path) -> list[str]:
    """Whole checkpoints, the oldest first."""
    manifests = [p for p in directory.glob(f"*/{_MANIFEST}") if _TEMPORARY not in p.parent.name]
    return [p.parent.name for p in sorted(manifests, key=lambda p: (p.stat().st_mtime, p.parent.name))]


def latest_tag(directory: Path) -> str | None:
    """What was saved last with `save_latest`."""
    try:
        return (directory / _LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None


def find(directory: Path, tag: str) -> Path:
    """

    Raises:
        UsageError: there is no such checkpoint; the message lists those that are there.
    """
    if (directory / tag / _MANIFEST).is_file() and _TEMPORARY not in tag:
        return directory / tag
    there = tags(directory)
    raise UsageError(f"{directory} has no checkpoint {tag!r}; it has {', '.join(map(repr, there)) or 'none'}")


def sum_of(path: Path) -> FileSum:
    digest, nbytes = xxhash.xxh3_64(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_NBYTES):
            digest.update(block)
            nbytes += len(block)
    return FileSum(nbytes, digest.intdigest())


def publish(temporary: Path, final: Path, sums: Mapping[str, FileSum]) -> None:
    """Give a complete folder its name."""
    manifest = {"format": _FORMAT, "tag": final.name, "files": {name: dataclasses.asdict(s) for name, s in sums.items()}}
    _write_synced(temporary / _MANIFEST, json.dumps(manifest, indent=1))
    _sync_folder(temporary)
    if final.exists():
        _exchange(temporary, final)
        _sync_folder(final.parent)
        shutil.rmtree(temporary)
    else:
        temporary.rename(final)
    _sync_folder(final.parent)


def set_latest(directory: Path, tag: str) -> None:
    temporary = directory / f"{_LATEST}{_TEMPORARY}{time.monotonic_ns():x}"
    _write_synced(temporary, tag)
    temporary.rename(directory / _LATEST)
    _sync_folder(directory)


def verify(path: Path, *, share: int = 0, num_shares: int = 1) -> None:
    """Compare sizes of all files, and the content of this share of them, with the manifest.

    Raises:
        StorageError: a file is missing, too short or too long, or has changed since it was written.
    """
    for number, (name, wanted) in enumerate(_read_manifest(path).items()):
        try:
            nbytes = (path / name).stat().st_size
            if nbytes != wanted.nbytes:
                raise _wrong(path / name, wanted.nbytes, nbytes, "it has another size than when it was written")
            if number % num_shares == share and (found := sum_of(path / name)) != wanted:
                why = f"it is not what was written: xxh3 {found.xxh3_64:016x} instead of {wanted.xxh3_64:016x}"
                raise _wrong(path / name, wanted.nbytes, nbytes, why)
        except FileNotFoundError as error:
            raise _wrong(path / name, wanted.nbytes, 0, "it is missing") from error


def _read_manifest(path: Path) -> dict[str, FileSum]:
    manifest = path / _MANIFEST
    try:
        content = json.loads(manifest.read_bytes())
        files = {str(name): FileSum(int(s["nbytes"]), int(s["xxh3_64"])) for name, s in content["files"].items()}
        version = content["format"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _wrong(manifest, manifest.stat().st_size, 0, f"it is damaged: {type(error).__name__}: {error}") from error
    if version != _FORMAT:
        raise UsageError(f"{manifest} has the format {version!r}; this version of swapio reads {_FORMAT}")
    return files


def _wrong(path: Path, wanted: int, got: int, why: str) -> StorageError:
    return StorageError("read", name=path.name, path=str(path), offset=0, wanted=wanted, got=got, errno=errno.EIO, why=why)


def _write_synced(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _exchange(temporary: Path, final: Path) -> None:
    """Swap the names of two folders at once; where the system cannot, there is a moment with neither under the final name."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is not None and not renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE):
        return
    aside = temporary.with_name(f"{temporary.name}-old")
    final.rename(aside)
    temporary.rename(final)
    aside.rename(temporary)
