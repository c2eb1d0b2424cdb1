"""Which backend for which paths."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence

from ..errors import ConfigError, StorageError
from ._aiofiles import AiofilesStorage
from ._checksum import ChecksummedStorage
from ._direct import DirectStorage
from ._file import UNSUPPORTED, FileStorage
from ._filesystem import filesystem_of
from ._memory import MemoryStorage
from ._mmap import MmapStorage
from ._storage import Choice, Storage
from ._striped import StripedStorage, measure_speeds

__all__ = ["BACKENDS", "FILE_BACKENDS", "open_storage"]

_log = logging.getLogger("swapio")

FILE_BACKENDS: dict[str, type[FileStorage]] = {cls.kind: cls for cls in (DirectStorage, MmapStorage, AiofilesStorage)}
"""The best first."""

BACKENDS = ("auto", *FILE_BACKENDS, "memory")


def open_storage(paths: Sequence[str | os.PathLike[str]], *, backend: str = "auto", checksums: bool = False) -> Storage:
    """A storage in the given directories, or in memory; `choice` of what is returned says which backend and why.

    Args:
        paths: directories; several are striped by their speed, which is measured now (24 MiB are written to each).
        backend: `"auto"` takes the first of `direct`, `mmap`, `aiofiles` for which a real write and read succeed; `"memory"` needs no path.
        checksums: verify what is read, see `ChecksummedStorage`.

    Raises:
        ConfigError: an unknown backend, or no path for one that needs it; StorageError: a directory cannot be used.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend: {backend!r} is unknown; use one of {', '.join(BACKENDS)}", key="backend", value=backend)
    if not paths and backend not in ("auto", "memory"):
        raise ConfigError(f'paths: backend {backend!r} needs a directory; give one, or use backend="memory"', key="paths", value=[])
    if not paths or backend == "memory":
        memory = MemoryStorage()
        memory.choice = Choice("memory", "it was asked for" if backend == "memory" else "no path was given", "memory")
        return ChecksummedStorage(memory) if checksums else memory
    directories = [os.path.realpath(path) for path in paths]
    for twice in {directory for directory in directories if directories.count(directory) > 1}:
        _log.warning("%s is given more than once: a drive is no faster for that; give each drive once", twice)
    with contextlib.ExitStack() as undo:
        members: list[Storage] = []
        for path in paths:
            member = undo.enter_context(_open_one(path, backend))
            members.append(ChecksummedStorage(member) if checksums else member)
        storage = members[0] if len(members) == 1 else _striped(members)
        undo.pop_all()
    return storage


def _open_one(path: str | os.PathLike[str], backend: str) -> FileStorage:
    refusals: list[str] = []
    for kind in FILE_BACKENDS if backend == "auto" else [backend]:
        try:
            storage = FILE_BACKENDS[kind](path)
        except StorageError as error:
            if backend != "auto" or error.errno not in UNSUPPORTED or kind == "aiofiles":
                raise
            refusals.append(f"{kind} is refused ({os.strerror(error.errno)})")
            continue
        break
    filesystem = filesystem_of(path)
    reason = "it was asked for" if backend != "auto" else "; ".join([*refusals, "a real write and read succeeded"])
    storage.choice = Choice(storage.kind, reason, filesystem.type)
    if filesystem.is_memory:
        _log.warning("%s is %s: files there are RAM and count against the machine's memory; use a drive", path, filesystem.type)
    return storage


def _striped(members: list[Storage]) -> StripedStorage:
    storage = StripedStorage(members, weights=measure_speeds(members))
    shares = [weight / sum(storage.weights) for weight in storage.weights]
    choices = [(member.path, share, member.choice) for member, share in zip(members, shares, strict=True) if member.choice]
    storage.choice = Choice(
        backend=", ".join(dict.fromkeys(choice.backend for _, _, choice in choices)),
        reason="; ".join(f"{path}: {choice.reason}, {share:.0%} of the bytes by measured speed" for path, share, choice in choices),
        filesystem=", ".join(dict.fromkeys(choice.filesystem for _, _, choice in choices)),
    )
    return storage
