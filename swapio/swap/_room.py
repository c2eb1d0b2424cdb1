"""Host memory and device memory of one manager: who gets it, and what goes for it.

[Note: Back-pressure] Memory is asked for in `Room.space`: unused copies are dropped, dirty ones written back, and then the request waits
for bytes to come back. It raises `BudgetError` as soon as nobody but the asking owner holds what would have to go: nothing could
ever free it. A prefetch never waits for more than movements already under way; it is skipped instead.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import BudgetError, ClosedError, TransferTimeoutError
from ..memory import Arena, Device, Event, Lease
from ..spec import format_nbytes
from ._loop import Loop
from ._record import DeviceCopy, Place, Record

if TYPE_CHECKING:
    from ._ahead import Prefetcher

__all__ = ["Room"]


class Room:
    """The memory of one manager. What is `async`, or says so, runs on the loop. As an owner it stands for write-backs.

    Args:
        device_capacity: bytes; None: no budget.
        settle_soon: begins the write-back of a record, on the loop.
        event: is told ("evict", record).
        pending: what moves or waits, for an error.

    Attributes:
        scratch: leases of no record, by id: (owner, lease).
        headroom: bytes of host memory that prefetches leave free.
        fixed_nbytes: blocks of records at home in host memory and of scratch: no prefetch can have them.
        resident: records with a host lease, and with a device buffer, that is not their home.
        uploads: copies that may still hold their host copy.
    """

    def __init__(
        self,
        loop: Loop,
        *,
        arena: Arena,
        device: Device,
        device_capacity: int | None,
        timeout_s: float,
        records: Mapping[str, Record],
        settle_soon: Callable[[Record], None],
        event: Callable[[str, Record], None],
        pending: Callable[[], str],
    ) -> None:
        self._loop = loop
        self._arena = arena
        self._device = device
        self._device_capacity = device_capacity
        self._timeout_s = timeout_s
        self._records = records
        self._settle_soon = settle_soon
        self._event = event
        self._pending = pending
        self.scratch: dict[int, tuple[object, Lease]] = {}
        self.headroom = 0
        self.fixed_nbytes = 0
        self.device_nbytes = 0
        self.nvme_nbytes = 0  # sum over records at home on NVMe
        self._count_lock = threading.Lock()
        self.resident: tuple[set[Record], set[Record]] = (set(), set())
        self._sleepers: list[asyncio.Future[None]] = []
        self._waiting: collections.Counter[object] = collections.Counter()  # owners that wait in `space`
        self.uploads: collections.deque[Event] = collections.deque(maxlen=64)
        self.prefetchers: list[Prefetcher] = []
        arena.on_release = self.wake

    def capacity(self, place: Place) -> int | None:
        return self._arena.capacity if place is Place.HOST else self._device_capacity

    def cost(self, place: Place, nbytes: int) -> int:
        return self._arena.block_nbytes(nbytes) if place is Place.HOST else nbytes

    def has_spare(self, place: Place, cost: int) -> bool:
        """Whether a prefetch may take `cost` bytes: what is about to be demanded (`headroom`) must stay free."""
        capacity = self.capacity(place)
        used = self.device_nbytes if place is Place.DEVICE else self._arena.leased_nbytes + self.headroom
        return capacity is None or used + cost <= capacity

    def count(self, record: Record, sign: int) -> None:
        """A record came (1) or went (-1)."""
        with self._count_lock:
            if record.home is Place.NVME:
                self.nvme_nbytes += sign * record.nbytes
            elif record.home is Place.HOST:
                self.fixed_nbytes += sign * self._arena.block_nbytes(record.nbytes)

    def add_scratch(self, lease: Lease, owner: object) -> None:
        """A lease of no record came."""
        self.scratch[id(lease)] = (owner, lease)
        with self._count_lock:
            self.fixed_nbytes += self._arena.block_nbytes(lease.nbytes)

    def end_scratch(self, lease: Lease) -> None:
        """It goes. Idempotent."""
        if self.scratch.pop(id(lease), None) is not None:
            with self._count_lock:
                self.fixed_nbytes -= self._arena.block_nbytes(lease.nbytes)
        lease.release()

    def wants_write_back(self, record: Record) -> bool:
        """Whether to write back now rather than when the memory is needed: when not all that rests on NVMe fits in memory."""
        if not record.dirty or record.pins:
            return False
        if record.home is Place.NVME:
            return self._arena.capacity is not None and self.nvme_nbytes + self.fixed_nbytes > self._arena.capacity
        return self._device.has_memory

    def wake(self) -> None:
        """Bytes came back, or a pin went: let whoever waits for memory look again. Takes no lock."""
        if self._sleepers:
            self._loop.call(self.wake_now)

    def wake_now(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        for prefetcher in self.prefetchers:
            prefetcher.pump()

    @contextlib.asynccontextmanager
    async def waits(self, owner: object) -> AsyncIterator[None]:
        """`owner` waits inside, so nobody need hope that he lets go of what he holds; None: nobody waits."""
        if owner is None:
            yield
            return
        self._waiting[owner] += 1
        self.wake_now()  # who hoped for him must look again
        try:
            yield
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]

    async def space(self, place: Place, name: str, nbytes: int, *, owner: object, demand: bool) -> Lease | DeviceCopy | None:
        cost, capacity = self.cost(place, nbytes), self.capacity(place)
        if capacity is not None and cost > capacity:
            raise self._over_budget(place, name, cost)
        deadline = time.monotonic() + self._timeout_s
        collected = False
        own_part = owner is self  # a write-back in need of memory is no movement that ends by itself
        self._loop.num_moving -= own_part
        try:
            while True:
                if self._loop.closing:
                    raise ClosedError("the swap manager was closed while this was pending")
                woken = self._loop.future()
                self._sleepers.append(woken)  # before looking: a release in between must not be missed
                taken = self._take(place, name, nbytes) if demand or self.has_spare(place, cost) else None
                if taken is not None:
                    return taken
                if self.reclaim(place, cost, self._records.get(name), demand):
                    continue
                hope = self._loop.num_moving > 0 or (demand and self._others_hold(owner))
                if not hope and (landing := self._next_upload()) is not None:
                    await self._loop.landed(landing)  # its host copy is held only by the copying
                    continue
                if not hope:
                    if not demand:
                        return None
                    if not collected:  # views in reference cycles
                        collected = True
                        gc.collect()
                        continue
                    failed = next((r.error for r in self.resident[0] if r.error is not None), None)
                    raise failed if failed is not None else self._over_budget(place, name, cost)
                try:
                    await asyncio.wait_for(woken, deadline - time.monotonic())
                except TimeoutError:
                    raise TransferTimeoutError(
                        f"no room for {name!r} ({format_nbytes(cost)}) within {self._timeout_s} s; pending: {self._pending()}"
                    ) from None
        finally:
            self._loop.num_moving += own_part

    def _take(self, place: Place, name: str, nbytes: int) -> Lease | DeviceCopy | None:
        if place is Place.HOST:
            return self._arena.try_lease(nbytes, name=name)
        if self._device_capacity is not None and self.device_nbytes + nbytes > self._device_capacity:
            return None
        self.device_nbytes += nbytes
        return DeviceCopy(self._device.empty(nbytes))

    def reclaim(self, place: Place, cost: int, wanted: Record | None, demand: bool) -> bool:
        """Until `cost` bytes came back or will: drop unused copies, what is expected last first, and write back dirty ones.

        A dirty copy that is expected later is waited for rather than that a clean one goes which must be read again sooner. For a prefetch,
        only what is expected later than itself goes, or what was used since it was prefetched.
        """
        freed = coming = 0
        order = sorted(self.resident[place - 1], key=lambda r: r.distance, reverse=True)
        if not demand and wanted is not None:
            known = wanted.next_use is not None
            order = [r for r in order if (r.distance > wanted.distance if known else not r.prefetched)]
        for record in order:
            if freed + coming >= cost:
                break
            dropped = self.drop(record, place)
            freed += dropped
            copy = record.host if place is Place.HOST else record.device
            if dropped or copy is None or record.pinned(place) or not record.current[place] or not record.dirty or copy.held():
                continue
            if record.error is None:
                if not record.busy.locked():
                    self._settle_soon(record)
                coming += self.cost(place, record.nbytes)
        return freed > 0

    def drop(self, record: Record, place: Place) -> int:
        """Give up the copy in `place` if nobody uses it and another one is current; returns the bytes that come back."""
        copy = record.host if place is Place.HOST else record.device
        if copy is None or record.home is place or record.busy.locked() or copy.held():
            return 0
        with record.lock:
            others = [p for p in Place if p is not place and record.current[p]]
            if record.pinned(place) or (record.current[place] and not others):
                return 0
            record.current[place] = False
            record.prefetched = False
            if place is Place.HOST:
                record.host = None
            else:
                record.device = None
        self.resident[place - 1].discard(record)
        self._event("evict", record)
        if isinstance(copy, Lease):
            nbytes = self._arena.block_nbytes(record.nbytes)
            copy.release()
            return nbytes
        self.device_nbytes -= record.nbytes
        return record.nbytes

    def drop_surplus(self, record: Record) -> None:
        """On an accelerator with no budget for caching, copies away from home go as soon as they are not used, nor about to be."""
        if not self._device.has_memory:
            return
        if record.home is not Place.DEVICE and self._device_capacity is None and not record.prefetched:
            self.drop(record, Place.DEVICE)
        if record.home is Place.DEVICE:
            self.drop(record, Place.HOST)

    def _others_hold(self, owner: object) -> bool:
        """Whether somebody holds memory who is not himself waiting for some: he will let go without our help."""
        owners = itertools.chain(
            (o for o, _ in list(self.scratch.values())),
            (o for r in list(self._records.values()) if r.pins for _, o in tuple(r.pins)),
        )
        return any(o is not self and o != owner and o not in self._waiting for o in owners)

    def _next_upload(self) -> Event | None:
        while self.uploads:
            event = self.uploads.popleft()
            if not event.done():
                return event
        return None

    def _fixed(self, place: Place) -> list[tuple[str, int]]:
        """What cannot go: (name and reason, bytes)."""
        fixed: list[tuple[str, int]] = []
        for record in list(self._records.values()):
            copy = record.host if place is Place.HOST else record.device
            if copy is None:
                continue
            why = "in use" if record.pinned(place) else "a view is held" if copy.held() else "rests here" if record.home is place else ""
            if why:
                fixed.append((f"{record.key} ({why})", self.cost(place, record.nbytes)))
        if place is Place.HOST:
            known = {r.host.name for r in list(self._records.values()) if r.host is not None}
            fixed += [(name, self.cost(place, nbytes)) for name, nbytes, _ in self._arena.live() if name not in known]
        return fixed

    def _over_budget(self, place: Place, name: str, cost: int) -> BudgetError:
        fixed = self._fixed(place)
        total, capacity = sum(n for _, n in fixed), self.capacity(place) or 0
        setting = "host_memory" if place is Place.HOST else "device_memory"
        held = ", ".join(f"{n} {format_nbytes(b)}" for n, b in sorted(fixed, key=lambda x: -x[1])[:8])
        return BudgetError(
            f"{name!r} needs {cost} bytes ({format_nbytes(cost)}), but {setting} is {capacity} bytes ({format_nbytes(capacity)})"
            + (f" and {format_nbytes(total)} of it cannot go: {held}" if fixed else "")
            + f'; {setting}={total + cost} ("{-(-(total + cost) // 2**20)}MiB") would do',
            name=name, needed_nbytes=total + cost, budget_nbytes=capacity, works_nbytes=total + cost,
        )  # fmt: skip

    async def lease(self, name: str, nbytes: int, owner: object) -> Lease:
        """Host memory of no record, counted in the budget; waits like a record does."""
        async with self.waits(owner):
            lease = await self.space(Place.HOST, name, nbytes, owner=owner, demand=True)
        if not isinstance(lease, Lease):
            raise RuntimeError("a demand returned without memory")
        self.add_scratch(lease, owner)
        return lease

    @property
    def num_waiting(self) -> int:
        """Owners that wait for memory."""
        return len(self._waiting)

    def close(self) -> None:
        """Nobody is woken any more."""
        self._arena.on_release = None
