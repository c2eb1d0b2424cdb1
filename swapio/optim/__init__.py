"""The optimizer step on flat slices of a unit: which optimizers, the split master, the layout of their state."""

from ._chunk import ChunkStepper, StepRange
from ._kernels import first_nonfinite, step_range
from ._layout import CHUNK_MULTIPLE, ChunkLayout, ChunkViews, chunk_layout
from ._spec import CUT_NUMEL, Group, OptimizerSpec, from_config, from_torch, state_fields, with_state_dtype
from ._split import BLOCK_NUMEL, merge_, round_, round_bf16, split_
from ._state import SCALE_NUMEL, StateDtype

__all__ = [
    "BLOCK_NUMEL",
    "CHUNK_MULTIPLE",
    "CUT_NUMEL",
    "SCALE_NUMEL",
    "ChunkLayout",
    "ChunkStepper",
    "ChunkViews",
    "Group",
    "OptimizerSpec",
    "StateDtype",
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
    "with_state_dtype",
]
