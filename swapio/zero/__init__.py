"""ZeRO: units of parameters that come just in time, their gradients, and the optimizer step over them."""

from ._construct import ConstructionSet, constructed, give_back, shares_constructed
from ._init import Init
from ._layout import UnitLayout, UnitSpec, find_units
from ._quiet import uninterrupted
from ._step import CHUNK_NUMEL, ChunkedStep, chunk_layouts
from ._unit import Unit
from ._units import UnitSet
from ._world import world

__all__ = [
    "CHUNK_NUMEL",
    "ChunkedStep",
    "ConstructionSet",
    "Init",
    "Unit",
    "UnitLayout",
    "UnitSet",
    "UnitSpec",
    "chunk_layouts",
    "constructed",
    "find_units",
    "give_back",
    "shares_constructed",
    "uninterrupted",
    "world",
]
