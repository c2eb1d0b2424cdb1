"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import psutil

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and versions, ready for JSON."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else psutil.cpu_count(),
        "memory": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": importlib.metadata.version("torch"),
        "swapio": importlib.metadata.version("swapio"),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
