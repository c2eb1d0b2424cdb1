"""Sections in which the engine works for itself: past the caller's modes, and not to be interrupted half-way.

[Note: Ctrl-C] An interrupt between two lines of a fetch would leave a unit half attached, and its NaN placeholders would be taken for the
user's data. So the first interrupt waits for the end of such a section. A second one is not held back: whoever presses twice means it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as `signal`, without making enums of numbers: three of four parts of what a section costs
import contextlib
import threading
from types import FrameType
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["quiet", "uninterrupted"]


_dispatch_modes = torch._C._len_torch_dispatch_stack
_no_functions, _no_subclass_functions = torch._C.DisableTorchFunction, torch._C.DisableTorchFunctionSubclass


class _Deferred:
    """The main thread's SIGINT while sections are open."""

    def __init__(self) -> None:
        self.depth = 0
        self.handler: Any = None  # what was there before
        self.frame: FrameType | None = None
        self.pending = False

    def note(self, number: int, frame: FrameType | None) -> None:
        if self.pending:
            self.handler(number, frame)
        self.pending, self.frame = True, frame


_deferred = _Deferred()


class uninterrupted:  # noqa: N801  (a context manager used like a function; a class, since it stands on hot paths)
    """A section that Ctrl-C does not cut in two: `KeyboardInterrupt` comes at its end. Re-entrant; does nothing outside the main thread."""

    __slots__ = ("_counts",)

    def __enter__(self) -> None:
        self._counts = threading.current_thread() is threading.main_thread()
        if not self._counts:
            return
        if not _deferred.depth:
            handler = _signal.getsignal(_signal.SIGINT)
            self._counts = callable(handler) and handler is not _deferred.note  # else nothing of Python runs on it
            if not self._counts:
                return
            _deferred.handler, _deferred.pending = handler, False
            _signal.signal(_signal.SIGINT, _deferred.note)
        _deferred.depth += 1

    def __exit__(self, *_: object) -> None:
        if not self._counts:
            return
        _deferred.depth -= 1
        if not _deferred.depth:
            _signal.signal(_signal.SIGINT, _deferred.handler)
            if _deferred.pending:
                _deferred.pending = False
                _deferred.handler(_signal.SIGINT, _deferred.frame)


class quiet:  # noqa: N801  (as `uninterrupted`)
    """No gradient, no inference mode, no torch-function or dispatch mode, no functorch level, and no interrupt."""

    __slots__ = ("_functions", "_grad", "_rare", "_section")

    def __enter__(self) -> None:
        self._section = uninterrupted()
        self._section.__enter__()
        self._rare: contextlib.ExitStack | None = None
        if torch.is_inference_mode_enabled() or torch._C._functorch.peek_interpreter_stack() is not None or _dispatch_modes():
            self._rare = _without_modes()
        self._functions = _no_functions() if torch._C._len_torch_function_stack() else _no_subclass_functions()
        self._functions.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        torch._C._set_grad_enabled(self._grad)
        self._functions.__exit__(*error)
        if self._rare is not None:
            self._rare.__exit__(*error)
        self._section.__exit__()


def _without_modes() -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch._C._functorch.peek_interpreter_stack() is not None:
            stack.enter_context(temporarily_clear_interpreter_stack())
        if _dispatch_modes():
            stack.enter_context(_disable_current_modes())
        return stack.pop_all()
