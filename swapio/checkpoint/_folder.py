"""Checkpoints as folders: whole ones under their tag, half-written ones under another name, and which one is the latest.

[Note: Atomic] A checkpoint is written in `<tag>.tmp-<random>`: data files, `.metadata`, and last the manifest with sizes and checksums,
all of them synced. One rename gives it its name, then `latest` is replaced by another rename. Whoever dies in between leaves a folder
that is skipped by its name. Under a tag that exists already, old and new change their names in one system call where the filesystem can.
What is removed gets such a name first.

[Note: Parts] A file is a row of parts: one per stretch of a tensor, or the whole file. The manifest has the size and checksum of each, so
damage has the name of a tensor.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from ..errors import StorageError, UsageError
from ._deepspeed import is_deepspeed

__all__ = [
    "Check", "Part", "check_free", "check_tag", "checker", "damage", "find", "latest_tag", "leftovers", "listed", "part_of", "publish",
    "remove_old", "resolve", "set_latest", "tags", "temporary_folder", "verify",
]  # fmt: skip

logger = logging.getLogger("swapio")

_MANIFEST = "manifest.json"
_LATEST = "latest"
_TEMPORARY = ".tmp-"
_FORMAT = 2
_BLOCK_NBYTES = 1 << 20
_MAX_TAG_NBYTES = 200  # what is added to it has room in a name
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Progress = Callable[[int, int], None] | None
"""Is told the bytes that are done, and those that there are."""

Check = Callable[[str, int, memoryview], None]
"""Is given the file, the offset and the content of a part that was read; raises `StorageError` if that is not what was written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file: what is in it, its size and its xxh3 checksum. The parts of a file follow each other without gaps."""

    name: str
    nbytes: int
    xxh3_64: int


def check_tag(tag: str) -> str:
    """

    Raises:
        UsageError: it cannot be the name of a folder.
    """
    nbytes = len(tag.encode(errors="replace"))
    if not 1 <= nbytes <= _MAX_TAG_NBYTES or re.search(r"[/\0\ud800-\udfff]", tag) or tag in (".", "..", _LATEST) or _TEMPORARY in tag:
        raise UsageError(f'tag={tag!r} cannot be the name of a folder beside "latest"; use one like "global_step100"')
    if tag != tag.strip():
        raise UsageError(f"tag={tag!r} begins or ends with white space, which is not kept in the file 'latest'; use {tag.strip()!r}")
    return tag


def check_free(path: Path) -> None:
    """

    Raises:
        UsageError: something that is no checkpoint, and would be removed, has the name.
    """
    if not os.path.lexists(path) or (path / _MANIFEST).is_file() or is_deepspeed(path) or (_is_folder(path) and not any(path.iterdir())):
        return
    raise UsageError(f"{path} is there and is no checkpoint: it would be replaced; use another tag, or remove it")


def temporary_folder(directory: Path, tag: str, token: int) -> Path:
    return directory / f"{tag}{_TEMPORARY}{token:08x}"


def leftovers(directory: Path) -> list[str]:
    """What saves that did not end have left."""
    return sorted(p.name for p in directory.iterdir() if _TEMPORARY in p.name) if directory.is_dir() else []


def tags(directory: Path) -> list[str]:
    """Whole checkpoints, the oldest first."""
    return [tag for _, tag in sorted(_saved(directory))]


def _saved(directory: Path) -> list[tuple[int, str]]:
    """When each checkpoint was saved, and its tag."""
    manifests = directory.glob(f"*/{_MANIFEST}")
    return [(_saved_ns(p), p.parent.name) for p in manifests if _TEMPORARY not in p.parent.name]


def _saved_ns(manifest: Path) -> int:
    """When it was saved, whatever was copied or touched since; of one that does not say, when its manifest was changed."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return int(json.loads(manifest.read_bytes())["saved_ns"])
    return manifest.stat().st_mtime_ns


def listed(directory: Path) -> str:
    """The tags that are there, for people; those of DeepSpeed too."""
    others = sorted(p.name for p in directory.iterdir() if is_deepspeed(p)) if directory.is_dir() else []
    return ", ".join(map(repr, tags(directory) + others)) or "none"


