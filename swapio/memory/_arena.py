"""Host memory under a hard budget: leases of page-aligned blocks that live as long as the last view of them.

Every lease has a mapping of its own, so nothing fragments: bytes that one size gives back are unmapped when another size needs them. Blocks
are kept for reuse by size class, because a fresh mapping costs a page fault per page, and registering it with a device costs more.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import torch

from ..errors import BudgetError, ClosedError, ConfigError
from ..spec import PAGE_NBYTES, format_nbytes, round_up
from ._device import Device
from ._mapping import Mapping

__all__ = ["Arena", "Lease"]

_use_count = torch._C._storage_Use_Count


class Lease:
    """One block of host memory, owned until `release`.

    `nbytes` is what was asked for. Attributes may be read from any thread.
    """

    __slots__ = ("_buffer", "_cdata", "_references", "_storage", "_tensor", "_uses", "name", "nbytes")

    def __init__(self, name: str, nbytes: int, tensor: torch.Tensor, buffer: memoryview) -> None:
        self.name = name
        self.nbytes = nbytes
        self._buffer: memoryview | None = buffer
        self._tensor: torch.Tensor | None = tensor
        # The storage's Python object is one and the same for all who ask, and counts as one use from when it was first asked for. So we ask
        # first, and tell whether somebody else has it by its own reference count.
        self._storage: torch.UntypedStorage | None = tensor.untyped_storage()
        self._cdata: int = self._storage._cdata
        self._uses = _use_count(self._cdata)
        self._references = sys.getrefcount(self._storage)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, uint8 `[nbytes]`, page-aligned, content undefined. A new view each time: while anybody has it, the lease is `held`.

        Raises:
            ClosedError: the lease was released.
        """
        if self._tensor is None:
            raise ClosedError(f"the lease of {self.name!r} was released")
        return self._tensor.detach()

    @property
    def buffer(self) -> memoryview:
        """The same bytes for I/O, writable, `nbytes` rounded up to 4096. Having it does not count as a view.

        So whoever gave it away must not release the lease before that I/O has ended: the block may be another lease's by then.

        Raises:
            ClosedError: the lease was released.
        """
        if self._buffer is None:
            raise ClosedError(f"the lease of {self.name!r} was released")
        return self._buffer

    def held(self) -> bool:
        """Whether anything outside can reach the bytes through PyTorch: a view, a graph, an array, a storage. False after `release`."""
        tensor = self._tensor  # keeps the storage alive while we look, and is counted by neither
        if tensor is None:
            return False
        return bool(_use_count(self._cdata) > self._uses or sys.getrefcount(self._storage) > self._references)

    def release(self) -> None:
        """Give the block up. Idempotent; any thread.

        The arena gets it back when the last view is gone, which may be now. Until then it counts as leased, under its name.
        """
        self._buffer = self._storage = self._tensor = None


