"""One checkpointed call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from ._configure import current

__all__ = ["checkpoint", "checkpoint_call"]

_OPTIONS = ("preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")
_nesting = threading.local()  # .inside: a checkpointed function runs in this thread


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """Call `function`, keep its arguments instead of what autograd saves inside it, and call it again in backward.

    DeepSpeed's call, on top of `torch.utils.checkpoint.checkpoint`: outputs and gradients are those of the plain call to the bit, dropout
    too, as PyTorch's random state and autocast are restored for the second call (a `torch.Generator` of your own is not). Calls may be
    nested. Without gradients it is the plain call.

    Args:
        function: may return anything. It must do the same when it is called again.
        args: anything; only tensors among them, not in containers, are kept as autograd keeps tensors.
        use_reentrant: PyTorch's older implementation: at least one of the tensors must require a gradient.
        kwargs: `preserve_rng_state`, `context_fn`, `determinism_check`, `debug` and `early_stop` are those of PyTorch; all others are
            given to `function`, and kept as `args` are, in both implementations.

    Returns:
        What `function` returns.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    return checkpoint_call(function, args, kwargs, use_reentrant=use_reentrant, **options)


def checkpoint_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, use_reentrant: bool = False, **options: Any
) -> Any:
    """`checkpoint` with the arguments of `function` apart from its own."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if kwargs:
        function, args = _by_position(function, args, kwargs)
    offload = current().offload
    if offload is None or getattr(_nesting, "inside", False):
        return _torch_checkpoint(function, *args, use_reentrant=use_reentrant, **options)
    with offload.hooks():
        return _torch_checkpoint(_marked(function), *args, use_reentrant=use_reentrant, **options)


def _by_position(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function that takes the keyword arguments by position, after the others; PyTorch keeps tensors among those only."""
    num_args, names = len(args), tuple(kwargs)

    def by_position(*values: Any) -> Any:
        return function(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    return by_position, (*args, *kwargs.values())


def _marked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` whose inner checkpointed calls leave their inputs to the outer one, which recomputes them."""

    def marked(*args: Any) -> Any:
        before, _nesting.inside = getattr(_nesting, "inside", False), True
        try:
            return function(*args)
        finally:
            _nesting.inside = before

    return marked
