"""Reading ahead and writing behind, on threads, while the caller does something else."""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["WriteBehind", "ahead"]

T = TypeVar("T")

_AHEAD = 3  # one read at a time leaves most of a drive unused


def ahead(calls: Iterable[Callable[[], T]]) -> Generator[T]:
    """Results of calls in their order; the next three are made, on threads, while the caller uses one. Close it to stop early."""
    with ThreadPoolExecutor(_AHEAD, thread_name_prefix="swapio-read-ahead") as pool:
        futures: collections.deque[Future[T]] = collections.deque()
        for call in calls:
            futures.append(pool.submit(call))
            if len(futures) > _AHEAD:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()


class WriteBehind:
    """Makes calls in their order on a thread, one while the caller prepares the next. For one thread at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="swapio-write-behind")
        self._last: Future[None] | None = None

    def call(self, function: Callable[[], None]) -> None:
        """Wait until the call before has ended, and begin this one.

        Raises:
            What the call before raised; this one is not made then.
        """
        self.wait()
        self._last = self._pool.submit(function)

    def wait(self) -> None:
        """Until nothing is left. Raises what the last call raised, once."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait, whatever comes of it, and end the thread. Idempotent."""
        self._pool.shutdown()
