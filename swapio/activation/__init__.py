"""Activation checkpointing: recompute instead of keeping, and keep what is kept in host memory."""

from ._blocks import CheckpointedBlocks, checkpoint_blocks
from ._checkpoint import checkpoint
from ._configure import configure, is_configured, reset
from ._offload import HostOffload

__all__ = ["CheckpointedBlocks", "HostOffload", "checkpoint", "checkpoint_blocks", "configure", "is_configured", "reset"]
