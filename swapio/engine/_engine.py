"""`Engine`: a model whose weights, gradients and optimizer state rest where the config says and come when they are used."""

from __future__ import annotations

import logging
import weakref
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ..config import SwapioConfig
from ..errors import ClosedError, SwapioError, UsageError
from ..spec import format_nbytes
from ..swap import SwapManager
from ..zero import ChunkedStep, UnitSet, uninterrupted
from ._optimizer import EngineOptimizer

__all__ = ["Engine"]

logger = logging.getLogger("swapio")


class Engine(nn.Module):
    """What `swapio.initialize` returns. Call it like the model; then `backward(loss)` and `step()`.

    Attributes:
        module: the user's model; usable by itself too, inside the engine's life.
        optimizer: its `param_groups` are live: a changed `lr` counts from the next step.
        global_steps, skipped_steps: steps applied, and steps left out because of a non-finite gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: SwapioConfig,
        manager: SwapManager,
        owns_manager: bool,
        zero: UnitSet,
        stepper: ChunkedStep | None,
        inner_optimizer: torch.optim.Optimizer | None,
        restore_nbytes: int,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.manager = manager
        self.zero = zero
        self.global_steps = 0
        self.skipped_steps = 0
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self._stepper = stepper
        self._restore_nbytes = restore_nbytes
        self._step_applied = False
        self._failed = False
        self._abandoned = False
        self.optimizer: EngineOptimizer | None = None
        if inner_optimizer is not None:
            me = weakref.ref(self)
            self.optimizer = EngineOptimizer(
                inner_optimizer, step=lambda: _alive(me)._optimizer_step(), zero_grad=lambda: _alive(me)._zero_grad()
            )
        self._finalizer = weakref.finalize(self, _abandon, zero, manager if owns_manager else None)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.manager.device.torch_device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        self._check()
        depth = self.zero.depth
        try:
            return self.module(*args, **kwargs)
        except SwapioError:
            self._failed = True
            raise
        finally:
            self.zero.close_windows(depth)  # an interrupt skips the hooks that would

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> torch.Tensor:
        """Gradients of `loss` into the engine's buffers; returns the loss."""
        self._check()
        depth = self.zero.depth
        try:
            loss.backward(retain_graph=retain_graph)
        except SwapioError:
            self._failed = True
            raise
        finally:
            self.zero.close_windows(depth)
        return loss

    def step(self) -> None:
        """Step the optimizer, drop the gradients, then step the scheduler.

        With 16-bit weights a non-finite gradient skips the step: weights and state stay as they are to the bit, `skipped_steps`
        counts, the scheduler waits, and the first such parameter is named in a warning of the logger `swapio`.
        """
        self._optimizer_step()
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def _optimizer_step(self) -> None:
        self._check()
        if self._stepper is None or self.optimizer is None:
            raise UsageError("this engine has no optimizer: give swapio.initialize one, or name it in the config")
        self.zero.close_windows()
        try:
            with uninterrupted(), self.zero.lock:
                bad = self._stepper.nonfinite()
                self._step_applied = bad is None
                if bad is None:
                    self._stepper.step(self.optimizer.param_groups)
                    self.optimizer.stepped()
                    self.global_steps += 1
                else:
                    self.skipped_steps += 1
                    logger.warning("step skipped: the gradient of %r is not finite (%d steps skipped so far)", bad, self.skipped_steps)
                    self._zero_grad()
        except SwapioError:
            self._failed = True
            raise

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._step_applied

    def _zero_grad(self) -> None:
        with self.zero.lock:
            for unit in self.zero.units:
                unit.drop_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; `step` does it too."""
        self._zero_grad()

    def stats(self) -> dict[str, Any]:
        """The manager's counters, and the engine's: gradients, units, steps."""
        grads = sum(u.layout.grad_nbytes for u in self.zero.units if u.grads is not None)
        return self.manager.stats() | {
            "gradient_bytes": grads,
            "units": len(self.zero.units),
            "step": self.global_steps,
            "skipped_steps": self.skipped_steps,
        }

    def describe_units(self) -> list[dict[str, Any]]:
        """The units in order: name, parameters, bytes, dtypes, and whether a module's forward is their window."""
        return [
            {
                "name": u.name,
                "params": list(u.names),
                "nbytes": u.layout.nbytes,
                "trained_numel": sum(s.num_trained for s in u.layout.segments),
                "dtypes": [str(s.dtype) for s in u.layout.segments],
            }
            for u in self.zero.units
        ]

    def close(self) -> None:
        """End the engine, close its store and remove its files. Idempotent.

        The module gets ordinary parameters back if they fit in `host_memory`, and no transfer failed before; else any use of its
        weights raises `ClosedError`. Copy what you need (`engine.module.state_dict()`) before closing.
        """
        if not self._finalizer.alive:
            return
        budget = self.manager.arena.capacity
        restore = (
            not self._failed and not self._abandoned and not self.manager.closed and (budget is None or self._restore_nbytes <= budget)
        )
        reason = (
            "the engine is closed and its weights are gone; copy them before (engine.module.state_dict()), or train with more host_memory"
        )
        if not restore and not self._abandoned:
            logger.warning(
                "the weights (%s) are not given back to the module: %s", format_nbytes(self._restore_nbytes),
                "a transfer failed" if self._failed else "they do not fit in host_memory; copy engine.module.state_dict() before closing",
            )  # fmt: skip
        try:
            self.zero.close(reason, restore=restore)
        finally:
            self._finalizer()

    def abandon(self) -> None:
        """Close without giving the weights back to the module."""
        self._abandoned = True
        self.close()

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Not supported yet."""
        raise UsageError(
            "checkpoints of the optimizer's state are not supported yet; the weights: torch.save(engine.module.state_dict(), path)"
        )

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Not supported yet."""
        raise UsageError(
            "checkpoints of the optimizer's state are not supported yet; the weights: engine.module.load_state_dict(torch.load(path))"
        )

    def destroy(self) -> None:
        """The same as `close`, by DeepSpeed's name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, SwapioError):
            self._failed = True
        self.close()

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("the engine is closed; call swapio.initialize again")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _alive(reference: weakref.ref[Engine]) -> Engine:
    engine = reference()
    if engine is None:
        raise ClosedError("the engine of this optimizer is gone")
    return engine


def _abandon(zero: UnitSet, manager: SwapManager | None) -> None:
    zero.closed = zero.closed or "the engine of this model was deleted without close(), and its weights with it"
    if manager is not None:
        manager.close()
