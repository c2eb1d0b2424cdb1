"""`SwapManager`: a store of tensors that rest on NVMe, in host memory or on the device, and come when they are used."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ..errors import ClosedError, ConfigError, ForkError, SwapioError, UsageError
from ..io import IOThreads, LentExtent, Storage, open_storage
from ..memory import Arena, Device, Lease, get_device
from ..spec import parse_nbytes
from . import _aside
from ._ahead import Prefetcher
from ._aside import Kept
from ._auto import host_capacity
from ._in_file import FilePart
from ._mover import Mover
from ._record import Place, Record, TensorSpec, hull
from ._transfer import Transfer

__all__ = ["Acquisition", "RecordLease", "SwapManager"]

_MANAGERS: weakref.WeakSet[SwapManager] = weakref.WeakSet()


def _mark_forked() -> None:
    for manager in _MANAGERS:
        manager._forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_mark_forked)


def current_owner() -> object:
    """Who asks: the running task, else the thread. Memory that only the asker himself holds is not waited for."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return task if task is not None else threading.get_ident()


class RecordLease:
    """A pinned copy of one record. The bytes stay where they are until `release`; views may live on longer, at the budget's cost."""

    def __init__(self, mover: Mover, record: Record, place: Place, owner: object) -> None:
        self._mover = mover
        self._place = place
        self._owner = owner
        self._dirty: slice | None = None
        self._released = False
        self.record = record
        copy = record.host if place is Place.HOST else record.device
        if copy is None:
            raise RuntimeError(f"{record.key!r} is pinned but has no copy")
        if place is Place.DEVICE and record.device is not None and record.device.arrived is not None:
            mover.device.wait(record.device.arrived)
        self.raw: torch.Tensor = copy.tensor[: record.nbytes]  # uint8 [nbytes]

    @property
    def tensor(self) -> torch.Tensor:
        """The stored tensor: its dtype, shape and strides, sharing the store's memory."""
        if self._released:
            raise ClosedError(f"the lease of {self.record.key!r} was released; acquire it again")
        return self.record.spec.view(self.raw)

    def mark_dirty(self, *, nbytes: int | None = None, span: slice | None = None) -> None:
        """The bytes were, or will be until `release`, changed: they are written back after it.

        Args:
            nbytes: all after these is zeros, and need not be stored.
            span: only these bytes were changed, `slice(start, stop)`; default: all.
        """
        if self._released:
            raise ClosedError(f"the lease of {self.record.key!r} was released; mark it dirty before")
        span = span if span is not None else slice(0, self.record.nbytes)
        self._dirty = hull(self._dirty, span)
        self.record.content_nbytes = max(self.record.content_nbytes, span.stop) if nbytes is None else nbytes

    def publish(self) -> None:
        """Let what was changed count at once, for uses of the record elsewhere; the lease goes on."""
        self._mover.publish(self.record, self._place, dirty=self._dirty)
        self._dirty = None

    def release(self) -> None:
        """Unpin. Idempotent."""
        if not self._released:
            self._released = True
            del self.raw
            self._mover.unpin(self.record, self._place, self._owner, dirty=self._dirty)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class Acquisition:
    """What `SwapManager.acquire` returns: enter it (`with` or `async with`), `wait` or await it to get a `RecordLease`."""

    def __init__(self, manager: SwapManager, key: str, place: Place) -> None:
        self._manager = manager
        self._key = key
        self._place = place
        self._lease: RecordLease | None = None

    def wait(self, timeout: float | None = None) -> RecordLease:
        """Block until the bytes are there; the caller releases the lease."""
        return self._manager.pin(self._manager.record(self._key), self._place, current_owner(), timeout=timeout)

    def __enter__(self) -> RecordLease:
        self._lease = self.wait()
        return self._lease

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lease is not None:
            self._lease.release()

    def __await__(self) -> Generator[Any, None, RecordLease]:
        return self._awaited().__await__()

    async def _awaited(self) -> RecordLease:
        manager, record, owner = self._manager, self._manager.record(self._key), current_owner()
        if not manager.mover.pin(record, self._place, owner):
            transfer = manager.start_pin(record, self._place, owner)
            try:
                await transfer
            except BaseException:
                manager.abandon_pin(transfer, record, self._place, owner)
                raise
        return RecordLease(manager.mover, record, self._place, owner)

    async def __aenter__(self) -> RecordLease:
        self._lease = await self._awaited()
        return self._lease

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.__exit__(kind, error, trace)


