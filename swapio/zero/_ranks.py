"""Everything between ranks, over gloo on host memory.

[Note: Asking instead of meeting] A collective for weights would need all ranks to want the same unit at the same time; ranks that take
different branches would hang, or mix units. So each rank has a thread that serves: whoever needs a unit asks each owner for its slice, and
whoever has a gradient sends each owner its slice. Requests carry the number of steps they were made after, and are answered once the
owner has made as many. Collectives are left for where all ranks meet anyway: `initialize`, `step`, and leaving `GatheredParameters`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from ..errors import RankError

__all__ = ["Ranks", "Server"]

logger = logging.getLogger("swapio")

_GET, _PUT, _BYE = 1, 2, 3
_HEADER_NUMEL = 4  # kind, unit, number, tag
_TAGS_PER_MESSAGE = 16  # a status, then the pieces
_PUT_TAGS = 1 << 29  # apart from those of answers, which are numbered by who asked
_FOREVER = datetime.timedelta(days=3650)
_MESSAGE_NBYTES = 1024
_PLACE_NBYTES = 96
_HASTE_S = 2.0  # when nothing else is waited for
_OPEN: weakref.WeakSet[Ranks] = weakref.WeakSet()


class Server(Protocol):
    """What a rank does for others, on the serving thread."""

    def shard(self, unit: int, num_steps: int) -> contextlib.AbstractContextManager[Sequence[torch.Tensor]]:
        """The pieces of this rank's slice of a unit after `num_steps` steps, uint8, in host memory while the context lasts."""

    def slots(self, unit: int) -> list[torch.Tensor]:
        """Fresh host memory for a gradient's pieces of this rank's slice, uint8."""

    def received(self, source: int, unit: int, number: int, pieces: list[torch.Tensor]) -> None:
        """The `number`-th gradient of a unit came from rank `source`."""

    def failed(self, error: RankError) -> None:
        """Nothing will be served any more."""


class _Nobody:
    """Serves for an engine that was never made."""

    def shard(self, unit: int, num_steps: int) -> contextlib.AbstractContextManager[Sequence[torch.Tensor]]:
        raise RankError("swapio.initialize failed on this rank, so it has no weights")

    def slots(self, unit: int) -> list[torch.Tensor]:
        raise RankError("swapio.initialize failed on this rank, so it sums no gradients")

    def received(self, source: int, unit: int, number: int, pieces: list[torch.Tensor]) -> None:
        pass

    def failed(self, error: RankError) -> None:
        pass


