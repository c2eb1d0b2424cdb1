"""ZeRO: units of parameters that come just in time, their gradients, and the optimizer step over them."""

from ._away import managed
from ._layout import UnitLayout, UnitSpec, find_units
from ._partition import Partition
from ._quiet import uninterrupted
from ._ranks import Ranks
from ._step import CHUNK_NUMEL, ChunkedStep, Gradients, chunk_layouts
from ._unit import Unit
from ._units import UnitSet

__all__ = [
    "CHUNK_NUMEL",
    "ChunkedStep",
    "Gradients",
    "Partition",
    "Ranks",
    "Unit",
    "UnitLayout",
    "UnitSet",
    "UnitSpec",
    "chunk_layouts",
    "find_units",
    "managed",
    "uninterrupted",
]
