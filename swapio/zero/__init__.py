"""ZeRO: units of parameters that come just in time, their gradients, and the optimizer step over them."""

from ._construct import ConstructionSet, constructed, give_back, shares_constructed
from ._init import Init
from ._layout import UnitLayout, UnitSpec, find_units
from ._partition import Partition
from ._quiet import uninterrupted
from ._ranks import Ranks
from ._step import CHUNK_NUMEL, ChunkedStep, Gradients, chunk_layouts
from ._unit import Unit
from ._units import UnitSet
from ._world import world

__all__ = [
    "CHUNK_NUMEL",
    "ChunkedStep",
    "ConstructionSet",
    "Gradients",
    "Init",
    "Partition",
    "Ranks",
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