class SwapManager:
    """A tiered store of tensors under a hard budget of host memory. All methods may be called from any thread or task.

    Args:
        paths: directories on local drives; several are striped. Needed for tensors at home on NVMe.
        host_memory: bytes, a text like `"1GiB"`, or `"auto"` (what the machine can spare). A hard limit on everything held in host memory.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:1"`, or a `swapio.memory.Device`.
        device_memory: like `host_memory`, for copies on the accelerator; `None` keeps no copy longer than it is used.
        backend: how files are read and written; `"auto"` tries.
        checksums: verify every block that is read back; a flipped byte is an error, never a wrong number.
        block_nbytes, queue_depth: size of one I/O call and number of I/O threads.
        timeout_s: limit of every wait that is given none of its own.
        storage: a storage of your own instead of `paths`; it is closed with the manager.

    Raises:
        ConfigError: a setting that cannot work.
        StorageError: a path that cannot be used.
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]] = (),
        *,
        host_memory: int | str = "auto",
        device: str | torch.device | Device = "cpu",
        device_memory: int | str | None = None,
        backend: str = "auto",
        checksums: bool = False,
        block_nbytes: int | str = "4MiB",
        queue_depth: int = 4,
        timeout_s: float = 300.0,
        storage: Storage | None = None,
    ) -> None:
        if isinstance(paths, str | os.PathLike):
            paths = [paths]
        if not timeout_s > 0:
            raise ConfigError(f"timeout_s: {timeout_s} is no time to wait; use for example 300", key="timeout_s", value=timeout_s)
        self.timeout_s = timeout_s
        self._forked = False
        self._closed = False
        self._close_lock = threading.Lock()
        self._stall_s = 0.0
        self._stats_lock = threading.Lock()
        self._hits = self._misses = 0
        capacity = host_capacity(host_memory)
        device_capacity = None if device_memory is None else parse_nbytes(device_memory, key="device_memory")
        with contextlib.ExitStack() as undo:
            self.device = get_device(device)
            undo.callback(self.device.close)
            self.has_drive = bool(paths) or storage is not None or backend == "memory"
            if storage is None:
                storage = open_storage(paths, backend=backend if paths else "memory", checksums=checksums)
            self.storage = storage
            undo.callback(storage.close)
            self.io = IOThreads(storage, block_nbytes=parse_nbytes(block_nbytes, key="block_nbytes"), queue_depth=queue_depth)
            undo.callback(self.io.close, 5.0)
            self.arena = Arena(capacity, device=self.device)
            undo.callback(self.arena.close)
            self.mover = Mover(
                storage=storage, io=self.io, arena=self.arena, device=self.device, device_capacity=device_capacity, timeout_s=timeout_s
            )
            undo.pop_all()
        _MANAGERS.add(self)

    # --- the store ---

    def put(self, key: str, tensor: torch.Tensor, *, home: str = "nvme") -> Transfer[None]:
        """Store a copy of `tensor` under `key`; the caller may drop or change its own at once.

        Blocks for memory (not for the drive). The bytes go home in the background; `flush` says when they are there.
        A key that exists is replaced once all bytes are copied; until then, and if that fails, the old tensor stays.

        Raises:
            BudgetError: the tensor does not fit; UsageError: not a strided tensor, or the key is in use.
        """
        spec = TensorSpec.of(tensor)
        record = self._make(key, spec.nbytes, Place.parse(home, key="home"), spec)
        record.overwritten = True
        try:
            with self.pin(record, Place.HOST, current_owner()) as lease:
                spec.copy_bytes(tensor, lease.raw)
                lease.mark_dirty()
            while not self._register(record):  # only now: nobody must see a part of it
                with contextlib.suppress(KeyError):
                    self.delete(key)
        except BaseException:
            with contextlib.suppress(SwapioError):
                self.remove(record)
            raise
        return self._transfer(self.mover.settle(record) if self.mover.room.wants_write_back(record) else _nothing(), f"put of {key!r}")

    def create(self, key: str, nbytes: int, *, home: Place = Place.NVME, in_file: Sequence[tuple[int, FilePart]] = ()) -> Record:
        """Add a record of `nbytes` zeros and reserve its place on the drive; no memory is used and nothing is written until it is.

        Args:
            in_file: by byte of the record, ascending, what is in files and stays there as long as nothing from the first of them on is
                changed. Until then the drive has a place for what is before; what is between them is undefined.

        Raises:
            UsageError: the key exists; StorageError: no room on the drive.
        """
        record = self._make(key, nbytes, home, TensorSpec(torch.uint8, (nbytes,), (1,)), in_file)
        if not self._register(record):
            self.remove(record)
            raise UsageError(f"{key!r} is already stored; delete it first")
        return record

    def _make(self, key: str, nbytes: int, home: Place, spec: TensorSpec, in_file: Sequence[tuple[int, FilePart]] = ()) -> Record:
        """A record that nobody can find yet."""
        self._check()
        if home is Place.DEVICE and not self.device.has_memory:
            home = Place.HOST
        if home is Place.NVME and not self.has_drive:
            raise ConfigError('paths: a tensor cannot rest on NVMe without a directory; give paths=["/a/local/drive"]', key="paths")
        record = Record(key, nbytes, home, spec, None, asyncio.Lock(), in_file)
        if home is Place.NVME:
            record.extent = self.storage.reserve(record.own_nbytes, name=key)
        self.mover.room.count(record, 1)
        return record

    def _register(self, record: Record) -> bool:
        return self.mover.records.setdefault(record.key, record) is record

    def record(self, key: str) -> Record:
        """The record of `key`; KeyError names it."""
        self._check()
        try:
            return self.mover.records[key]
        except KeyError:
            raise KeyError(f"{key!r} is not stored; put it first") from None

    def keys(self) -> list[str]:
        return list(self.mover.records)

    def __contains__(self, key: object) -> bool:
        return key in self.mover.records

    def delete(self, key: str) -> None:
        """Forget a record; waits for a movement under way.

        Raises:
            UsageError: somebody has acquired it.
        """
        self.remove(self.record(key))

    def prefetch(self, keys: Iterable[str]) -> Transfer[int]:
        """Start bringing records, in order; advice only: what finds no room is skipped. The result is the number brought."""
        return self.prefetch_records([self.record(k) for k in keys])

    def prefetch_records(self, records: Sequence[Record], *, place: Place = Place.DEVICE) -> Transfer[int]:
        self._check()
        place = self.place(place)

        async def bring_all() -> int:
            done = await asyncio.gather(
                *(self.mover.bring(r, place, owner=None, demand=False, pin=False) for r in records), return_exceptions=True
            )
            for result in done:
                if isinstance(result, BaseException) and not isinstance(result, KeyError):
                    raise result
            return sum(result is True for result in done)

        return self._transfer(bring_all(), f"prefetch of {len(records)} records")

    def acquire(self, key: str, *, on: str = "device") -> Acquisition:
        """Use a record: `with manager.acquire(key) as lease: lease.tensor` (or `async with`). Waits for the bytes.

        Args:
            on: `"device"` or `"host"`; the same on a CPU.
        """
        return Acquisition(self, key, self.place(Place.parse(on, key="on")))

    def evict(self, keys: Iterable[str]) -> Transfer[None]:
        """Write back what is dirty and give up the memory; records in use stay."""
        self._check()
        return self._transfer(self.mover.evict([self.record(k) for k in keys], current_owner()), "evict")

    def flush(self) -> Transfer[None]:
        """Write back everything that is dirty and not in use, and make the file durable; raises the first failed write."""
        self._check()
        return self._transfer(self.mover.flush(current_owner()), "flush")

    # --- for the layers above ---

    def place(self, place: Place) -> Place:
        """On a CPU the device is the host."""
        return Place.HOST if place is Place.DEVICE and not self.device.has_memory else place

    def remove(self, record: Record) -> None:
        """`delete` for who has the record."""
        self._check()
        self._transfer(self.mover.remove(record, current_owner()), f"removal of {record.key!r}").wait()

    def pin(self, record: Record, place: Place, owner: object, *, timeout: float | None = None) -> RecordLease:
        """Bring and pin a record; a hit costs no hop to the manager's thread."""
        self._check()
        if self.mover.pin(record, place, owner):
            self._hits += 1
            return RecordLease(self.mover, record, place, owner)
        transfer = self.start_pin(record, place, owner)
        start = time.perf_counter()
        try:
            transfer.wait(timeout)
        except BaseException:
            self.abandon_pin(transfer, record, place, owner)
            raise
        finally:
            self.add_stall(time.perf_counter() - start)
        return RecordLease(self.mover, record, place, owner)

    def start_pin(self, record: Record, place: Place, owner: object) -> Transfer[bool]:
        """Begin to bring and pin a record that is not there; raises a write-back's failure first."""
        self._check()
        self.mover.raise_failed()
        self._misses += 1
        return self._transfer(self.mover.bring(record, place, owner=owner, demand=True, pin=True), f"acquire of {record.key!r}")

    def abandon_pin(self, transfer: Transfer[bool], record: Record, place: Place, owner: object) -> None:
        """Nobody waits for `transfer` any more: undo its pin when it comes."""

        def undo(done: Transfer[bool]) -> None:
            with contextlib.suppress(BaseException):
                done.wait(0)
                self.mover.unpin(record, place, owner, dirty=None)

        transfer.add_done_callback(undo)

    def prefetcher(self) -> Prefetcher:
        """One that brings records ahead of their use along an order, until it is closed."""
        self._check()
        return Prefetcher(self.mover)

    def lend(self, record: Record, start: int, nbytes: int) -> FilePart:
        """Where the bytes from `start` on lie on the drive, for another record to begin with (`Record.borrowed`).

        They stay there when the record goes. Evict it before: what is newer elsewhere is not there.
        """
        if record.extent is None or not record.current[Place.NVME]:
            raise UsageError(f"{record.key!r} is not on the drive; evict it before it is lent")
        if record.lent is None:
            record.lent = LentExtent(self.storage, record.extent)
            # whose finalizer may run anywhere, so that another thread takes the locks
            weakref.finalize(record.lent, self.mover.loop.call, self.storage.free, record.extent).atexit = False
        return FilePart(record.lent, record.extent.offset + start, nbytes, record.key)

    def discard(self, record: Record) -> None:
        """Let a record that nobody uses be zeros again, without a write."""
        self._transfer(self.mover.discard(record), f"discarding {record.key!r}").wait()

    def set_aside(self, record: Record) -> Kept | None:
        """Let a record be zeros, its bytes kept on the drive until `restore` or `forget`; None if they cannot be: nothing changes."""
        self._check()
        what = f"setting {record.key!r} aside"
        transfer: Transfer[Kept | None] = self._transfer(_aside.set_aside(self.mover, record, current_owner()), what)
        return transfer.wait()

    def restore(self, record: Record, kept: Kept) -> None:
        """Undo `set_aside`, whatever the record has got since."""
        self._transfer(_aside.restore(self.mover, record, kept), f"giving {record.key!r} its bytes back").wait()

    def forget(self, record: Record, kept: Kept) -> None:
        """Give up what was set aside."""
        _aside.forget(self.mover, record, kept)

    def lease(self, name: str, nbytes: int, owner: object) -> Lease:
        """Host memory of no record, uint8 `[nbytes]`, inside the budget. Give it back with `end_lease`."""
        self._check()
        self.mover.raise_failed()
        lease = self.arena.try_lease(nbytes, name=name)
        if lease is not None:
            self.mover.room.add_scratch(lease, owner)
            return lease
        start = time.perf_counter()
        try:
            transfer: Transfer[Lease] = self._transfer(self.mover.room.lease(name, nbytes, owner), f"memory for {name}")
            return transfer.wait()
        finally:
            self.add_stall(time.perf_counter() - start)

    def end_lease(self, lease: Lease) -> None:
        self.mover.room.end_scratch(lease)

    def add_stall(self, seconds: float) -> None:
        """Count time in which a caller waited for bytes or memory."""
        with self._stats_lock:
            self._stall_s += seconds

    def stats(self) -> dict[str, Any]:
        """Counters since the start. Bytes by tier count current copies; `stall_seconds` is what callers waited for bytes or memory."""
        records = list(self.mover.records.values())
        counters = self.mover.counters
        return {
            "bytes_on_nvme": sum(r.own_nbytes for r in records if r.home is Place.NVME),
            "bytes_on_host": sum(r.nbytes for r in records if r.current[Place.HOST]),
            "bytes_on_device": sum(r.nbytes for r in records if r.current[Place.DEVICE]),
            "bytes_read": counters["bytes_read"],
            "bytes_written": counters["bytes_written"],
            "uploads": counters["upload"],
            "downloads": counters["download"],
            "evictions": counters["evict"],
            "hits": self._hits,
            "misses": self._misses,
            "stall_seconds": self._stall_s,
            "host_memory_budget": self.arena.capacity,
            "host_memory_used": self.arena.leased_nbytes,
            "host_memory_peak": self.arena.peak_nbytes,
            "backend": self.storage.kind,
            "backend_reason": self.storage.choice.reason if self.storage.choice is not None else "it was given",
            "path": self.storage.path,
        }

    def close(self) -> None:
        """Stop, close and remove the files, give back the memory; views that are alive keep theirs. Idempotent; takes at most 5 seconds.

        What was not flushed is dropped: the files are scratch.
        """
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        if self._forked:  # threads and files are the parent's
            return
        self.mover.loop.closing = True
        self.io.close(3.0)
        self.mover.room.close()
        self.mover.loop.close(1.5)
        for record in list(self.mover.records.values()):
            if record.host is not None:
                record.host.release()
            record.host = record.device = None
            record.in_file = record.borrowed = ()
            record.lent = None
            record.current = [False, False, False]
            record.removed = True
        self.mover.records.clear()
        for _, lease in list(self.mover.room.scratch.values()):
            lease.release()
        self.mover.room.scratch.clear()
        self.arena.close()
        self.storage.close()
        self.device.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await asyncio.to_thread(self.close)

    @property
    def closed(self) -> bool:
        return self._closed

    def _check(self) -> None:
        if self._forked:
            raise ForkError("this swap manager belongs to the parent process; make one of its own in the child")
        if self._closed:
            raise ClosedError("the swap manager is closed")

    def _transfer(self, coroutine: Any, what: str) -> Transfer[Any]:
        return Transfer(self.mover.loop.submit(coroutine), what=what, timeout_s=self.timeout_s, pending=self.mover.pending)


async def _nothing() -> None:
    return None
