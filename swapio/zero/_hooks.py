"""Hooks on the user's modules. They are plain functions that look their engine up, so copies and pickles of a module are free of it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import UsageError

if TYPE_CHECKING:
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["add_window", "load_together", "remove_hooks", "windows"]

_WINDOWS: weakref.WeakKeyDictionary[nn.Module, tuple[UnitSet, Unit]] = weakref.WeakKeyDictionary()
_ROOTS: weakref.WeakKeyDictionary[nn.Module, UnitSet] = weakref.WeakKeyDictionary()
_LOADING: weakref.WeakKeyDictionary[nn.Module, contextlib.AbstractContextManager[None]] = weakref.WeakKeyDictionary()


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


def _before_load(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Mapping[str, Any], *_: Any) -> None:
    if module not in _ROOTS:
        return
    if local_metadata.get("assign_to_params_buffers"):
        raise UsageError("load_state_dict(assign=True) puts other parameters in place of those that the engine manages; leave assign out")
    _LOADING.pop(module, None)  # of a load that failed
    loading = _LOADING[module] = _ROOTS[module].written_together()
    loading.__enter__()


def _after_load(module: nn.Module, *_: Any) -> None:
    loading = _LOADING.pop(module, None)
    if loading is not None:
        loading.__exit__(None, None, None)


def add_window(module: nn.Module, zero: UnitSet, unit: Unit) -> list[Any]:
    """While `module` runs its forward, `unit` is here and its ops run plainly. Returns the handles."""
    _WINDOWS[module] = (zero, unit)
    return [module.register_forward_pre_hook(_enter), module.register_forward_hook(_leave, always_call=True)]


def windows(zero: UnitSet) -> list[nn.Module]:
    """The modules that are windows of `zero`'s units."""
    return [module for module, (owner, _) in _WINDOWS.items() if owner is zero]


def load_together(model: nn.Module, zero: UnitSet) -> list[Any]:
    """Let all ranks that call `load_state_dict` write weights together. Returns the handles."""
    _ROOTS[model] = zero
    return [model.register_load_state_dict_pre_hook(_before_load), model.register_load_state_dict_post_hook(_after_load)]


def remove_hooks(zero: UnitSet, handles: list[Any]) -> None:
    """Undo what the others did for `zero`."""
    for handle in handles:
        handle.remove()
    for module in windows(zero):
        del _WINDOWS[module]
    for module in [m for m, owner in _ROOTS.items() if owner is zero]:
        del _ROOTS[module]
