"""Moves records between file, host and device: coroutines on one loop thread decide, I/O threads and device streams move bytes.

[Note: One writer] Every change of a record's residency happens in a coroutine of `Mover`, on its loop thread, under the record's
`busy` lock, so no state needs a lock of its own. The exception is pinning: a hit pins on the caller's thread under
`record.lock`, and a copy is dropped only after the loop has seen zero pins under that same lock. Nothing here blocks the loop.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from ..errors import SwapioError, UsageError
from ..io import IOThreads, Storage
from ..memory import Arena, Device, Lease
from ..spec import PAGE_NBYTES, Extent, round_up
from ._in_file import FilePart
from ._loop import Loop
from ._record import DeviceCopy, Place, Record, Residency
from ._room import Room

__all__ = ["DEMAND", "PREFETCH", "WRITE_BACK", "Mover"]

DEMAND, WRITE_BACK, PREFETCH = 0, 1, 2  # priorities of I/O: lower goes first


class Mover:
    """The state machine of the records. Methods starting with `_` or `async` run on the loop."""

    def __init__(
        self, *, storage: Storage, io: IOThreads, arena: Arena, device: Device, device_capacity: int | None, timeout_s: float
    ) -> None:
        self.storage = storage
        self.io = io
        self.device = device
        self.records: dict[str, Record] = {}
        self.on_event: Callable[[str, str], None] | None = None  # ("read", key), ... for tests and traces
        self.counters: collections.Counter[str] = collections.Counter()
        self.clock = itertools.count(1)
        self.failures: collections.deque[SwapioError] = collections.deque()  # of write-backs, not yet raised to anybody
        self.loop = Loop("swapio-manager")
        self.room = Room(
            self.loop, arena=arena, device=device, device_capacity=device_capacity, timeout_s=timeout_s, records=self.records,
            settle_soon=self._settle_soon, event=self._event, pending=self.pending,
        )  # fmt: skip

    # --- from any thread ---

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
        if self.room.wants_write_back(record) or (place is not record.home and self.device.has_memory):
            self.loop.call(self._released, record)
        else:
            self.room.wake()

    def publish(self, record: Record, place: Place, *, dirty: slice | None) -> None:
        """The caller's use of a pinned copy until now is over; if bytes of it are `dirty`, that copy is the only current one."""
        if place is Place.DEVICE and record.device is not None:
            record.device.used = self.device.record()
        with record.lock:
            if dirty is not None and not record.removed:
                record.touched(place, dirty)

    # --- on the loop ---

    def _released(self, record: Record) -> None:
        if self.room.wants_write_back(record):
            self._settle_soon(record)
        elif self.device.has_memory:
            self.room.drop_surplus(record)
        self.room.wake_now()

    def _settle_soon(self, record: Record) -> None:
        if record.busy.locked():
            return  # whoever holds it looks again when it is done

        async def settle() -> None:
            try:
                await self.settle(record)
            except SwapioError:
                pass  # kept in failures for the next call
            finally:
                self.loop.num_moving -= 1
                self.room.wake_now()

        self.loop.num_moving += 1
        self.loop.start(settle())

    def _event(self, kind: str, record: Record) -> None:
        self.counters[kind] += 1
        if self.on_event is not None:
            self.on_event(kind, record.key)

    async def _io(self, start: Callable[..., None], record: Record, lease: Lease, span: slice, priority: int) -> int:
        """Move the pages around the bytes `span`; returns their size in bytes."""
        extent = record.extent
        if extent is None:
            raise RuntimeError(f"{record.key!r} has no extent")
        first = span.start // PAGE_NBYTES * PAGE_NBYTES
        buffer = lease.buffer[first : round_up(span.stop, PAGE_NBYTES)]
        await self.loop.elsewhere(lambda done: start(extent.offset + first, buffer, name=record.key, priority=priority, done=done))
        return buffer.nbytes

    async def bring(
        self, record: Record, place: Place, *, owner: object, demand: bool, pin: bool, on_room: Callable[[], object] | None = None
    ) -> bool:
        """Make the copy in `place` current. False when a prefetch found no room.

        Args:
            on_room: called when it has the memory in `place`.

        Raises:
            StorageError: the read failed; the record is as before.
            BudgetError: see `Room`.
        """
        async with self.room.waits(owner if demand else None), record.busy:
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
            self.room.drop_surplus(record)
        self.room.wake_now()
        return brought

    async def _to_host(self, record: Record, owner: object, demand: bool, on_room: Callable[[], object] | None = None) -> bool:
        lease = record.host
        if lease is None:
            taken = await self.room.space(Place.HOST, record.key, record.nbytes, owner=owner, demand=demand)
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
            self.room.resident[0].add(record)
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
            await self.loop.elsewhere(lambda done: read(done=done))
            self.counters["bytes_read"] += part.nbytes

        parts = asyncio.gather(*(bring(*each) for each in found), return_exceptions=True)  # then nobody uses the lease
        ended = await self.loop.moving(parts)  # already before each of them moves
        for error in ended:
            if error is not None:
                raise error

    async def _leave_files(self, record: Record) -> None:
        """What a record has in files was changed: make room for all of it, and let all be written.

        Raises:
            StorageError: no room on the drive.
        """
        extents: list[Extent] = []
        await self.loop.in_thread(lambda: extents.append(self.storage.reserve(record.nbytes, name=record.key)), "swapio-reserve")
        if record.extent is not None:
            self.storage.free(record.extent)
        with record.lock:
            record.extent, record.in_file, record.stored_nbytes = extents[0], (), 0
            record.changed = slice(0, record.nbytes)

    async def _to_device(self, record: Record, owner: object, demand: bool, on_room: Callable[[], object] | None = None) -> bool:
        if not record.current[Place.HOST] and not await self._to_host(record, owner, demand):
            return False
        with record.lock:  # keep the host copy while we wait for room above
            record.pins.append((Place.HOST, self.room))
        try:
            copy = record.device
            if copy is None:
                taken = await self.room.space(Place.DEVICE, record.key, record.nbytes, owner=owner, demand=demand)
                if not isinstance(taken, DeviceCopy):
                    return False
                copy = taken
            if on_room is not None:
                on_room()
            self._upload(record, copy)
        finally:
            with record.lock:
                record.pins.remove((Place.HOST, self.room))
        return True

    def _upload(self, record: Record, copy: DeviceCopy) -> None:
        if record.host is None:
            raise RuntimeError(f"{record.key!r}: nothing to upload")
        with record.moving(Residency.UPLOADING):
            copy.arrived = self.device.upload(record.host.tensor[: record.nbytes], copy.tensor, after=self.device.record())
            self.room.uploads.append(copy.arrived)
            self._event("upload", record)
        with record.lock:
            record.device = copy
            record.current[Place.DEVICE] = True
        if record.home is not Place.DEVICE:
            self.room.resident[1].add(record)

    async def _download(self, record: Record, copy: DeviceCopy, lease: Lease) -> None:
        while True:
            with record.lock:
                generation = record.generation
            with record.moving(Residency.OFFLOADING):
                event = self.device.download(copy.tensor, lease.tensor[: record.nbytes], after=copy.used or self.device.record())
                await self.loop.landed(event)
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
                        await self._to_host(record, self.room, True)
                    else:
                        await self._write(record)
                    record.error = None
            except SwapioError as error:
                record.error = error
                self.failures.append(error)
                raise
        self.room.drop_surplus(record)
        if self.room.wants_write_back(record):
            self._settle_soon(record)

    async def _demand_device(self, record: Record) -> DeviceCopy:
        copy = await self.room.space(Place.DEVICE, record.key, record.nbytes, owner=self.room, demand=True)
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

    async def discard(self, record: Record) -> None:
        """Forget the bytes: the record is zeros again, in no memory. Nothing happens while it is in use."""
        async with record.busy:
            self.forget_bytes(record)
        self.room.wake_now()

    def forget_bytes(self, record: Record) -> None:
        """What `discard` does, for who has the record's `busy` lock."""
        with record.lock:
            if record.removed or record.pins:
                return
            record.reset()
            host, record.host = record.host, None
        self.room.resident[0].discard(record)
        if host is not None:
            host.release()

    async def evict(self, records: Iterable[Record], owner: object) -> None:
        """Write back if dirty and drop the copies away from home; those in use stay."""
        async with self.room.waits(owner):
            for record in records:
                if record.pins:
                    continue
                if record.dirty:
                    await self.settle(record)
                async with record.busy:
                    pass  # whatever was moving it is done
                self.room.drop(record, Place.DEVICE)
                self.room.drop(record, Place.HOST)
        self.room.wake_now()

    async def flush(self, owner: object) -> None:
        """Bring every home copy up to date, then make the file durable. Raises the first failure of any write."""
        async with self.room.waits(owner):
            await self._flush()

    async def _flush(self) -> None:
        dirty = [r for r in list(self.records.values()) if r.dirty and not r.pins]
        for result in await asyncio.gather(*(self.settle(r) for r in dirty), return_exceptions=True):
            if isinstance(result, BaseException):
                self.failures.clear()
                raise result
        self.failures.clear()  # all is written now, whatever failed before

        await self.loop.in_thread(self.storage.sync, "swapio-sync")

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
        async with self.room.waits(owner), record.busy:
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
                self.room.device_nbytes -= record.nbytes
            for resident in self.room.resident:
                resident.discard(record)
            if host is not None:
                host.release()
            if record.lent is not None:
                record.lent = None  # the extent goes with the last who reads from it
            elif record.extent is not None:
                self.storage.free(record.extent)
            self.room.count(record, -1)
        self.room.wake_now()

    def pending(self) -> str:
        """What moves or waits, since when; for the error of a wait that took too long."""
        now = time.monotonic()
        moving = [f"{r.key} {m.name} for {now - r.since:.1f} s" for r in list(self.records.values()) if (m := r.movement) is not None]
        return ", ".join(moving[:8]) or "no movement" + (f"; {self.room.num_waiting} wait for memory" if self.room.num_waiting else "")
