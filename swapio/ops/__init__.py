"""DeepSpeed's `ops`: its optimizers' names."""

from . import adam

__all__ = ["adam"]
