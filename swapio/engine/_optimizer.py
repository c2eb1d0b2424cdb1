"""The optimizer that `initialize` returns: PyTorch's face, the engine's step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UsageError

__all__ = ["EngineOptimizer"]


class EngineOptimizer(torch.optim.Optimizer):
    """Shares the live `param_groups` and step hooks of the optimizer it stands for, so schedulers and hooks made for either one work.

    `step()` and `zero_grad()` are the engine's. The state is in the engine's store, not in `state`.
    """

    def __init__(self, inner: torch.optim.Optimizer, *, step: Callable[[], None], zero_grad: Callable[[], None]) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self._optimizer_step_pre_hooks = inner._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = inner._optimizer_step_post_hooks
        self._engine_step = step
        self._engine_zero_grad = zero_grad
        self.inner = inner
        # whoever kept the optimizer given to initialize must not step parameters behind the engine's back
        delegate = functools.partial(self.step)
        if hasattr(inner.step, "_wrapped_by_lr_sched"):  # a scheduler made before looks for its mark
            delegate._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        inner.step = delegate  # type: ignore[method-assign]
        inner.zero_grad = self.zero_grad  # type: ignore[method-assign]
        inner.add_param_group = self.add_param_group  # type: ignore[method-assign]

    def stepped(self) -> None:
        """Tell schedulers, which warn when they are stepped before the optimizer."""
        for optimizer in (self, self.inner):
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The same as `engine.step()`, without the scheduler."""
        if closure is not None:
            raise UsageError("a closure is not supported: run forward and backward, then call engine.step()")
        self._engine_step()
        return None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; `step` does it too.

        Raises:
            UsageError: zeros are wanted: parameters that get no gradient before the next step would be stepped with them.
        """
        if not set_to_none:
            raise UsageError("gradients are dropped by each step and cannot become zeros; call zero_grad(set_to_none=True)")
        self._engine_zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "inner"):
            raise UsageError("param groups are fixed by swapio.initialize; give the optimizer all its groups before")
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        raise UsageError("the optimizer's state is in the engine's store; save it with engine.save_checkpoint(folder)")

    def load_state_dict(self, state_dict: Any) -> None:
        raise UsageError("the optimizer's state is in the engine's store; load it with engine.load_checkpoint(folder)")
