"""Ground values shared by all layers: page arithmetic, byte counts as people write them, extents."""

from __future__ import annotations

import dataclasses
import re

from .errors import ConfigError

__all__ = ["PAGE_NBYTES", "Extent", "format_nbytes", "parse_nbytes", "round_up"]

PAGE_NBYTES = 4096
"""Alignment of every extent, lease and transfer. At least the sector size of any drive in use."""

_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "kb": 10**3,
    "m": 2**20, "mib": 2**20, "mb": 10**6,
    "g": 2**30, "gib": 2**30, "gb": 10**9,
    "t": 2**40, "tib": 2**40, "tb": 10**12,
}  # fmt: skip


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def parse_nbytes(value: int | str, *, key: str) -> int:
    """Bytes from a count (`1073741824`) or a text (`"1GiB"`, `"800MB"`, `"1.5g"`; k, m, g, t alone are binary).

    Raises:
        ConfigError: not a size, negative, or a fraction of a byte; `key` is named.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            return int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    raise ConfigError(f'{key}: {value!r} is not a size in bytes; write for example 1073741824, "1GiB" or "800MB"', key=key, value=value)


def format_nbytes(nbytes: int) -> str:
    """`1536` -> `"1.5 KiB"`; for people, not for parsing back."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A reserved range of a storage: `nbytes` bytes from `offset`, both multiples of the storage's alignment."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes
