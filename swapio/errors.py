"""Every error that swapio raises.

Each names what went wrong, with the numbers, and what would work. Each also inherits the builtin that people
catch: a wrong setting is a `ValueError`, a failing drive an `OSError`, a too small budget a `MemoryError`.
"""

from __future__ import annotations

import errno as _errno
import functools
import os
from collections.abc import Callable

__all__ = [
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "ForkError",
    "RankError",
    "StorageError",
    "SwapioError",
    "TransferTimeoutError",
    "UsageError",
]


class SwapioError(Exception):
    """Base of all errors of this package."""


class ConfigError(SwapioError, ValueError):
    """A setting that cannot work; raised where it is given, with the dotted key, the value and one that works."""

    def __init__(self, message: str, *, key: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class UsageError(SwapioError, RuntimeError):
    """A call that is not allowed in this place or order; the message says what to call instead."""


class ClosedError(UsageError):
    """The object was closed before the call."""


class ForkError(UsageError):
    """A forked child touched an object that belongs to its parent."""


class BudgetError(SwapioError, MemoryError):
    """A memory budget is too small for what was asked.

    Attributes:
        name: the tensor or unit that did not fit.
        needed_nbytes: bytes that had to be held at once.
        budget_nbytes: the budget.
        works_nbytes: a budget with which the same call succeeds, `None` if it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        name: str | None = None,
        needed_nbytes: int | None = None,
        budget_nbytes: int | None = None,
        works_nbytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.name = name
        self.needed_nbytes = needed_nbytes
        self.budget_nbytes = budget_nbytes
        self.works_nbytes = works_nbytes


class TransferTimeoutError(SwapioError, TimeoutError):
    """A wait ran past its limit; the message lists what is still pending and since when."""


class RankError(SwapioError, ConnectionError):
    """Another rank died, ended or did not answer; the message says which, and what was waited for."""


class StorageError(SwapioError, OSError):
    """A read, write, reservation or sync that failed or came up short.

    Attributes (also in the message): `name` of the record, `path`, `offset` in the file, bytes `wanted` and `got`,
    `errno` (`EIO` for a transfer that ended early with no error of its own).
    """

    def __init__(
        self, action: str, *, name: str, path: str, offset: int, wanted: int, got: int, errno: int = _errno.EIO, why: str = ""
    ) -> None:
        code = _errno.errorcode.get(errno, str(errno))
        message = (
            f"{action} of {name!r} failed: {why or os.strerror(errno)} [{code}] "
            f"(path {path}, offset {offset}, {wanted} bytes wanted, {got} done)"
        )
        super().__init__(errno, message)
        self.action = action
        self.name = name
        self.path = path
        self.offset = offset
        self.wanted = wanted
        self.got = got
        self.why = why

    def __reduce__(self) -> tuple[Callable[[], StorageError], tuple[()]]:
        made = functools.partial(
            StorageError, self.action, name=self.name, path=self.path, offset=self.offset, wanted=self.wanted, got=self.got,
            errno=self.errno or 0, why=self.why,
        )  # fmt: skip
        return made, ()

    def __str__(self) -> str:
        return str(self.args[1])
