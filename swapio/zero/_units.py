"""All units of a model: who is attached, what comes next, where gradients gather, and the windows of the modules."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import BudgetError, ClosedError, SwapioError
from ..memory import Event, Lease
from ..swap import Place, Record, RecordLease, SwapManager
from ._saved import SavedTensors
from ._schedule import Schedule
from ._unit import Unit

__all__ = ["DeviceGrads", "UnitSet"]

logger = logging.getLogger("swapio")


class DeviceGrads:
    """A unit's gradients on the device, where the optimizer runs there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # uint8 [grad_nbytes]


class UnitSet:
    """The units of one engine. One re-entrant lock guards attaching and letting go; waits for bytes happen under it.

    Args:
        manager: where the records live.
        step_place: where the optimizer runs, and so where gradients gather.
        keep_attached: nothing ever has to go, so units stay attached once they are here.
    """

    def __init__(self, manager: SwapManager, *, step_place: Place, keep_attached: bool) -> None:
        self.manager = manager
        self.step_place = manager.place(step_place)
        self.keep_attached = keep_attached
        self.lock = threading.RLock()
        self.saved = SavedTensors()
        self.units: list[Unit] = []
        self.serve_copies = False  # state_dict is running: detach() gives copies
        self.closed: str | None = None
        self._attached: dict[Unit, None] = {}
        self._windows: list[tuple[Unit, bool]] = []
        self._handles: list[Any] = []
        self._landing: list[Event] = []
        self._grads_nbytes = self._grads_coming = self._largest_grads = 0  # blocks of all units, of those without a buffer, the largest
        self._last: Unit | None = None
        self.schedule = None if keep_attached else Schedule(manager)

    # --- called by units ---

    def check_open(self) -> None:
        if self.closed is not None:
            raise ClosedError(self.closed)

    def pin(self, record: Record, place: Place) -> RecordLease:
        try:
            return self.manager.pin(record, self.manager.place(place), self)
        except BudgetError:
            self.detach_idle()  # whatever can go, before giving up
            return self.manager.pin(record, self.manager.place(place), self)

    def make_room(self, wanted: Unit | None) -> None:
        """Let go of units that nobody uses now, before another comes."""
        if not self.keep_attached:
            self.detach_idle(wanted)

    def detach_idle(self, wanted: Unit | None = None) -> None:
        for unit in list(self._attached):
            if unit is not wanted and not unit.pins:
                unit.detach()

    def used(self, unit: Unit) -> None:
        """An attached unit was needed again."""
        if self._last is not unit:
            self._note(unit)

    def attached(self, unit: Unit) -> None:
        self._attached[unit] = None
        self._note(unit)

    def detached(self, unit: Unit) -> None:
        self._attached.pop(unit, None)

    def _note(self, unit: Unit) -> None:
        self._last = unit
        if self.schedule is not None:
            self.schedule.used(unit.record, Place.DEVICE)

    # --- gradients ---

    def leave_room_for_gradients(self, *, stepping: bool = False) -> None:
        """Keep prefetches from taking what gradients will need before the prefetched bytes are used.

        In backward that is all gradients still to come; before, the largest; while the optimizer steps, nothing.
        """
        if self.step_place is Place.DEVICE:
            return
        in_backward = self._grads_coming < self._grads_nbytes
        self.manager.mover.headroom = 0 if stepping else self._grads_coming if in_backward else self._largest_grads

    def grad_lease(self, unit: Unit) -> Lease | DeviceGrads:
        nbytes = unit.layout.grad_nbytes
        if self.step_place is Place.DEVICE:
            return DeviceGrads(self.manager.device.empty(nbytes))
        name = f"gradients of {unit.name}"
        try:
            lease = self.manager.lease(name, nbytes, self)
        except BudgetError:
            self.detach_idle()
            lease = self.manager.lease(name, nbytes, self)
        self._grads_coming -= self.manager.arena.block_nbytes(nbytes)
        self.leave_room_for_gradients()
        return lease

    def end_grads(self, grads: Lease | DeviceGrads) -> None:
        self.grads_landed()
        if isinstance(grads, Lease):
            self._grads_coming += self.manager.arena.block_nbytes(grads.nbytes)
            self.manager.end_lease(grads)

    def store_grad(self, view: torch.Tensor, grad: torch.Tensor, *, add: bool) -> None:
        """Copy or add a gradient into its place in the buffer."""
        device = self.manager.device
        if not device.has_memory or self.step_place is Place.DEVICE:
            view.add_(grad) if add else view.copy_(grad)
        elif add:  # a second arrival in one backward: rare, and must come after the first
            self.grads_landed()
            target = torch.empty_like(view)
            self._landing.append(device.download(_raw(_laid_out(grad, view)), _raw(target), after=device.record()))
            self.grads_landed()
            view.add_(target)
        else:
            self._landing.append(device.download(_raw(_laid_out(grad, view)), _raw(view), after=device.record()))

    def grads_landed(self) -> None:
        """Wait until every gradient that was sent to the host is there."""
        landing, self._landing = self._landing, []
        for event in landing:
            if not event.synchronize(self.manager.timeout_s):
                raise TimeoutError(f"a gradient did not reach the host within {self.manager.timeout_s} s")

    # --- windows ---

    def add_window(self, module: nn.Module, unit: Unit) -> None:
        """While `module` runs its forward, its unit is here and its ops run plainly."""

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def enter(module: nn.Module, args: Any) -> None:
            unit.open()
            self._windows.append((unit, self.saved.push()))

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if any(u is unit for u, _ in self._windows):
                while self._close_window() is not unit:
                    pass

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _close_window(self) -> Unit:
        unit, pushed = self._windows.pop()
        if pushed:
            self.saved.pop()
        unit.shut()
        return unit

    def close_windows(self, depth: int = 0) -> None:
        """Close windows left open by an interrupt, down to `depth`."""
        while len(self._windows) > depth:
            self._close_window()

    @property
    def depth(self) -> int:
        return len(self._windows)

    def hook_gradients(self, unit: Unit) -> None:
        block = self.manager.arena.block_nbytes(unit.layout.grad_nbytes) if unit.layout.grad_nbytes else 0
        self._grads_nbytes += block
        self._grads_coming += block
        self._largest_grads = max(self._largest_grads, block)
        for index, param in enumerate(unit.params):
            if param.requires_grad:
                hook: Callable[[Any], None] = _grad_hook(unit, index)
                with torch._C.DisableTorchFunctionSubclass():
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def serve_state_dict(self, model: nn.Module) -> None:
        """Let `state_dict()` hand out copies: views would keep every unit attached."""

        def before(*_: Any) -> None:
            self.serve_copies = True

        def after(*_: Any) -> None:
            self.serve_copies = False

        self._handles.append(model.register_state_dict_pre_hook(before))
        self._handles.append(model.register_state_dict_post_hook(after))

    # --- the end ---

    def close(self, reason: str, *, restore: bool) -> None:
        """Take the hooks off; give the parameters their data back, or leave them away with `reason` as the error of any use."""
        with self.lock:
            self.close_windows()
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            for unit in self.units:
                unit.drop_grads()
            try:
                for unit in self.units:
                    if restore:
                        unit.restore()
                        unit.abandon()
            except SwapioError as error:
                logger.warning("the weights could not be given back to the module: %s", error)
            finally:
                for unit in self.units:
                    unit.abandon()
                self.closed = reason


def _grad_hook(unit: Unit, index: int) -> Callable[[Any], None]:
    def hook(param: Any) -> None:
        unit.take_grad(index)

    return hook


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _laid_out(grad: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`grad` with the strides of `view`."""
    if _same(grad, view):
        return grad
    laid: torch.Tensor = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=grad.device)
    return laid.copy_(grad)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
