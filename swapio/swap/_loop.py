"""The thread that decides: an event loop that never blocks, and what it awaits from other threads."""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from ..errors import ClosedError
from ..memory import Event

__all__ = ["Loop"]

T = TypeVar("T")
Done = Callable[[BaseException | None], None]
_EVENT_POLL_S = 0.0002
_WAKE_NBYTES = 1 << 16  # a byte for each wake-up that was not taken


class _Selector(selectors.DefaultSelector):
    """Looks for events only when there is nothing else to do, and takes them in one call.

    There are none but the loop's own wake-ups, and each look gives the interpreter's lock away: beside a thread that is busy in Python it
    comes back after 5 ms.
    """

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            for key, _ in super().select(timeout):
                os.read(key.fd, _WAKE_NBYTES)
        return []


class Loop:
    """An event loop on a daemon thread of its own.

    Attributes:
        num_moving: movements under way, that will free or deliver something without anybody's help.
        closing: nothing new is taken. Set it, end what still delivers from elsewhere, then `close`.
    """

    def __init__(self, name: str) -> None:
        self.num_moving = 0
        self.closing = False
        self._tasks: set[asyncio.Future[Any]] = set()  # the loop itself keeps only weak references
        self._loop = asyncio.SelectorEventLoop(_Selector())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._cancel_all())  # what was submitted while it stopped
        finally:
            self._loop.close()

    # --- from any thread ---

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Run on the loop; returns a `concurrent.futures.Future`."""
        if self.closing:
            coroutine.close()
            raise ClosedError("the swap manager is closed")
        return asyncio.run_coroutine_threadsafe(self._until_closed(coroutine), self._loop)

    async def _until_closed(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self.closing:
                raise ClosedError("the swap manager was closed while this was pending") from None
            raise

    def call(self, function: Callable[..., None], *args: object) -> None:
        """Soon, on the loop; never when it is closed."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # nobody waits any more
            if not self._loop.is_closed():
                raise

    def close(self, timeout: float) -> None:
        """Cancel all that is pending, and join. Idempotent."""
        self.closing = True
        if self._thread.is_alive():
            self.call(self._shut)
            self._thread.join(timeout)

    # --- on the loop ---

    def _shut(self) -> None:
        self._finish = self._loop.create_task(self._cancel_all(), name="swapio-close")
        self._finish.add_done_callback(lambda _: self._loop.stop())

    @staticmethod
    async def _cancel_all() -> None:
        await asyncio.sleep(0)  # what was just submitted becomes a task
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # let the results reach the threads that wait

    def future(self) -> asyncio.Future[None]:
        return self._loop.create_future()

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run beside."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def moving(self, awaitable: Awaitable[T]) -> T:
        """Await a movement."""
        self.num_moving += 1
        try:
            return await awaitable
        finally:
            self.num_moving -= 1

    async def elsewhere(self, start: Callable[[Done], None]) -> None:
        """Await what another thread does: `start(done)` begins it, and it calls `done(error or None)` at its end."""
        ended = self.future()

        def finish(error: BaseException | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        start(lambda error: self.call(finish, error))
        await self.moving(ended)

    async def in_thread(self, function: Callable[[], None], name: str) -> None:
        """Await a call that blocks, in a thread of its own."""

        def run(done: Done) -> None:
            try:
                function()
            except BaseException as error:
                done(error)
            else:
                done(None)

        await self.elsewhere(lambda done: threading.Thread(target=run, args=(done,), name=name, daemon=True).start())

    async def landed(self, event: Event) -> None:
        """Await a copy of the device."""

        async def poll() -> None:
            while not event.done():
                await asyncio.sleep(_EVENT_POLL_S)

        await self.moving(poll())
