"""Hooks on the user's modules. They are plain functions that look their engine up, so copies and pickles of a module are free of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["add_window", "remove_hooks"]

_WINDOWS: weakref.WeakKeyDictionary[nn.Module, tuple[UnitSet, Unit]] = weakref.WeakKeyDictionary()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _enter(module: nn.Module, args: Any) -> None:
    found = _WINDOWS.get(module)
    if found is not None:
        found[0].open_window(found[1])


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(module: nn.Module, args: Any, output: Any) -> None:
    found = _WINDOWS.get(module)
    if found is not None:
        found[0].leave_window(found[1])


def add_window(module: nn.Module, zero: UnitSet, unit: Unit) -> list[Any]:
    """While `module` runs its forward, `unit` is here and its ops run plainly. Returns the handles."""
    _WINDOWS[module] = (zero, unit)
    return [module.register_forward_pre_hook(_enter), module.register_forward_hook(_leave, always_call=True)]


def remove_hooks(zero: UnitSet, handles: list[Any]) -> None:
    """Undo what `add_window` did for `zero`."""
    for handle in handles:
        handle.remove()
    for module in [m for m, (owner, _) in _WINDOWS.items() if owner is zero]:
        del _WINDOWS[module]
