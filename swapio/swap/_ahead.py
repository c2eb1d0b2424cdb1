"""Prefetching along a known cyclic order of uses, as far ahead as the memory goes.

[Note: As far as it fits] All that is used from now until the record that is brought must fit in the memory that prefetches may have: else
something needed sooner would have to go for it. Within that, the earlier the better: the drive has no other use for its time. So
bringing goes on whenever the user's position moves or memory comes back, without anybody asking.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import SwapioError
from ._record import Place, Record

if TYPE_CHECKING:
    from ._mover import Mover

__all__ = ["Prefetcher"]

_AHEAD_NBYTES = 64 << 20  # where no budget says how far, and two records at least


class Prefetcher:
    """Brings the records of one order ahead of their use. `move` may be called from any thread, all else runs on the mover's loop."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._room = mover.room
        self._loop = mover.loop
        self._order: Sequence[tuple[Record, Place]] = ()
        self._base = 0  # clock at the first of the order
        self._position = 0  # the next use, on the clock
        self._head = 0  # the next to look at
        self._tail = 0  # the first that counts in the window
        self._window: collections.Counter[Record] = collections.Counter()
        self._nbytes = [0, 0, 0]  # of the window, by place
        self._left: set[Record] = set()  # were in the window
        self._starting: dict[Record, Place] = {}  # on their way, without memory yet
        self._scheduled = False
        self._loop.call(self._room.prefetchers.append, self)

    def close(self) -> None:
        """Bring nothing any more. Idempotent."""
        self._loop.call(self._end)

    def _end(self) -> None:
        self._order = ()
        self._restart()
        self.pump()
        if self in self._room.prefetchers:
            self._room.prefetchers.remove(self)

    def follow(self, order: Sequence[tuple[Record, Place]], base: int) -> None:
        """From now on uses come in `order`, again and again, the first at `base` on the clock that `move` and `next_use` tell."""
        self._loop.call(self._follow, order, base)

    def _follow(self, order: Sequence[tuple[Record, Place]], base: int) -> None:
        self._order, self._base = order, base
        self._restart()
        self.pump()

    def _restart(self) -> None:
        self._head = self._tail = self._position
        self._left.update(self._window)
        self._window.clear()
        self._nbytes = [0, 0, 0]

    def move(self, position: int) -> None:
        """The use at `position` on the clock is the next one."""
        self._position = position
        if not self._scheduled:
            self._scheduled = True
            self._loop.call(self._moved)

    def _moved(self) -> None:
        self._scheduled = False
        self.pump()

    def pump(self) -> None:
        """Bring what fits."""
        self._advance()
        while self._left:
            record = self._left.pop()
            if record.prefetched and record not in self._window:  # still here as it was prefetched: in vain
                record.prefetched = False
                self._room.drop_surplus(record)

    def _advance(self) -> None:
        count = len(self._order)
        if not count:
            return
        position = self._position
        if position > self._head or position < self._tail:
            self._restart()
        while self._tail < position:
            self._leave(*self._order[(self._tail - self._base) % count])
            self._tail += 1
        while self._head < position + count:
            record, place = self._order[(self._head - self._base) % count]
            if record not in self._window and record.home is not place:
                if not self._fits(record, place):
                    return
                if record.next_use is None or record.next_use < position:
                    record.next_use = self._head
                if self._must_come(record, place):
                    if record.pinned(Place.HOST if place is Place.DEVICE else Place.DEVICE) or not self._has_room(record, place):
                        return  # it is being changed; or else strictly in order: what comes later must not take the memory
                    self._bring(record, place)
            self._enter(record, place)
            self._head += 1

    def _enter(self, record: Record, place: Place) -> None:
        self._window[record] += 1
        if self._window[record] == 1 and record.home is not place:
            self._nbytes[place] += self._room.cost(place, record.nbytes)

    def _leave(self, record: Record, place: Place) -> None:
        self._window[record] -= 1
        if not self._window[record]:
            del self._window[record]
            if record.home is not place:
                self._nbytes[place] -= self._room.cost(place, record.nbytes)
            self._left.add(record)

    def _fits(self, record: Record, place: Place) -> bool:
        room = self._room
        nbytes = self._nbytes[place] + room.cost(place, record.nbytes)
        capacity = room.capacity(place)
        if capacity is None:
            return len(self._window) <= 2 or nbytes <= _AHEAD_NBYTES
        return nbytes <= capacity - (room.headroom + room.fixed_nbytes if place is Place.HOST else 0)

    def _must_come(self, record: Record, place: Place) -> bool:
        if record.removed or record.current[place] or record.busy.locked() or record in self._starting:
            return False
        return (
            record.stored_nbytes > 0 or bool(record.in_file or record.borrowed) or not record.current[Place.NVME]
        )  # else there is nothing to read

    def _has_room(self, record: Record, place: Place) -> bool:
        """Now, after what is needed later has gone."""
        room = self._room
        nbytes = sum(room.cost(place, r.nbytes) for r, p in self._starting.items() if p is place) + room.cost(place, record.nbytes)
        return room.has_spare(place, nbytes) or (room.reclaim(place, nbytes, record, demand=False) and room.has_spare(place, nbytes))

    def _bring(self, record: Record, place: Place) -> None:
        def got_room() -> None:
            self._starting.pop(record, None)

        async def bring() -> None:
            try:
                await self._mover.bring(record, place, owner=None, demand=False, pin=False, on_room=got_room)
            except (SwapioError, KeyError):
                pass  # who uses it meets the error himself
            finally:
                got_room()

        self._starting[record] = place
        self._loop.start(bring())
