"""The one handle for everything that takes time: waits from a thread, awaits from any event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from ..errors import ClosedError, TransferTimeoutError

__all__ = ["Transfer"]

T = TypeVar("T")


class Transfer(Generic[T]):
    """A running movement of bytes.

    Done means *copied*: the buffers may be used again. That bytes are durable is what `SwapManager.flush` says.
    Any thread may wait, poll or add callbacks; any event loop may await. An error of the movement is raised to each waiter.
    """

    def __init__(self, future: concurrent.futures.Future[T], *, what: str, timeout_s: float | None, pending: Callable[[], str]) -> None:
        self._future = future
        self._what = what
        self._timeout_s = timeout_s
        self._pending = pending
        self._started = time.monotonic()

    def __repr__(self) -> str:
        state = "done" if self.done() else f"pending for {time.monotonic() - self._started:.1f} s"
        return f"<Transfer {self._what}: {state}>"

    def done(self) -> bool:
        """Whether a wait would return at once. Never blocks."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> T:
        """Block until done and return the result.

        Args:
            timeout: seconds; `None` takes the manager's `timeout_s`.

        Raises:
            TransferTimeoutError: not done in time; lists what is pending and since when. The transfer goes on.
        """
        limit = self._timeout_s if timeout is None else timeout
        try:
            return self._future.result(limit)
        except concurrent.futures.CancelledError:
            raise self._closed() from None
        except concurrent.futures.TimeoutError:
            if self._future.done():  # the movement itself raised a TimeoutError, or it ended this instant
                return self._future.result()
        raise self._late(limit)

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        inner = asyncio.wrap_future(self._future)
        done, _ = await asyncio.wait([inner], timeout=self._timeout_s)
        if not done:
            raise self._late(self._timeout_s)
        if inner.cancelled():
            raise self._closed()
        return inner.result()

    def add_done_callback(self, callback: Callable[[Transfer[T]], None]) -> None:
        """Call `callback(self)` once done: at once if it is, else from the manager's thread, which it must not block."""
        self._future.add_done_callback(lambda _: callback(self))

    def _closed(self) -> ClosedError:
        return ClosedError(f"the swap manager was closed before {self._what} began")

    def _late(self, limit: float | None) -> TransferTimeoutError:
        return TransferTimeoutError(f"{self._what} was not done within {limit} s; pending: {self._pending()}")