class Ranks:
    """This process among those that train together; alone where `torch.distributed` is not initialized.

    Made by all ranks at once. All methods but `close` belong to the thread that computes.

    Args:
        timeout_s: of each wait for another rank.
        alone: whoever else there is does not take part.
    """

    def __init__(self, *, timeout_s: float, alone: bool = False) -> None:
        there = not alone and dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if there else 0
        self.size = dist.get_world_size() if there else 1
        self.timeout_s = timeout_s
        self._limit = datetime.timedelta(seconds=timeout_s)
        self._tags = itertools.count()
        self._thread: threading.Thread | None = None
        self._server: Server | None = None
        self._ended: set[int] = set()  # ranks that said goodbye
        self._closed = False
        self._ending = threading.Lock()
        self._num_ended = 0
        self._groups: list[dist.ProcessGroup] = []
        if self.size > 1:
            # the served requests come whenever they come; the rest must not mix with them
            limits = (_FOREVER, self._limit, self._limit)
            self._groups = [dist.new_group(backend="gloo", timeout=limit) for limit in limits]
            self._control, self._data, self._meeting = self._groups
            _OPEN.add(self)

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def others(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    # --- where all ranks meet ---

    def broadcast(self, tensor: torch.Tensor, *, source: int, what: str) -> None:
        """Give all ranks the bytes of a contiguous tensor in host memory."""
        if not self.alone and tensor.numel():
            with self._named(what):
                dist.broadcast(tensor.view(-1).view(torch.uint8), source, group=self._meeting)

    def all_gather(self, tensor: torch.Tensor, *, what: str) -> list[torch.Tensor]:
        """The tensor of each rank."""
        if self.alone:
            return [tensor]
        self._check_place(what, tensor)
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._named(what):
            dist.all_gather(gathered, tensor, group=self._meeting)
        return gathered

    def _check_place(self, what: str, tensor: torch.Tensor) -> None:
        """Ranks that meet in different places would exchange bytes that mean different things, or end the process."""
        mine = f"{what} ({tensor.nbytes} bytes)".encode()[:_PLACE_NBYTES].ljust(_PLACE_NBYTES)
        places = [torch.empty(_PLACE_NBYTES, dtype=torch.uint8) for _ in range(self.size)]
        with self._named(what):
            dist.all_gather(places, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=self._meeting)
        for rank, place in enumerate(places):
            theirs = bytes(place.tolist())
            if theirs != mine:
                there = theirs.decode(errors="replace").strip()
                raise RankError(f"{what}: rank {rank} is elsewhere, at {there!r}; all ranks must make the same calls of the engine")

    def gather(self, value: Any, *, what: str) -> list[Any]:
        """The picklable value of each rank, on rank 0; nothing on the others."""
        if self.alone:
            return [value]
        self.meet(what)
        gathered = [None] * self.size if self.rank == 0 else None
        with self._named(what):
            dist.gather_object(value, gathered, dst=0, group=self._meeting)
        return gathered or []

    def meet(self, what: str) -> None:
        """Return when all ranks are here."""
        self.all_gather(torch.zeros(1, dtype=torch.int64), what=what)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """All ranks leave it without an error, or each of them with one: its own, or that another rank has one."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        said = f"{type(error).__name__}: {error}".encode()[:_MESSAGE_NBYTES] if error is not None and not self.alone else b""
        told = self.all_gather(torch.frombuffer(bytearray(said.ljust(_MESSAGE_NBYTES, b"\0")), dtype=torch.uint8), what=what)
        if error is not None:
            raise error
        for rank, message in enumerate(told):
            if message.any():
                raise RankError(f"{what} failed on rank {rank}: {bytes(message.tolist()).rstrip(bytes(1)).decode(errors='replace')}")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Where all ranks meet; None when alone."""
        return None if self.alone else self._meeting

    # --- asking and sending ---

    def serve(self, server: Server) -> None:
        """Answer the others from now on."""
        if not self.alone:
            self._server = server
            self._thread = threading.Thread(target=self._serve, name="swapio-rank-server", daemon=True)
            self._thread.start()

    def get(self, unit: int, *, num_steps: int, into: Mapping[int, Sequence[torch.Tensor]], what: str) -> None:
        """Fill the pieces of a unit, by owner, uint8 in host memory, with what they are after `num_steps` steps."""
        waits = []
        with self._named(what):
            for source, pieces in into.items():
                base = self._tag()
                status = torch.zeros(1, dtype=torch.int64)
                works = [self._receive(status, source, base), *(self._receive(p, source, base + 1 + i) for i, p in enumerate(pieces))]
                dist.send(torch.tensor([_GET, unit, num_steps, base]), source, group=self._control)
                waits.append((source, status, works))
            for source, status, works in waits:
                works[0].wait(self._limit)
                if int(status):
                    raise RankError(f"{what}: rank {source} could not read its slice; its own log says why")
                for work in works[1:]:
                    work.wait(self._limit)

    def put(self, unit: int, *, number: int, pieces: Mapping[int, Sequence[torch.Tensor]], what: str) -> None:
        """Send each owner its pieces of a gradient, uint8 in host memory; they may be changed afterwards."""
        with self._named(what):
            works = []
            for target, parts in pieces.items():
                base = _PUT_TAGS + self._tag()
                dist.send(torch.tensor([_PUT, unit, number, base]), target, group=self._control)
                works += [self._send(p, target, base + 1 + i) for i, p in enumerate(parts)]
            for work in works:
                work.wait(self._limit)

    def close(self, *, wait: bool = True) -> None:
        """Say goodbye, and serve until all others have. Idempotent.

        Args:
            wait: for the others, up to `timeout_s`; else the serving thread ends by itself.
        """
        if self._closed or self.alone:
            return
        self._closed = True
        if self._thread is None:  # initialize failed here: whoever goes on shall be told, and goodbyes need a listener
            self.serve(_Nobody())
        goodbye = torch.tensor([_BYE, 0, 0, 0])
        limit = datetime.timedelta(seconds=self.timeout_s if wait else min(self.timeout_s, _HASTE_S))
        with contextlib.suppress(RuntimeError):  # who is gone needs none
            for work in [cast(dist.Work, dist.isend(goodbye, other, group=self._control)) for other in self.others]:
                work.wait(limit)
        self._one_ended()
        if wait and self._thread is not None:
            self._thread.join(self.timeout_s)
            if self._thread.is_alive():
                missing = sorted(set(self.others) - self._ended)
                logger.warning("ranks %s have not closed their engine within %s s; they cannot be served any more", missing, self.timeout_s)

    def leave(self) -> None:
        """Close as the process ends. A thread that came back from a wait while Python goes down would end it by `std::terminate`."""
        self.close(wait=False)
        if self._thread is not None:
            self._thread.join(min(self.timeout_s, _HASTE_S))

    def _one_ended(self) -> None:
        """The serving thread is through, or `close` has said goodbye: whoever is second closes the sockets."""
        with self._ending:
            self._num_ended += 1
            if self._num_ended < 2:
                return
        _OPEN.discard(self)
        if not dist.is_initialized():
            return
        for group in self._groups:
            with contextlib.suppress(RuntimeError, ValueError):  # its ranks are gone
                dist.destroy_process_group(group)

    def _send(self, tensor: torch.Tensor, target: int, tag: int) -> dist.Work:
        return cast(dist.Work, dist.isend(tensor, target, group=self._data, tag=tag))

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> dist.Work:
        return cast(dist.Work, dist.irecv(tensor, source, group=self._data, tag=tag))

    def _tag(self) -> int:
        return next(self._tags) % (1 << 24) * _TAGS_PER_MESSAGE

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, RankError):
                raise
            raise RankError(
                f"{what}: another rank died, ended, or did not answer within {self.timeout_s:g} s (swapio.timeout_s): {_first_line(error)}"
            ) from error

    # --- the serving thread ---

    def _serve(self) -> None:
        server = self._server
        if server is None:
            raise RuntimeError("there is nobody to serve for")
        header = torch.zeros(_HEADER_NUMEL, dtype=torch.int64)
        try:
            while len(self._ended) < self.size - 1:
                source = dist.recv(header, group=self._control)
                kind, unit, number, base = header.tolist()
                if kind == _BYE:
                    self._ended.add(source)
                elif kind == _GET:
                    self._answer(server, source, unit, number, base)
                else:
                    pieces = server.slots(unit)
                    works = [self._receive(p, source, base + 1 + i) for i, p in enumerate(pieces)]
                    for work in works:
                        work.wait(self._limit)
                    server.received(source, unit, number, pieces)
        except Exception as error:
            if not self._closed:
                server.failed(RankError(f"rank {self.rank} can serve no more, another rank died or ended: {_first_line(error)}"))
        finally:
            self._one_ended()

    def _answer(self, server: Server, source: int, unit: int, number: int, base: int) -> None:
        try:
            opened = server.shard(unit, number)
            pieces = opened.__enter__()
        except Exception:
            logger.exception("rank %d asked for a slice of a unit, which could not be read", source)
            dist.send(torch.ones(1, dtype=torch.int64), source, group=self._data, tag=base)
            return
        try:
            dist.send(torch.zeros(1, dtype=torch.int64), source, group=self._data, tag=base)
            works = [self._send(p, source, base + 1 + i) for i, p in enumerate(pieces)]
            for work in works:
                work.wait(self._limit)
        finally:
            opened.__exit__(None, None, None)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _close_all() -> None:
    for ranks in list(_OPEN):
        ranks.leave()


atexit.register(_close_all)