class Arena:
    """Gives out leases. The sum of all its mappings never exceeds `capacity`.

    All methods may be called from any thread, and none waits for memory. Whoever waits sets `on_release`, which is called after each block
    that came back: from any thread, also inside a garbage collection while that thread is in a method of this class. So it must take no
    lock, call no method of this class, and not raise.

    Args:
        capacity: bytes, `None` for no limit. Without a limit, idle blocks are kept only up to the most that was leased at once.
        device: told of every mapping, to pin it.

    Raises:
        ConfigError: a capacity below one page.
    """

    def __init__(self, capacity: int | None, *, device: Device) -> None:
        if capacity is not None and capacity < PAGE_NBYTES:
            raise ConfigError(
                f'host_memory: {capacity} bytes are less than one page; use at least {PAGE_NBYTES}, for example "1GiB"',
                key="host_memory", value=capacity,
            )  # fmt: skip
        self.capacity = capacity
        self.on_release: Callable[[], None] | None = None
        self._device = device
        self._lock = threading.Lock()
        self._returned: deque[Mapping] = deque()  # what finalizers gave back; they take no lock, whoever has it empties this
        self._out: dict[Mapping, tuple[str, int, float]] = {}  # name, nbytes, since when
        self._idle: defaultdict[int, list[Mapping]] = defaultdict(list)  # by size class; no empty lists
        self._leased_nbytes = 0
        self._mapped_nbytes = 0
        self._peak_nbytes = 0
        self._closed = False

    def block_nbytes(self, nbytes: int) -> int:
        """What a lease of `nbytes` costs: its size class, a multiple of 4096, at most 1/32 or one page above it. 0 costs a page."""
        if nbytes < 0:
            raise ValueError(f"a lease of {nbytes} bytes")
        return round_up(max(nbytes, 1), max(PAGE_NBYTES, (1 << nbytes.bit_length()) >> 6))

    def try_lease(self, nbytes: int, *, name: str) -> Lease | None:
        """A lease of `nbytes` bytes, content undefined; `None` when it does not fit now. `name` is for people.

        Raises:
            BudgetError: it fits the capacity, but the system has no more memory.
            ClosedError: the arena was closed.
        """
        cost = self.block_nbytes(nbytes)
        with self._locked():
            if self._closed:
                raise ClosedError(f"the arena was closed before the lease of {name!r}")
            if self.capacity is not None and self._leased_nbytes + cost > self.capacity:
                return None
            mapping = self._take(cost, name)
            self._leased_nbytes += cost
            self._peak_nbytes = max(self._peak_nbytes, self._leased_nbytes)
            self._out[mapping] = (name, nbytes, time.monotonic())
            tensor = mapping.tensor(nbytes, self._died)
        return Lease(name, nbytes, tensor, memoryview(mapping.memory)[: round_up(nbytes, PAGE_NBYTES)])

    @property
    def leased_nbytes(self) -> int:
        """Bytes of all blocks that are out, those of released leases with living views too."""
        with self._locked():
            return self._leased_nbytes

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of all mappings: what is leased, and what is idle."""
        with self._locked():
            return self._mapped_nbytes

    @property
    def peak_nbytes(self) -> int:
        """The most that `leased_nbytes` ever was."""
        return self._peak_nbytes

    @property
    def num_leases(self) -> int:
        """How many blocks are out."""
        with self._locked():
            return len(self._out)

    def live(self) -> list[tuple[str, int, float]]:
        """The blocks that are out, oldest first: name, bytes asked for, age in seconds."""
        with self._locked():
            now = time.monotonic()
            return [(name, nbytes, now - since) for name, nbytes, since in self._out.values()]

    def trim(self) -> None:
        """Give blocks that wait for reuse back to the system."""
        with self._locked():
            self._unmap_idle()

    def close(self) -> None:
        """Unmap what is idle, refuse new leases. Idempotent. Blocks that are out are unmapped when the last view of them is gone."""
        with self._locked():
            self._closed = True
            self._unmap_idle()

    # --- under the lock ---

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                self._take_back()
                yield
        finally:
            self._settle_closed()

    def _take_back(self) -> None:
        while self._returned:
            mapping = self._returned.popleft()
            del self._out[mapping]
            self._leased_nbytes -= mapping.nbytes
            self._idle[mapping.nbytes].append(mapping)
        if self._closed:
            self._unmap_idle()

    def _take(self, cost: int, name: str) -> Mapping:
        """An idle mapping of that class, else a new one for which idle ones make room."""
        if cost in self._idle:
            mapping = self._idle[cost].pop()
            if not self._idle[cost]:
                del self._idle[cost]
            return mapping
        limit = max(self._peak_nbytes, self._leased_nbytes + cost) if self.capacity is None else self.capacity
        while self._idle and (excess := self._mapped_nbytes + cost - limit) > 0:
            # one block that is enough, the smallest such, else the largest
            self._unmap(min((n for n in self._idle if n >= excess), default=max(self._idle)))
        try:
            mapping = Mapping(cost)
        except OSError:
            self._unmap_idle()
            try:
                mapping = Mapping(cost)
            except OSError as error:
                raise BudgetError(
                    f"the system refuses {format_nbytes(cost)} of memory for {name!r} ({error}), with {format_nbytes(self._mapped_nbytes)} "
                    f"mapped; lower host_memory to that, or raise the limit of the process (ulimit -v, the container's memory)",
                    name=name, needed_nbytes=self._mapped_nbytes + cost, budget_nbytes=self.capacity,
                ) from error  # fmt: skip
        self._device.pin(mapping.address, mapping.nbytes)
        self._mapped_nbytes += cost
        return mapping

    def _unmap(self, nbytes: int) -> None:
        mapping = self._idle[nbytes].pop()
        if not self._idle[nbytes]:
            del self._idle[nbytes]
        self._mapped_nbytes -= nbytes
        self._device.unpin(mapping.address)
        mapping.close()

    def _unmap_idle(self) -> None:
        while self._idle:
            self._unmap(next(iter(self._idle)))

    # --- in finalizers: no lock, or only one that is free ---

    def _died(self, mapping: Mapping) -> None:
        self._returned.append(mapping)
        self._settle_closed()
        on_release = self.on_release
        if on_release is not None:
            on_release()

    def _settle_closed(self) -> None:
        """After `close` nobody may come to empty `_returned`: whoever can have the lock at once does it, and who has it looks again."""
        while self._closed and self._returned and self._lock.acquire(blocking=False):
            try:
                self._take_back()
            finally:
                self._lock.release()
