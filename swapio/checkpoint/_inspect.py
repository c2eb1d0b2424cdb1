"""What is in a checkpoint."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from ..errors import StorageError
from ._folder import Progress, damage, latest_tag, leftovers, resolve, tags
from ._names import ENGINE
from ._tensors import Stored

__all__ = ["inspect"]


def inspect(
    checkpoint: str | os.PathLike[str], *, tag: str | None = None, verify: bool = False, progress: Progress = None
) -> dict[str, Any]:
    """What is in a checkpoint, for JSON. Load from folders that you trust: objects are unpickled.

    Args:
        checkpoint: the folder of a checkpoint, or the one that `save_checkpoint` was given.
        tag: default: what the file `latest` names.
        verify: read every byte and compare it with what was written.
        progress: is told the bytes that were read, and those that will be.

    Returns:
        Where it is and what is beside it; `damage`: what is missing, too short or changed, as texts; and, unless that prevents it, `step`,
        `world_size`, `model` (bytes and elements by dtype, as it is trained), `optimizer` (what it keeps), `nbytes` on the drive.

    Raises:
        UsageError: there is no such checkpoint.
    """
    path = resolve(Path(checkpoint), tag)
    directory = path.parent
    found: dict[str, Any] = {
        "path": str(path),
        "tag": path.name,
        "latest": latest_tag(directory),
        "tags": tags(directory),
        "leftovers": leftovers(directory),
        "nbytes": sum(p.stat().st_size for p in path.iterdir()),
        "verified": verify,
    }
    try:
        wrong = list(damage(path, content=verify, progress=progress))
    except StorageError as error:  # the manifest itself
        wrong = [error]
    found["damage"] = [str(error) for error in wrong]
    try:
        return found | _contents(Stored(path))
    except Exception as error:
        if not wrong:
            raise
        return found | {"unreadable": f"{type(error).__name__}: {error}"}


def _contents(stored: Stored) -> dict[str, Any]:
    objects = stored.get(ENGINE)
    sizes: dict[str, dict[str, int]] = {}
    for entry in objects["entries"].values():
        of_dtype = sizes.setdefault(str(entry["dtype"]).removeprefix("torch."), {"tensors": 0, "numel": 0, "nbytes": 0})
        numel = math.prod(entry["shape"])
        of_dtype["tensors"] += 1
        of_dtype["numel"] += numel
        of_dtype["nbytes"] += numel * entry["dtype"].itemsize
    optimizer = objects["optimizer"]
    return {
        "step": objects["counters"]["global_steps"],
        "samples": objects["counters"]["global_samples"],
        "world_size": objects["world_size"],
        "model": sizes,
        "trained_numel": sum(math.prod(e["shape"]) for e in objects["entries"].values() if e["trained"]),
        "left_out": objects["left_out"],
        "optimizer": None if optimizer is None else optimizer["fields"],
        "scheduler": None if objects["scheduler"] is None else objects["scheduler"]["type"],
        "client_state": objects["client_keys"] if "client_keys" in objects else sorted(map(str, objects["client_state"])),
    }
