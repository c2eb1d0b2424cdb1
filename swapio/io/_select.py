"""Which backend for which paths."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import ConfigError
from ._direct import DirectStorage
from ._memory import MemoryStorage
from ._storage import Storage

__all__ = ["BACKENDS", "open_storage"]

BACKENDS = ("auto", "direct", "memory")


def open_storage(paths: Sequence[str | os.PathLike[str]], *, backend: str = "auto") -> Storage:
    """A storage in one directory, or in memory.

    Raises:
        ConfigError: an unknown backend, or a number of paths that cannot be used; StorageError: the directory cannot.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend: {backend!r} is unknown; use one of {', '.join(BACKENDS)}", key="backend", value=backend)
    if backend == "memory" or (backend == "auto" and not paths):
        return MemoryStorage()
    if len(paths) != 1:
        raise ConfigError(f"paths: {len(paths)} directories; give one (several are not supported yet)", key="paths", value=list(paths))
    return DirectStorage(paths[0])
