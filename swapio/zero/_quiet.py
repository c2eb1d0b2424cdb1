"""The engine's own tensor work must not see the caller's modes: a fetch inside FakeTensorMode would make the weights fake for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["quiet"]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No gradient, no inference mode, no torch-function or dispatch mode, no functorch level."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        stack.enter_context(
            torch._C.DisableTorchFunction() if torch._C._len_torch_function_stack() else torch._C.DisableTorchFunctionSubclass()
        )
        stack.enter_context(torch.no_grad())
        yield
