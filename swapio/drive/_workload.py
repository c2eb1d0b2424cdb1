"""Moving bytes the way the store does it, with a clock beside: one action, one setting, a fixed number of bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import numpy as np

from ..errors import StorageError
from ..io import FILE_BACKENDS, ChecksummedStorage, IOThreads, Storage, WrapperStorage, aligned_buffer, cached_nbytes, drop_cache
from ..spec import Extent, format_nbytes

__all__ = ["ACTIONS", "READ_SHARE", "DriveFile", "Sample", "Setting", "measure", "open_files", "written_nbytes"]

ACTIONS = ("read", "write", "mix")
READ_SHARE = 14 / 26
"""Of the bytes that an optimizer step moves with 16-bit weights and fp32 AdamW: 14 of 26 are read."""

_TIMEOUT_S = 120.0
_TRANSFER_NBYTES = 1 << 20
_NUM_PARTS = 16  # at least, of what one measurement moves
_AHEAD = 2  # transfers beyond one for each thread, so that none waits for work however late a block of another ends


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Setting:
    """How bytes are moved: the backend, bytes of one block, and how many blocks are in flight, one thread each."""

    backend: str
    block_nbytes: int
    queue_depth: int

    def __str__(self) -> str:
        return f"{self.backend}, {self.queue_depth} x {format_nbytes(self.block_nbytes)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measurement.

    Attributes:
        seconds: from the first transfer to the end of the last; of buffered writes, until they are durable.
        p50_s, p99_s: of the latency of a block, from when a thread takes it.
        cpu_cores: CPU seconds of this process per second.
        cached_nbytes: of what was read, bytes that lay in the page cache before; None where the system does not tell.
    """

    action: str
    setting: Setting
    read_nbytes: int
    written_nbytes: int
    seconds: float
    p50_s: float
    p99_s: float
    cpu_cores: float
    cached_nbytes: int | None

    @property
    def bytes_per_s(self) -> float:
        return (self.read_nbytes + self.written_nbytes) / self.seconds


class DriveFile:
    """A file of `nbytes` in a directory that is gone when this closes; `fill` it before anything is timed.

    Args:
        checksums: move its bytes through a `ChecksummedStorage`.

    Raises:
        StorageError: the directory cannot be used with that backend, or has no room.
    """

    def __init__(self, directory: str | os.PathLike[str], *, backend: str, nbytes: int, checksums: bool = False) -> None:
        self.file = FILE_BACKENDS[backend](directory)
        self.storage: Storage = ChecksummedStorage(self.file) if checksums else self.file
        try:
            self.extent = self.storage.reserve(nbytes, name="test file")
        except BaseException:
            self.storage.close()
            raise

    def fill(self, content: memoryview) -> int:
        """Write every byte, since a first write into reserved blocks is slower; returns how many."""
        with IOThreads(self.storage) as threads:
            done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            starts = range(self.extent.offset, self.extent.end, content.nbytes)
            for start in starts:
                threads.write(start, content[: self.extent.end - start], name="test file", priority=0, done=done.put)
            for _ in starts:
                if (error := done.get(timeout=_TIMEOUT_S)) is not None:
                    raise error
        self.storage.sync()
        return self.extent.nbytes

    @property
    def path_for_others(self) -> str:
        """A name under which another process of this user can open it."""
        return str(self.file.file).replace("/self/", f"/{os.getpid()}/")

    def close(self) -> None:
        self.storage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_files(
    directory: str | os.PathLike[str], stack: contextlib.ExitStack, *, nbytes: int
) -> tuple[dict[str, DriveFile], dict[str, str]]:
    """A file for each backend that works in a directory, closed by `stack`, and why the others do not.

    Raises:
        StorageError: none works.
    """
    files: dict[str, DriveFile] = {}
    refused: dict[str, str] = {}
    for kind in FILE_BACKENDS:
        try:
            files[kind] = stack.enter_context(DriveFile(directory, backend=kind, nbytes=nbytes))
        except StorageError as error:
            refused[kind] = str(error)
    if not files:
        why = "; ".join(f"{kind}: {why}" for kind, why in refused.items())
        raise StorageError("opening", name="test file", path=os.fspath(directory), offset=0, wanted=nbytes, got=0, why=why)
    return files, refused


