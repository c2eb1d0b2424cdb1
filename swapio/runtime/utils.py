"""What this process holds of the machine's memory."""

from __future__ import annotations

import logging

import psutil
import torch

from ..spec import format_nbytes

__all__ = ["see_memory_usage"]

logger = logging.getLogger("swapio")


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log `message` with the memory of this process and of the machine.

    Args:
        force: False: do nothing, as in DeepSpeed.
    """
    if not force:
        return
    machine = psutil.virtual_memory()
    facts = {
        "resident": psutil.Process().memory_info().rss,
        "machine used": machine.total - machine.available,
        "machine": machine.total,
    }
    if torch.cuda.is_available():
        facts |= {"GPU allocated": torch.cuda.memory_allocated(), "GPU peak": torch.cuda.max_memory_allocated()}
    logger.info("%s | %s", message, ", ".join(f"{name} {format_nbytes(nbytes)}" for name, nbytes in facts.items()))
