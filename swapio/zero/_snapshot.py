"""The state of one moment, saved while training goes on.

[Note: Copy on write] A thread reads the portions, one chunk of state at a time, under the engine's lock. Before the optimizer changes
a chunk that is not saved yet, its portions are copied and queued, where the step has them in memory anyway. So nothing is kept twice but
the few pieces that wait for the drive, and a step that is ahead of it waits. The thread takes no memory that training needs: where there is
no room it leaves the reading to the steps, or to whoever waits for the end.

What the user writes into weights by himself cannot be foreseen; if it meets what is not saved yet, the snapshot fails and says so.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import BudgetError, UsageError
from ..memory import copied
from ._gather import GatheredLease
from ._portable import PortableState, Portion
from ._quiet import quiet

if TYPE_CHECKING:
    from ._step import Chunk
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["Snapshot"]

_PATIENCE_S = 0.02  # between looks at whether the engine lets the thread read
_QUEUED = 2  # portions that wait for the drive

Key = tuple["Unit", "Chunk | Portion"]


class Snapshot:
    """Portions as they are now. `stop` or `take_rest` ends it; it holds the engine's units, not the engine.

    Args:
        sink: takes portions and their values, `[numel]` in host memory, on the snapshot's thread, in any order.
        at_end: called there after the last one; at_stop: instead, when it ends before.
    """

    def __init__(
        self,
        zero: UnitSet,
        portions: Sequence[Portion],
        sink: Callable[[Portion, torch.Tensor], None],
        *,
        at_end: Callable[[], None],
        at_stop: Callable[[], None],
    ) -> None:
        self._zero = zero
        self._sink = sink
        self._at_end = at_end
        self._at_stop = at_stop
        self._left: dict[Key, list[Portion]] = {}  # not read yet; changed under the engine's lock
        for portion in portions:
            self._left.setdefault(_key(portion), []).append(portion)
        self._num_left = len(portions)  # not written yet; the thread's
        self._own: list[tuple[Portion, torch.Tensor]] = []  # what the thread has read, the next last
        self._queue: queue.Queue[tuple[Portion, torch.Tensor]] = queue.Queue(_QUEUED)
        self._error: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="swapio-snapshot", daemon=True)
        with zero.lock:
            zero.snapshot = self
        self._thread.start()

    # --- called where the state changes, under the engine's lock ---

    def changing(self, unit: Unit, chunk: Chunk | None = None) -> None:
        """A chunk of a unit, or everything of it, is about to change."""
        if chunk is not None:
            self._hand_over((unit, chunk))
        else:
            for key in [k for k in self._left if k[0] is unit]:
                self._hand_over(key)

    def _hand_over(self, key: Key) -> None:
        try:
            with PortableState(self._zero) as state:
                for portion in self._left.pop(key, []):
                    values = copied(state.read(portion))
                    while self._thread.is_alive():
                        with contextlib.suppress(queue.Full):
                            self._queue.put((portion, values), timeout=_PATIENCE_S)
                            break
        except Exception as error:  # the step goes on, and whoever asks is told
            self._give_up(error)
        except BaseException:
            self._give_up(UsageError("a checkpoint that was being saved (async_save) was interrupted; save again"))
            raise

    def _give_up(self, error: Exception) -> None:
        self._error = self._error or error
        self._stopped = True

    def written(self, unit: Unit, indices: set[int]) -> None:
        """The user wrote parameters of a unit."""
        for portions in [p for k, p in self._left.items() if k[0] is unit]:
            for portion in portions:
                if portion.slot.index in indices:
                    why = (
                        f"{portion.name!r} was written while a checkpoint was being saved (async_save) that did not have it yet: call "
                        "engine.wait_for_checkpoint() before"
                    )
                    self._give_up(UsageError(why))
                    return

    # --- for who waits ---

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def take_rest(self) -> None:
        """Read all that is left, here, and wait until it is written."""
        with self._zero.lock:
            for key in list(self._left):
                if not self._stopped:
                    self._hand_over(key)
        self._thread.join()
        self._forget()

    def raise_error(self) -> None:
        self._forget()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Leave it unfinished."""
        self._stopped = True
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._forget()

    def _forget(self) -> None:
        with self._zero.lock:
            self._left.clear()
            if self._zero.snapshot is self:
                self._zero.snapshot = None

    # --- the thread ---

    def _run(self) -> None:
        try:
            while self._num_left and not self._stopped:
                found = self._next()
                if found is not None:
                    self._sink(*found)
                    self._num_left -= 1
                    del found
            if not self._num_left:
                self._at_end()
        except Exception as error:
            self._error = self._error or error
        if self._num_left or self._error is not None:
            self._at_stop()

    def _next(self) -> tuple[Portion, torch.Tensor] | None:
        with contextlib.suppress(queue.Empty):
            return self._queue.get_nowait()
        if not self._own and self._zero.lock.acquire(blocking=False):
            try:
                self._read_some()
            finally:
                self._zero.lock.release()
        if self._own:
            return self._own.pop()
        with contextlib.suppress(queue.Empty):
            return self._queue.get(timeout=_PATIENCE_S)
        return None

    def _read_some(self) -> None:
        """The portions of one chunk, from the end: steps come from the front."""
        key = next((k for k in reversed(self._left) if not k[0].pins and not isinstance(k[0].lease, GatheredLease)), None)
        if key is None:
            return
        try:
            with quiet():
                key[0].publish_writes()  # if there are any, this is not what was
            with PortableState(self._zero, patient=True) as state:
                own = [(p, copied(state.read(p))) for p in self._left.get(key, [])]
        except BudgetError:
            return
        self._left.pop(key, None)
        self._own = own


def _key(portion: Portion) -> Key:
    return portion.unit, portion if portion.chunk is None else portion.chunk
