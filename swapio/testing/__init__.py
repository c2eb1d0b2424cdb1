"""For tests of backends and of programs on top: a conformance suite, and storages that fail or wait on command.

Nothing else in the package imports this. `StorageConformance` needs pytest.
"""

from ._conformance import StorageConformance, aligned_buffer
from ._wrappers import FaultyStorage, GatedStorage

__all__ = ["FaultyStorage", "GatedStorage", "StorageConformance", "aligned_buffer"]
