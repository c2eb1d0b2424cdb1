"""For tests of backends and of programs on top: a conformance suite, and storages that fail or wait on command.

Nothing else in the package imports this. `StorageConformance` needs pytest.
"""

from ..io import aligned_buffer
from ._conformance import StorageConformance
from ._wrappers import FaultyStorage, GatedStorage, nth

__all__ = ["FaultyStorage", "GatedStorage", "StorageConformance", "aligned_buffer", "nth"]
