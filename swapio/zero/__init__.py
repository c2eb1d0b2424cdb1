"""ZeRO: units of parameters that come just in time, their gradients, and the optimizer step over them."""

from ._away import managed
from ._construct import ConstructionSet, Lent, constructed, give_back, lend, let_go, shares_constructed
from ._full import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from ._gathered import GatheredParameters, register_external_parameter, unregister_external_parameter
from ._init import Init, constructing_dtype
from ._layout import UnitLayout, UnitSpec, find_units
from ._norms import Gradients
from ._partition import Partition
from ._plan import Kept, Movable, resident_set
from ._portable import PortableState, Portion
from ._quiet import uninterrupted
from ._ranks import Ranks
from ._snapshot import Snapshot
from ._step import CHUNK_NUMEL, ChunkedStep, chunk_layouts
from ._unit import Unit
from ._units import UnitSet
from ._update import StepTiming
from ._world import world

__all__ = [
    "CHUNK_NUMEL",
    "ChunkedStep",
    "ConstructionSet",
    "GatheredParameters",
    "Gradients",
    "Init",
    "Kept",
    "Lent",
    "Movable",
    "Partition",
    "PortableState",
    "Portion",
    "Ranks",
    "Snapshot",
    "StepTiming",
    "Unit",
    "UnitLayout",
    "UnitSet",
    "UnitSpec",
    "chunk_layouts",
    "constructed",
    "constructing_dtype",
    "find_units",
    "give_back",
    "lend",
    "let_go",
    "managed",
    "register_external_parameter",
    "resident_set",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "shares_constructed",
    "uninterrupted",
    "unregister_external_parameter",
    "world",
]
