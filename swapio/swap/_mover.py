"""Moves records between file, host and device: coroutines on one loop thread decide, I/O threads and device streams move bytes.

[Note: One writer] Every change of a record's residency happens in a coroutine of `Mover`, on its loop thread, under the record's
`busy` lock, so no state needs a lock of its own. The exception is pinning: a hit pins on the caller's thread under
`record.lock`, and a copy is dropped only after the loop has seen zero pins under that same lock. Nothing here blocks the loop.

[Note: Back-pressure] Memory is asked for in `_space`: unused copies are dropped, dirty ones written back, and then the request waits
for bytes to come back. It raises `BudgetError` as soon as nobody but the asking owner holds what would have to go: nothing could
ever free it. A prefetch never waits for more than movements already under way; it is skipped instead.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import ctypes
import functools
import gc
import itertools
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from ..errors import BudgetError, ClosedError, SwapioError, TransferTimeoutError, UsageError
from ..io import IOThreads, Storage
from ..memory import Arena, Device, Event, Lease
from ..spec import PAGE_NBYTES, Extent, format_nbytes, round_up
from ._ahead import Prefetcher
from ._in_file import FilePart
from ._record import DeviceCopy, Place, Record, Residency

__all__ = ["DEMAND", "PREFETCH", "WRITE_BACK", "Mover"]

T = TypeVar("T")
DEMAND, WRITE_BACK, PREFETCH = 0, 1, 2  # priorities of I/O: lower goes first
_EVENT_POLL_S = 0.0002


class Mover:
    """The loop thread, the pools of memory and the state machine. Methods starting with `_` or `async` run on the loop."""

    def __init__(
        self, *, storage: Storage, io: IOThreads, arena: Arena, device: Device, device_capacity: int | None, timeout_s: float
    ) -> None:
        self.storage = storage
        self.io = io
        self.arena = arena
        self.device = device
        self.device_capacity = device_capacity
        self.timeout_s = timeout_s
        self.records: dict[str, Record] = {}
        self.scratch: dict[int, tuple[object, Lease]] = {}  # leases of no record: id -> (owner, lease)
        self.on_event: Callable[[str, str], None] | None = None  # ("read", key), ... for tests and traces
        self.counters: collections.Counter[str] = collections.Counter()
        self.headroom = 0  # bytes of host memory that prefetches leave free
        self.nvme_nbytes = 0  # sum over records at home on NVMe
        self.fixed_nbytes = 0  # blocks of records at home in host memory and of scratch: no prefetch can have them
        self._count_lock = threading.Lock()
        self.device_nbytes = 0
        self.clock = itertools.count(1)
        self._resident: tuple[set[Record], set[Record]] = (set(), set())  # with a host lease, a device buffer, that is not their home
        self._sleepers: list[asyncio.Future[None]] = []
        self._waiting: collections.Counter[object] = collections.Counter()  # owners that wait in _space
        self._active = 0  # movements that will free or deliver something without anybody's help
        self._closing = False
        self._uploads: collections.deque[Event] = collections.deque(maxlen=64)  # that may still hold their host copy
        self.failures: collections.deque[SwapioError] = collections.deque()  # of write-backs, not yet raised to anybody
        self._tasks: set[asyncio.Future[Any]] = set()  # the loop itself keeps only weak references
        self.prefetchers: list[Prefetcher] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="swapio-manager", daemon=True)
        self.thread.start()
        arena.on_release = self.wake

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(self._cancel_all())  # what was submitted while it stopped
        finally:
            self.loop.close()

    # --- from any thread ---

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Any:
        """Run on the loop; returns a `concurrent.futures.Future`."""
        if self._closing:
            coroutine.close()
            raise ClosedError("the swap manager is closed")
        return asyncio.run_coroutine_threadsafe(self._until_closed(coroutine), self.loop)

    async def _until_closed(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            return await coroutine
        except asyncio.CancelledError:
            if self._closing:
                raise ClosedError("the swap manager was closed while this was pending") from None
            raise

    def wake(self) -> None:
        """Bytes came back, or a pin went: let whoever waits for memory look again. Takes no lock."""
        if self._sleepers:
            self.call(self._wake)

    def pin(self, record: Record, place: Place, owner: object) -> bool:
        """Pin a current copy on the caller's thread; False when there is none. No hop."""
        with record.lock:
            if record.removed or not record.current[place] or (record.host if place is Place.HOST else record.device) is None:
                return False
            record.pins.append((place, owner))
            record.last_use = next(self.clock)
            record.prefetched = False
        return True

    def unpin(self, record: Record, place: Place, owner: object, *, dirty: slice | None) -> None:
        """Undo one pin; `dirty` says which bytes were changed."""
        self.publish(record, place, dirty=dirty)
        with record.lock:
            record.pins.remove((place, owner))
        if self.wants_write_back(record) or (place is not record.home and self.device.has_memory):
            self.call(self._released, record)
        else:
            self.wake()

    def publish(self, record: Record, place: Place, *, dirty: slice | None) -> None:
        """The caller's use of a pinned copy until now is over; if bytes of it are `dirty`, that copy is the only current one."""
        if place is Place.DEVICE and record.device is not None:
            record.device.used = self.device.record()
        with record.lock:
            if dirty is not None and not record.removed:
                record.touched(place, dirty)

    def count(self, record: Record, sign: int) -> None:
        """A record came (1) or went (-1)."""
        with self._count_lock:
            if record.home is Place.NVME:
                self.nvme_nbytes += sign * record.nbytes
            elif record.home is Place.HOST:
                self.fixed_nbytes += sign * self.arena.block_nbytes(record.nbytes)

    def count_scratch(self, lease: Lease, sign: int) -> None:
        """A lease of no record came (1) or went (-1)."""
        with self._count_lock:
            self.fixed_nbytes += sign * self.arena.block_nbytes(lease.nbytes)

    def wants_write_back(self, record: Record) -> bool:
        """Whether to write back now rather than when the memory is needed: when not all that rests on NVMe fits in memory."""
        if not record.dirty or record.pins:
            return False
        if record.home is Place.NVME:
            return self.arena.capacity is not None and self.nvme_nbytes + self.fixed_nbytes > self.arena.capacity
        return self.device.has_memory

    def close(self, timeout: float) -> None:
        """Stop deciding. I/O threads must have ended before: nothing moves bytes any more."""
        self._closing = True
        self.arena.on_release = None
        if self.thread.is_alive():
            self.call(self._shut)
            self.thread.join(timeout)

    def call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            if not self.loop.is_closed():
                raise

    # --- on the loop ---

    def _shut(self) -> None:
        self._finish = self.loop.create_task(self._cancel_all(), name="swapio-close")
        self._finish.add_done_callback(lambda _: self.loop.stop())

    @staticmethod
    async def _cancel_all() -> None:
        await asyncio.sleep(0)  # what was just submitted becomes a task
        tasks = [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # let the results reach the threads that wait

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)
        for prefetcher in self.prefetchers:
            prefetcher.pump()

    def _released(self, record: Record) -> None:
        if self.wants_write_back(record):
            self._settle_soon(record)
        elif self.device.has_memory:
            self._drop_surplus(record)
        self._wake()

    def _settle_soon(self, record: Record) -> None:
        if record.busy.locked():
            return  # whoever holds it looks again when it is done

        async def settle() -> None:
            try:
                await self.settle(record)
            except SwapioError:
                pass  # kept in failures for the next call
            finally:
                self._active -= 1
                self._wake()

        self._active += 1
        self.start(settle())

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run beside, on the loop."""
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _event(self, kind: str, record: Record) -> None:
        self.counters[kind] += 1
        if self.on_event is not None:
            self.on_event(kind, record.key)

    async def _moving(self, awaitable: Awaitable[T]) -> T:
        self._active += 1
        try:
            return await awaitable
        finally:
            self._active -= 1

    async def _io(self, start: Callable[..., None], record: Record, lease: Lease, span: slice, priority: int) -> int:
        """Move the pages around the bytes `span`; returns their size in bytes."""
        extent = record.extent
        if extent is None:
            raise RuntimeError(f"{record.key!r} has no extent")
        first = span.start // PAGE_NBYTES * PAGE_NBYTES
        buffer = lease.buffer[first : round_up(span.stop, PAGE_NBYTES)]
        await self._elsewhere(lambda done: start(extent.offset + first, buffer, name=record.key, priority=priority, done=done))
        return buffer.nbytes

    async def _elsewhere(self, start: Callable[[Callable[[BaseException | None], None]], None]) -> None:
        """Await what another thread does: `start(done)` begins it, and it calls `done(error or None)` at its end."""
        ended: asyncio.Future[None] = self.loop.create_future()

        def finish(error: BaseException | None) -> None:
            if ended.done():
                return
            if error is None:
                ended.set_result(None)
            else:
                ended.set_exception(error)

        start(lambda error: self.call(finish, error))
        await self._moving(ended)

    async def _in_thread(self, function: Callable[[], None], name: str) -> None:
        """Await a call that blocks, in a thread of its own."""

        def run(done: Callable[[BaseException | None], None]) -> None:
            try:
                function()
            except BaseException as error:
                done(error)
            else:
                done(None)

        await self._elsewhere(lambda done: threading.Thread(target=run, args=(done,), name=name, daemon=True).start())

    async def _landed(self, event: Event) -> None:
        async def poll() -> None:
            while not event.done():
                await asyncio.sleep(_EVENT_POLL_S)

        await self._moving(poll())

    async def bring(
        self, record: Record, place: Place, *, owner: object, demand: bool, pin: bool, on_room: Callable[[], object] | None = None
    ) -> bool:
        """Make the copy in `place` current. False when a prefetch found no room.

        Args:
            on_room: called when it has the memory in `place`.

        Raises:
            StorageError: the read failed; the record is as before.
            BudgetError: see the note above.
        """
        async with self._waits(owner if demand else None), record.busy:
            if record.removed:
                raise KeyError(f"{record.key!r} was deleted meanwhile")
            to_place = self._to_host if place is Place.HOST else self._to_device
            brought = record.current[place] or await to_place(record, owner, demand, on_room)
            if brought:
                with record.lock:
                    record.last_use = next(self.clock)
                    record.prefetched = not pin
                    if pin:
                        record.pins.append((place, owner))
        if brought and place is Place.DEVICE:
            self._drop_surplus(record)
        self._wake()
        return brought

    async def _to_host(self, record: Record, owner: object, demand: bool, on_room: Callable[[], object] | None = None) -> bool:
        lease = record.host
        if lease is None:
            taken = await self._space(Place.HOST, record.key, record.nbytes, owner=owner, demand=demand)
            if not isinstance(taken, Lease):
                return False
            lease = taken
        if on_room is not None:
            on_room()
        try:
            if record.current[Place.DEVICE] and record.device is not None:
                await self._download(record, record.device, lease)
            else:
                await self._read(record, lease, DEMAND if demand else PREFETCH)
        except BaseException:
            if record.host is None:
                lease.release()
            raise
        with record.lock:
            record.host = lease
            record.current[Place.HOST] = True
        if record.home is not Place.HOST:
            self._resident[0].add(record)
        return True

    async def _read(self, record: Record, lease: Lease, priority: int) -> None:
        stored, own = record.stored_nbytes, record.own_nbytes
        with record.moving(Residency.READING):
            if stored:
                nbytes = await self._io(self.io.read, record, lease, slice(0, stored), priority)
                self.counters["bytes_read"] += nbytes  # not in one line: others count meanwhile
            if own > stored and not record.overwritten:  # never written: zeros
                ctypes.memset(lease.tensor.data_ptr() + stored, 0, own - stored)
            if parts := (*record.in_file, *record.borrowed):
                await self._read_parts(parts, lease, priority)
            if stored or parts:
                self._event("read", record)

    async def _read_parts(self, found: Sequence[tuple[int, FilePart]], lease: Lease, priority: int) -> None:
        """What a record has elsewhere."""

        async def bring(at: int, part: FilePart) -> None:
            into = lease.buffer[at : at + part.nbytes]
            read = functools.partial(self.io.read, part.offset, into, name=part.name, priority=priority, storage=part.file)
            await self._elsewhere(lambda done: read(done=done))
            self.counters["bytes_read"] += part.nbytes

        parts = asyncio.gather(*(bring(*each) for each in found), return_exceptions=True)  # then nobody uses the lease
        ended = await self._moving(parts)  # already before each of them moves
        for error in ended:
            if error is not None:
                raise error

    async def _leave_files(self, record: Record) -> None:
        """What a record has in files was changed: make room for all of it, and let all be written.

        Raises:
            StorageError: no room on the drive.
        """
        extents: list[Extent] = []
        await self._in_thread(lambda: extents.append(self.storage.reserve(record.nbytes, name=record.key)), "swapio-reserve")
        if record.extent is not None:
            self.storage.free(record.extent)
        with record.lock:
            record.extent, record.in_file, record.stored_nbytes = extents[0], (), 0
            record.changed = slice(0, record.nbytes)

    async def _to_device(self, record: Record, owner: object, demand: bool, on_room: Callable[[], object] | None = None) -> bool:
        if not record.current[Place.HOST] and not await self._to_host(record, owner, demand):
            return False
        with record.lock:  # keep the host copy while we wait for room above
            record.pins.append((Place.HOST, self))
        try:
            copy = record.device
            if copy is None:
                taken = await self._space(Place.DEVICE, record.key, record.nbytes, owner=owner, demand=demand)
                if not isinstance(taken, DeviceCopy):
                    return False
                copy = taken
            if on_room is not None:
                on_room()
            self._upload(record, copy)
        finally:
            with record.lock:
                record.pins.remove((Place.HOST, self))
        return True

    def _upload(self, record: Record, copy: DeviceCopy) -> None:
        if record.host is None:
            raise RuntimeError(f"{record.key!r}: nothing to upload")
        with record.moving(Residency.UPLOADING):
            copy.arrived = self.device.upload(record.host.tensor[: record.nbytes], copy.tensor, after=self.device.record())
            self._uploads.append(copy.arrived)
            self._event("upload", record)
        with record.lock:
            record.device = copy
            record.current[Place.DEVICE] = True
        if record.home is not Place.DEVICE:
            self._resident[1].add(record)

    async def _download(self, record: Record, copy: DeviceCopy, lease: Lease) -> None:
        while True:
            with record.lock:
                generation = record.generation
            with record.moving(Residency.OFFLOADING):
                event = self.device.download(copy.tensor, lease.tensor[: record.nbytes], after=copy.used or self.device.record())
                await self._landed(event)
            self._event("download", record)
            with record.lock:
                if record.generation == generation:
                    return  # else the bytes changed meanwhile: once more

    async def settle(self, record: Record) -> None:
        """Make the copy at home current.

        Raises:
            StorageError: the write failed; the copy away from home stays the only one, dirty, and every later need of its memory raises.
        """
        async with record.busy:
            try:
                while record.dirty and not record.removed:
                    if record.home is Place.DEVICE:
                        self._upload(record, record.device or await self._demand_device(record))
                    elif not record.current[Place.HOST]:
                        await self._to_host(record, self, True)
                    else:
                        await self._write(record)
                    record.error = None
            except SwapioError as error:
                record.error = error
                self.failures.append(error)
                raise
        self._drop_surplus(record)
        if self.wants_write_back(record):
            self._settle_soon(record)

    async def _demand_device(self, record: Record) -> DeviceCopy:
        copy = await self._space(Place.DEVICE, record.key, record.nbytes, owner=self, demand=True)
        if not isinstance(copy, DeviceCopy):
            raise RuntimeError("a demand returned without memory")
        return copy

    async def _write(self, record: Record) -> None:
        lease = record.host
        if lease is None:
            raise RuntimeError(f"{record.key!r}: nothing to write")
        generation, content, changed = record.to_write()
        if record.in_file and changed.stop > record.own_nbytes:
            await self._leave_files(record)
            generation, content, changed = record.to_write()
        if record.borrowed:
            with record.lock:
                record.borrowed, record.changed = (), slice(0, record.nbytes)
            generation, content, changed = record.to_write()
        # what lies between the stored bytes and the changed ones must be in the file too
        span = slice(min(changed.start, record.stored_nbytes), min(changed.stop, content))
        with record.moving(Residency.WRITING):
            if span.start < span.stop:
                nbytes = await self._io(self.io.write, record, lease, span, WRITE_BACK)
                self.counters["bytes_written"] += nbytes
        self._event("write", record)
        record.stored_nbytes = min(content, max(record.stored_nbytes, span.stop))
        with record.lock:
            if record.generation == generation:
                record.current[Place.NVME] = True
                record.changed = None

    # --- memory ---

    def _drop_surplus(self, record: Record) -> None:
        """On an accelerator with no budget for caching, copies away from home go as soon as they are not used."""
        if not self.device.has_memory:
            return
        if record.home is not Place.DEVICE and self.device_capacity is None:
            self._drop(record, Place.DEVICE)
        if record.home is Place.DEVICE:
            self._drop(record, Place.HOST)

    def _drop(self, record: Record, place: Place) -> int:
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
        self._resident[place - 1].discard(record)
        self._event("evict", record)
        if isinstance(copy, Lease):
            nbytes = self.arena.block_nbytes(record.nbytes)
            copy.release()
            return nbytes
        self.device_nbytes -= record.nbytes
        return record.nbytes

    def _take(self, place: Place, name: str, nbytes: int) -> Lease | DeviceCopy | None:
        if place is Place.HOST:
            return self.arena.try_lease(nbytes, name=name)
        if self.device_capacity is not None and self.device_nbytes + nbytes > self.device_capacity:
            return None
        self.device_nbytes += nbytes
        return DeviceCopy(self.device.empty(nbytes))

    def capacity(self, place: Place) -> int | None:
        return self.arena.capacity if place is Place.HOST else self.device_capacity

    def cost(self, place: Place, nbytes: int) -> int:
        return self.arena.block_nbytes(nbytes) if place is Place.HOST else nbytes

    async def _space(self, place: Place, name: str, nbytes: int, *, owner: object, demand: bool) -> Lease | DeviceCopy | None:
        cost, capacity = self.cost(place, nbytes), self.capacity(place)
        if capacity is not None and cost > capacity:
            raise self._over_budget(place, name, cost)
        deadline = time.monotonic() + self.timeout_s
        collected = False
        own_part = owner is self  # a write-back in need of memory is no movement that ends by itself
        self._active -= own_part
        try:
            while True:
                if self._closing:
                    raise ClosedError("the swap manager was closed while this was pending")
                woken: asyncio.Future[None] = self.loop.create_future()
                self._sleepers.append(woken)  # before looking: a release in between must not be missed
                taken = self._take(place, name, nbytes) if demand or self.has_spare(place, cost) else None
                if taken is not None:
                    return taken
                if self.reclaim(place, cost, self.records.get(name), demand):
                    continue
                hope = self._active > 0 or (demand and self._others_hold(owner))
                if not hope and (landing := self._next_upload()) is not None:
                    await self._landed(landing)  # its host copy is held only by the copying
                    continue
                if not hope:
                    if not demand:
                        return None
                    if not collected:  # views in reference cycles
                        collected = True
                        gc.collect()
                        continue
                    failed = next((r.error for r in self._resident[0] if r.error is not None), None)
                    raise failed if failed is not None else self._over_budget(place, name, cost)
                try:
                    await asyncio.wait_for(woken, deadline - time.monotonic())
                except TimeoutError:
                    raise TransferTimeoutError(
                        f"no room for {name!r} ({format_nbytes(cost)}) within {self.timeout_s} s; pending: {self.pending()}"
                    ) from None
        finally:
            self._active += own_part

    @contextlib.asynccontextmanager
    async def _waits(self, owner: object) -> AsyncIterator[None]:
        """`owner` waits inside, so nobody need hope that he lets go of what he holds; None: nobody waits."""
        if owner is None:
            yield
            return
        self._waiting[owner] += 1
        self._wake()  # who hoped for him must look again
        try:
            yield
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]

    def _next_upload(self) -> Event | None:
        while self._uploads:
            event = self._uploads.popleft()
            if not event.done():
                return event
        return None

    def has_spare(self, place: Place, cost: int) -> bool:
        """Whether a prefetch may take `cost` bytes: what is about to be demanded (`headroom`) must stay free."""
        capacity = self.capacity(place)
        used = self.device_nbytes if place is Place.DEVICE else self.arena.leased_nbytes + self.headroom
        return capacity is None or used + cost <= capacity

    def reclaim(self, place: Place, cost: int, wanted: Record | None, demand: bool) -> bool:
        """Until `cost` bytes came back or will: drop unused copies, what is expected last first, and write back dirty ones.

        A dirty copy that is expected later is waited for rather than that a clean one goes which must be read again sooner. For a prefetch,
        only what is expected later than itself goes, or what was used since it was prefetched.
        """
        freed = coming = 0
        order = sorted(self._resident[place - 1], key=lambda r: r.distance, reverse=True)
        if not demand and wanted is not None:
            known = wanted.next_use is not None
            order = [r for r in order if (r.distance > wanted.distance if known else not r.prefetched)]
        for record in order:
            if freed + coming >= cost:
                break
            dropped = self._drop(record, place)
            freed += dropped
            copy = record.host if place is Place.HOST else record.device
            if dropped or copy is None or record.pinned(place) or not record.current[place] or not record.dirty or copy.held():
                continue
            if record.error is None:
                if not record.busy.locked():
                    self._settle_soon(record)
                coming += self.cost(place, record.nbytes)
        return freed > 0

    def _others_hold(self, owner: object) -> bool:
        """Whether somebody holds memory who is not himself waiting for some: he will let go without our help."""
        owners = itertools.chain(
            (o for o, _ in list(self.scratch.values())),
            (o for r in list(self.records.values()) if r.pins for _, o in tuple(r.pins)),
        )
        return any(o is not self and o != owner and o not in self._waiting for o in owners)

    def _fixed(self, place: Place) -> list[tuple[str, int]]:
        """What cannot go: (name and reason, bytes)."""
        fixed: list[tuple[str, int]] = []
        for record in list(self.records.values()):
            copy = record.host if place is Place.HOST else record.device
            if copy is None:
                continue
            why = "in use" if record.pinned(place) else "a view is held" if copy.held() else "rests here" if record.home is place else ""
            if why:
                fixed.append((f"{record.key} ({why})", self.cost(place, record.nbytes)))
        if place is Place.HOST:
            known = {r.host.name for r in list(self.records.values()) if r.host is not None}
            fixed += [(name, self.cost(place, nbytes)) for name, nbytes, _ in self.arena.live() if name not in known]
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
        async with self._waits(owner):
            lease = await self._space(Place.HOST, name, nbytes, owner=owner, demand=True)
        if not isinstance(lease, Lease):
            raise RuntimeError("a demand returned without memory")
        self.scratch[id(lease)] = (owner, lease)
        self.count_scratch(lease, 1)
        return lease

    async def discard(self, record: Record) -> None:
        """Forget the bytes: the record is zeros again, in no memory. Nothing happens while it is in use."""
        async with record.busy:
            with record.lock:
                if record.removed or record.pins:
                    return
                record.reset()
                host, record.host = record.host, None
            self._resident[0].discard(record)
            if host is not None:
                host.release()
        self._wake()

    async def evict(self, records: Iterable[Record], owner: object) -> None:
        """Write back if dirty and drop the copies away from home; those in use stay."""
        async with self._waits(owner):
            for record in records:
                if record.pins:
                    continue
                if record.dirty:
                    await self.settle(record)
                async with record.busy:
                    pass  # whatever was moving it is done
                self._drop(record, Place.DEVICE)
                self._drop(record, Place.HOST)
        self._wake()

    async def flush(self, owner: object) -> None:
        """Bring every home copy up to date, then make the file durable. Raises the first failure of any write."""
        async with self._waits(owner):
            await self._flush()

    async def _flush(self) -> None:
        dirty = [r for r in list(self.records.values()) if r.dirty and not r.pins]
        for result in await asyncio.gather(*(self.settle(r) for r in dirty), return_exceptions=True):
            if isinstance(result, BaseException):
                self.failures.clear()
                raise result
        self.failures.clear()  # all is written now, whatever failed before

        await self._in_thread(self.storage.sync, "swapio-sync")

    def raise_failed(self) -> None:
        """Raise the failure of a write-back that nobody has heard of yet."""
        if self.failures:
            error = self.failures.popleft()
            self.failures.clear()
            raise error

    async def remove(self, record: Record, owner: object) -> None:
        """Forget the record and give back what it holds; a movement under way is waited for.

        Raises:
            KeyError: somebody else removed it; UsageError: it is in use.
        """
        async with self._waits(owner), record.busy:
            with record.lock:
                if record.removed:
                    raise KeyError(f"{record.key!r} was deleted meanwhile")
                if record.pins:
                    raise UsageError(f"{record.key!r} is in use; release its leases before it is deleted or replaced")
                record.removed, record.in_file, record.borrowed = True, (), ()
                if self.records.get(record.key) is record:
                    del self.records[record.key]
                host, device, record.host, record.device = record.host, record.device, None, None
                record.current = [False, False, False]
            if device is not None:
                self.device_nbytes -= record.nbytes
            for resident in self._resident:
                resident.discard(record)
            if host is not None:
                host.release()
            if record.lent is not None:
                record.lent = None  # the extent goes with the last who reads from it
            elif record.extent is not None:
                self.storage.free(record.extent)
            self.count(record, -1)
        self._wake()

    def pending(self) -> str:
        """What moves or waits, since when; for the error of a wait that took too long."""
        now = time.monotonic()
        moving = [f"{r.key} {m.name} for {now - r.since:.1f} s" for r in list(self.records.values()) if (m := r.movement) is not None]
        return ", ".join(moving[:8]) or "no movement" + (f"; {len(self._waiting)} wait for memory" if self._waiting else "")
