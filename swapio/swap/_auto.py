"""How much host memory this process may take, from what the machine and its cgroup leave free."""

from __future__ import annotations

from pathlib import Path

import psutil

__all__ = ["auto_host_memory"]

_SHARE = 0.8  # the rest is for activations, the allocator and other programs
_NO_LIMIT = 1 << 60


def auto_host_memory() -> int:
    """Bytes: 0.8 of the smaller of available memory and what the cgroup (v2 or v1) has left."""
    free = int(psutil.virtual_memory().available)
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            used = Path(used_file).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < _NO_LIMIT:
            free = min(free, max(int(limit) - int(used), 0))
    return int(free * _SHARE)
