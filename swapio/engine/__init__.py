"""`initialize` and the engine it returns."""

from ._engine import Engine
from ._initialize import initialize

__all__ = ["Engine", "initialize"]
