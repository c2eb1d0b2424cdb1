"""The optimizer step on flat slices of a unit: which optimizers, the split master, the layout of their state."""

from ._chunk import ChunkStepper, StepRange
from ._kernels import CUT_NUMEL, first_nonfinite, step_range
from ._layout import CHUNK_MULTIPLE, ChunkLayout, ChunkViews, chunk_layout
from ._spec import Group, OptimizerSpec, from_config, from_torch, state_fields
from ._split import BLOCK_NUMEL, merge_, round_, round_bf16, split_

__all__ = [
    "BLOCK_NUMEL",
    "CHUNK_MULTIPLE",
    "CUT_NUMEL",
    "ChunkLayout",
    "ChunkStepper",
    "ChunkViews",
    "Group",
    "OptimizerSpec",
    "StepRange",
    "chunk_layout",
    "first_nonfinite",
    "from_config",
    "from_torch",
    "merge_",
    "round_",
    "round_bf16",
    "split_",
    "state_fields",
    "step_range",
]
