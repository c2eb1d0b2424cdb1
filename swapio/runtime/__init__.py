"""DeepSpeed's `runtime`: what scripts use of it."""

from . import utils, zero

__all__ = ["utils", "zero"]
