"""From a config to the store it describes."""

from __future__ import annotations

from typing import Any

from ..config import SwapioConfig
from ._manager import SwapManager

__all__ = ["manager_arguments", "open_manager"]


def manager_arguments(settings: SwapioConfig) -> dict[str, Any]:
    """What a config says about the store, as arguments of `SwapManager`."""
    paths: list[str] = []
    for section in (settings.zero_optimization.offload_param, settings.zero_optimization.offload_optimizer):
        if section.device == "nvme":
            paths += [p for p in section.paths if p not in paths]
    own = settings.swapio
    return {
        "paths": paths,
        "host_memory": own.host_memory,
        "device": own.device,
        "device_memory": own.device_memory,
        "backend": own.backend,
        "checksums": own.checksums,
        "block_nbytes": settings.aio.block_size,
        "queue_depth": settings.aio.queue_depth,
        "timeout_s": own.timeout_s,
    }


def open_manager(settings: SwapioConfig) -> SwapManager:
    """A manager as a config says; the caller closes it.

    Raises:
        ConfigError, StorageError: as `SwapManager`.
    """
    return SwapManager(**manager_arguments(settings))