class _Timed(WrapperStorage):
    """Notes how long each transfer took."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.seconds: list[float] = []

    def move(self, action: str, offset: int, buffer: memoryview, *, name: str) -> None:
        start = time.perf_counter()
        self.inner.move(action, offset, buffer, name=name)
        self.seconds.append(time.perf_counter() - start)


def transfer_nbytes(block_nbytes: int, nbytes: int) -> int:
    """Bytes that are handed over at once when `nbytes` are moved: several blocks, as the store does, but parts that can be mixed."""
    return max(min(_TRANSFER_NBYTES, nbytes // _NUM_PARTS) // block_nbytes, 1) * block_nbytes


def transfers(action: str, extent: Extent, nbytes_each: int, nbytes: int) -> Iterator[tuple[str, int]]:
    """Action and offset of each transfer: reads and writes each go through the file in order; in a mix the reads are ahead."""
    places = extent.nbytes // nbytes_each
    count = {"read": 0, "write": 0}
    for i in range(1, max(nbytes // nbytes_each, 1) + 1):
        kind = action if action != "mix" else "read" if count["read"] < round(i * READ_SHARE) else "write"
        yield kind, extent.offset + count[kind] % places * nbytes_each
        count[kind] += 1


def written_nbytes(action: str, block_nbytes: int, nbytes: int) -> int:
    """How many of the bytes that `measure` moves are written."""
    each = transfer_nbytes(block_nbytes, nbytes)
    num = max(nbytes // each, 1)
    return each * {"read": 0, "write": num, "mix": num - round(num * READ_SHARE)}[action]


def measure(file: DriveFile, setting: Setting, action: str, *, nbytes: int, content: memoryview, ramp_nbytes: int = 0) -> Sample:
    """Move `nbytes` through `file` and time it.

    Args:
        nbytes: at most the file's for a buffered backend, so that nothing is read twice: the page cache is emptied before.
        content: bytes to write, at least one block.
        ramp_nbytes: moved before those in the same way, and in no figure: a drive that saves up bursts while it is idle has spent them.

    Raises:
        StorageError: a transfer failed.
    """
    fd, storage = file.file.fileno(), file.storage
    buffered = setting.backend != "direct"
    cached = None
    if action != "write":
        if buffered:
            storage.sync()
            drop_cache(fd)
        cached = cached_nbytes(fd, storage.end)
    timed = _Timed(storage)
    each = transfer_nbytes(setting.block_nbytes, nbytes)
    num_slots = setting.queue_depth + _AHEAD
    arena = aligned_buffer(num_slots * each)
    np.frombuffer(arena, np.uint8)[::4096] = 1  # so that no page fault is timed
    source = aligned_buffer(each, bytes(content[: setting.block_nbytes]))
    free: queue.SimpleQueue[tuple[BaseException | None, memoryview]] = queue.SimpleQueue()
    for start in range(0, arena.nbytes, each):
        free.put((None, arena[start : start + each]))

    def take_slot() -> memoryview:
        try:
            error, buffer = free.get(timeout=_TIMEOUT_S)
        except queue.Empty:
            why = f"nothing has moved for {_TIMEOUT_S:.0f} s"
            raise StorageError(
                action, name="test file", path=storage.path, offset=0, wanted=nbytes, got=sum(threads.moved_nbytes.values()), why=why
            ) from None
        if error is not None:
            raise error
        return buffer

    with IOThreads(timed, block_nbytes=setting.block_nbytes, queue_depth=setting.queue_depth) as threads:
        cpu, begin, before = time.process_time(), time.perf_counter(), dict(threads.moved_nbytes)
        ramp = min(ramp_nbytes, ramp_nbytes + nbytes - num_slots * each)  # for sure moved when the last transfer is handed over
        for kind, offset in transfers(action, file.extent, each, ramp_nbytes + nbytes):
            buffer = take_slot()
            if 0 < ramp <= sum(threads.moved_nbytes.values()):
                timed.seconds.clear()
                cpu, begin, before, ramp = time.process_time(), time.perf_counter(), dict(threads.moved_nbytes), 0

            def done(error: BaseException | None, buffer: memoryview = buffer) -> None:
                free.put((error, buffer))

            getattr(threads, kind)(offset, buffer if kind == "read" else source, name="test file", priority=0, done=done)
        for _ in range(num_slots):
            take_slot()
        if buffered and action != "read":
            storage.sync()
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        read, written = (threads.moved_nbytes[kind] - before[kind] for kind in ("read", "write"))
    p50, p99 = np.quantile(timed.seconds, (0.5, 0.99))
    return Sample(action, setting, read, written, seconds, float(p50), float(p99), cpu / seconds, cached)