def latest_tag(directory: Path) -> str | None:
    """What was saved last with `save_latest`."""
    try:
        return (directory / _LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def find(directory: Path, tag: str) -> Path:
    """

    Raises:
        UsageError: there is no such checkpoint; the message lists those that are there.
    """
    if (directory / tag / _MANIFEST).is_file() and _TEMPORARY not in tag:
        return directory / tag
    if is_deepspeed(directory / tag):
        raise UsageError(f"{directory / tag} is DeepSpeed's: load it with engine.load_checkpoint, then save it with engine.save_checkpoint")
    raise UsageError(f"{directory} has no checkpoint {tag!r}; it has {listed(directory)}")


def resolve(checkpoint: Path, tag: str | None = None) -> Path:
    """The folder of a checkpoint, given that folder or the one around it.

    Args:
        tag: default: what `latest` names.

    Raises:
        UsageError: there is none; the message lists those that are there.
    """
    if tag is None and (checkpoint / _MANIFEST).is_file() and _TEMPORARY not in checkpoint.name:
        return checkpoint
    if tag is None and is_deepspeed(checkpoint):
        return find(checkpoint.parent, checkpoint.name)
    tag = latest_tag(checkpoint) if tag is None else tag
    return find(checkpoint, _LATEST if tag is None else tag)  # no folder is called so: the error says what there is


def part_of(path: Path) -> Part:
    """A whole file as one part."""
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        return Part(path.name, nbytes, _digest(file, nbytes))


def _digest(file: BinaryIO, nbytes: int) -> int:
    digest = xxhash.xxh3_64()
    while nbytes and (block := file.read(min(nbytes, _BLOCK_NBYTES))):
        digest.update(block)
        nbytes -= len(block)
    return digest.intdigest()


def publish(temporary: Path, final: Path, files: Mapping[str, Sequence[Part]]) -> None:
    """Give a complete folder its name."""
    others = [1 + saved_ns for saved_ns, _ in _saved(final.parent)]
    saved_ns = max([time.time_ns(), *others])  # the newest one, even where the clock was set back
    named = {name: [[p.name, p.nbytes, f"{p.xxh3_64:016x}"] for p in parts] for name, parts in files.items()}
    content = {"format": _FORMAT, "tag": final.name, "saved_ns": saved_ns, "files": named}
    _write_synced(temporary / _MANIFEST, _sealed(content))
    _sync_folder(temporary)
    if final.exists():
        _exchange(temporary, final)
        _sync_folder(final.parent)
        _remove(temporary)
    else:
        temporary.rename(final)
    _sync_folder(final.parent)


def remove_old(directory: Path, *, keep_last: int, token: int) -> list[str]:
    """Remove all but the newest checkpoints and the one that `latest` names. What is not one of ours, whole and nothing else, stays."""
    removed = []
    for tag in tags(directory)[:-keep_last]:
        path = directory / tag
        if tag == latest_tag(directory):
            continue
        try:
            saved_as, files = _read_manifest(path)
            foreign = files.keys() ^ {p.name for p in path.iterdir() if p.name != _MANIFEST}
        except (OSError, UsageError) as error:
            logger.warning("%s is old, but stays: %s", path, error)
            continue
        if foreign or saved_as != tag:
            logger.warning("%s is old, but stays, as it is not what was saved: %s", path, ", ".join(sorted(foreign)) or "its name")
            continue
        aside = temporary_folder(directory, tag, token)
        path.rename(aside)
        _sync_folder(directory)
        _remove(aside)
        removed.append(tag)
    return removed


def set_latest(directory: Path, tag: str) -> None:
    temporary = directory / f"{_LATEST}{_TEMPORARY}{time.monotonic_ns():x}"
    try:
        _write_synced(temporary, tag)
        temporary.rename(directory / _LATEST)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(directory)


def verify(path: Path, *, share: int = 0, num_shares: int = 1, but: Container[str] = ()) -> None:
    """Compare sizes of all files, and the content of this share of their parts, with the manifest.

    Args:
        but: names of parts that are not read.

    Raises:
        StorageError: a file is missing, too short or too long, or a part has changed since it was written.
    """
    _, files = _read_manifest(path)
    for error in _damage(path, files, lambda number, part: number % num_shares == share and part.name not in but):
        raise error


def checker(path: Path) -> Check:
    """Compare parts with the manifest as they are read; here sizes of all files, and `.metadata`, which says what is to be read.

    Raises:
        StorageError: as `verify`.
    """
    _, files = _read_manifest(path)
    for error in _damage(path, files, lambda _, part: part.name == ".metadata"):
        raise error
    known: dict[tuple[str, int], Part] = {}
    for name, parts in files.items():
        offset = 0
        for part in parts:
            known[name, offset] = part
            offset += part.nbytes

    def check(name: str, offset: int, content: memoryview) -> None:
        part, digest = known[name, offset], xxhash.xxh3_64_intdigest(content)
        if digest != part.xxh3_64:
            raise _changed(path / name, offset, part, digest)

    return check


def damage(path: Path, *, content: bool = True, progress: Progress = None) -> Iterator[StorageError]:
    """All that is not as the manifest says.

    Args:
        content: read everything; else sizes alone.
        progress: is told the bytes that were read, and those that will be.
    """
    _, files = _read_manifest(path)
    return _damage(path, files, (lambda *_: True) if content else None, progress)


def _damage(
    path: Path, files: Mapping[str, Sequence[Part]], is_read: Callable[[int, Part], bool] | None, progress: Progress = None
) -> Iterator[StorageError]:
    """
    Args:
        is_read: tells of which parts, by their number in a file; None: none, sizes alone.
    """
    total, done = sum(p.nbytes for parts in files.values() for p in parts), 0
    for name, parts in files.items():
        file_path, nbytes = path / name, sum(p.nbytes for p in parts)
        try:
            found = file_path.stat().st_size
        except FileNotFoundError:
            yield _wrong(file_path, nbytes, 0, "it is missing")
            continue
        if found != nbytes:
            yield _wrong(file_path, nbytes, found, "it has another size than when it was written")
        if is_read is None:
            continue
        offset = 0
        with file_path.open("rb") as file:
            for number, part in enumerate(parts):
                if offset < found and is_read(number, part):
                    file.seek(offset)
                    if (digest := _digest(file, part.nbytes)) != part.xxh3_64:
                        yield _changed(file_path, offset, part, digest)
                offset += part.nbytes
                done += part.nbytes
                if progress is not None:
                    progress(done, total)


def _changed(path: Path, offset: int, part: Part, digest: int) -> StorageError:
    why = f"it is not what was written: xxh3 {digest:016x} instead of {part.xxh3_64:016x}"
    return _wrong(path, part.nbytes, part.nbytes, why, name=part.name, offset=offset)


def _sealed(content: Mapping[str, Any]) -> str:
    """As JSON with a checksum."""
    return json.dumps(dict(content) | {"xxh3_64": xxhash.xxh3_64_hexdigest(json.dumps(content).encode())})


def _read_manifest(path: Path) -> tuple[str, dict[str, list[Part]]]:
    """The tag under which it was saved, and the parts of each file."""
    manifest = path / _MANIFEST
    text = manifest.read_bytes()
    try:
        content = json.loads(text)
        version = content["format"]
        if version != _FORMAT:
            raise UsageError(f"{manifest} has the format {version!r}; this version of swapio reads {_FORMAT}")
        files = {str(f): [Part(str(n), int(b), int(x, 16)) for n, b, x in parts] for f, parts in content["files"].items()}
        if _sealed({k: v for k, v in content.items() if k != "xxh3_64"}).encode() != text:
            raise ValueError("its checksum is another")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _wrong(manifest, len(text), 0, f"it is damaged: {type(error).__name__}: {error}") from error
    return str(content["tag"]), files


def _wrong(path: Path, wanted: int, got: int, why: str, *, name: str | None = None, offset: int = 0) -> StorageError:
    return StorageError("read", name=name or path.name, path=str(path), offset=offset, wanted=wanted, got=got, errno=errno.EIO, why=why)


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


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    """A folder; of a link to one the link."""
    shutil.rmtree(path) if _is_folder(path) else path.unlink()


def _exchange(temporary: Path, final: Path) -> None:
    """Swap the names of two folders at once; where the system cannot, there is a moment with neither under the final name."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is not None and not renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE):
        return
    aside = temporary.with_name(f"{temporary.name}-old")
    final.rename(aside)
    temporary.rename(final)
    aside.rename(temporary)
