"""What the schema honours and the engine does not do yet. An entry goes when the engine does it, and this module with the last one."""

from __future__ import annotations

import functools
import json
from typing import Any

from ..errors import ConfigError
from ._schema import SwapioConfig

__all__ = ["PENDING", "PENDING_SILENT", "refuse_pending"]

PENDING: dict[str, Any] = {"fp16.enabled": False}
"""Attribute of the config -> the only value that works so far."""

PENDING_SILENT = {"steps_per_print": "not supported yet: nothing is logged"}
"""What is only for show: listed as accepted without effect."""


def refuse_pending(config: SwapioConfig, pending: dict[str, Any]) -> None:
    """
    Raises:
        ConfigError: a value that the engine would ignore.
    """
    for key, works in pending.items():
        value: Any = functools.reduce(getattr, key.split("."), config)
        if value != works:
            shown = value.type if key == "scheduler" else value
            raise ConfigError(f"{key}: {shown!r} is not supported yet; use {json.dumps(works)}", key=key, value=shown)
