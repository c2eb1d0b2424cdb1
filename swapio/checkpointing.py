"""Activation checkpointing by DeepSpeed's names: `deepspeed.checkpointing.checkpoint(function, *args)` and what configures it.

`checkpoint_blocks` is our own: it checkpoints the blocks of a model without a change to its code.
"""

from .activation import CheckpointedBlocks, checkpoint, checkpoint_blocks, configure, is_configured, reset

__all__ = ["CheckpointedBlocks", "checkpoint", "checkpoint_blocks", "configure", "is_configured", "reset"]
