"""What things are called in a checkpoint."""

from __future__ import annotations

__all__ = ["CLIENT_STATE", "ENGINE", "RANDOM", "key"]

ENGINE = "engine"  # name of the object with everything that is no tensor
CLIENT_STATE = "client_state"  # that of the user, alone: what reads the rest may not have his classes
RANDOM = "random"  # and of those with the random state of each rank


def key(name: str, field: str | None = None) -> str:
    """Of a weight, a master or a buffer; with `field`, of that of the optimizer's state."""
    return f"module.{name}" if field is None else f"optimizer.{field}.{name}"
