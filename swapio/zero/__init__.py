"""ZeRO: units of parameters that come just in time, their gradients, and the optimizer step over them."""

from ._layout import UnitLayout, UnitSpec, find_units
from ._quiet import uninterrupted
from ._step import CHUNK_NUMEL, ChunkedStep, chunk_layouts
from ._unit import Unit
from ._units import UnitSet
from ._world import world

__all__ = [
    "CHUNK_NUMEL",
    "ChunkedStep",
    "Unit",
    "UnitLayout",
    "UnitSet",
    "UnitSpec",
    "chunk_layouts",
    "find_units",
    "uninterrupted",
    "world",
]
