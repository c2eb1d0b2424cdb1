"""Saved-tensor hooks: autograd keeps a handle in place of a weight, and backward's own demand brings the unit back.

[Note: Composing] Only the top-most pair of hooks runs. Ours is pushed over the pair that is active: weights become handles, everything else
goes to the outer pair as if we were not there. One exception: around a *single op* under `torch.utils.checkpoint`'s pair nothing is
pushed. A checkpointed region must save the same tensors in its forward and in its recomputation, and only one of the two may run inside
a unit's window (when `forward`, not `__call__`, is checkpointed); what is saved in a recomputation lives only until its backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import (  # type: ignore[attr-defined]
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
    _saved_tensors_hooks_is_enabled,
    _top_saved_tensors_default_hooks,
)

from ._away import is_placeholder
from ._quiet import uninterrupted

if TYPE_CHECKING:
    from ._unit import Unit

__all__ = ["SavedTensors", "WeightHandle"]

Hook = Callable[[Any], Any]


class WeightHandle(NamedTuple):
    """A view of a unit's buffer, by what is needed to make it again."""

    unit: Unit
    param: int  # its index in the unit
    version: int  # of the parameter when it was saved
    dtype: torch.dtype
    storage_offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """The hooks of one engine, and the table from storage address to the unit whose buffer it is."""

    def __init__(self) -> None:
        self.units: dict[int, Unit] = {}  # storage address of an attached unit -> unit

    def push(self, *, single_op: bool = False) -> bool:
        """Push our pair over the active one; False where hooks are not allowed (torch.func, tracing) or not needed."""
        if not _saved_tensors_hooks_is_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        if torch.compiler.is_compiling():
            return False
        outer = _top_saved_tensors_default_hooks(True)
        if outer is not None:
            if single_op and (self._ours(outer[0]) or getattr(outer[0], "__module__", "") == "torch.utils.checkpoint"):
                return False
            pack, unpack = outer if self._ours(outer[0]) else self._composed(*outer)
        else:
            pack, unpack = self._pack, self._unpack
        _push_saved_tensors_default_hooks(pack, unpack)
        return True

    @staticmethod
    def pop() -> None:
        _pop_saved_tensors_default_hooks()

    @contextlib.contextmanager
    def around_op(self) -> Iterator[None]:
        pushed = False
        try:
            with uninterrupted():
                pushed = torch.is_grad_enabled() and self.push(single_op=True)
            yield
        finally:
            if pushed:
                self.pop()

    def _composed(self, outer_pack: Hook, outer_unpack: Hook) -> tuple[Hook, Hook]:
        def pack(tensor: torch.Tensor) -> Any:
            handle = self._handle(tensor)
            return (True, handle) if handle is not None else (False, outer_pack(tensor))

        def unpack(packed: Any) -> Any:
            ours, value = packed
            return self._unpack(value) if ours else outer_unpack(value)

        pack.owner = self  # type: ignore[attr-defined]
        return pack, unpack

    def _ours(self, hook: Hook) -> bool:
        return hook == self._pack or getattr(hook, "owner", None) is self

    def _pack(self, tensor: torch.Tensor) -> Any:
        handle = self._handle(tensor)
        if handle is not None:
            return handle
        # never `tensor` itself: an output saved by its own node would keep a dropped graph alive for ever
        return tensor.detach(), tensor._version

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, WeightHandle):
            return packed.unit.rebuild(packed)
        tensor: torch.Tensor = packed[0]
        if tensor._version != packed[1]:  # PyTorch itself checks nothing under hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tensor.type()} {list(tensor.shape)} is at version {tensor._version}; expected version {packed[1]} instead"
            )
        return tensor

    def _handle(self, tensor: torch.Tensor) -> WeightHandle | None:
        if tensor.layout is not torch.strided or torch.compiler.is_compiling():
            return None
        unit = self.units.get(tensor.untyped_storage().data_ptr())
        if unit is None:
            if is_placeholder(tensor) and tensor.numel():
                raise RuntimeError(
                    "autograd saved an away parameter: an operation went past the fetch; please report it with a small example"
                )
            return None
        slot = unit.layout.slot_at(int(tensor.storage_offset()) * tensor.element_size())
        return WeightHandle(
            unit, slot.index, unit.version(slot.index), tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        )
