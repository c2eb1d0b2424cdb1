"""Several processes on one drive at once, as the ranks of one machine are."""

from __future__ import annotations

import multiprocessing
import os
import queue
from typing import Any

from ..errors import StorageError
from ..io import aligned_buffer
from ._workload import DriveFile, Setting, measure

__all__ = ["measure_processes"]

_START_S, _RUN_S = 120.0, 120.0


def _work(directory: str, setting: Setting, actions: list[str], file_nbytes: int, nbytes: int, barrier: Any, results: Any) -> None:
    try:
        content = aligned_buffer(max(setting.block_nbytes, 1 << 20), os.urandom(1 << 20))
        with DriveFile(directory, backend=setting.backend, nbytes=file_nbytes) as file:
            file.fill(content)
            for i, action in enumerate(actions):
                barrier.wait(_START_S)
                sample = measure(file, setting, action, nbytes=nbytes, content=content)
                results.put((i, sample.read_nbytes + sample.written_nbytes, sample.seconds))
    except BaseException as error:
        barrier.abort()
        results.put(error)


def measure_processes(
    directory: str | os.PathLike[str], setting: Setting, actions: list[str], *, num_processes: int, file_nbytes: int, nbytes: int
) -> list[float]:
    """Bytes per second of all processes together, for each action in turn; each has a file and moves `nbytes`.

    Raises:
        StorageError: one of them failed or did not answer.
    """
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(num_processes), context.Queue()
    args = (os.fspath(directory), setting, actions, file_nbytes, nbytes, barrier, results)
    workers = [context.Process(target=_work, args=args, name=f"swapio-bench-{i}", daemon=True) for i in range(num_processes)]
    moved, seconds = [0] * len(actions), [0.0] * len(actions)
    try:
        for worker in workers:
            worker.start()
        for _ in range(num_processes * len(actions)):
            try:
                answer = results.get(timeout=_START_S + _RUN_S)
            except queue.Empty:
                raise _failed(directory, "no answer") from None
            if isinstance(answer, BaseException):
                raise _failed(directory, str(answer)) from answer
            i, nbytes_moved, taken = answer
            moved[i] += nbytes_moved
            seconds[i] = max(seconds[i], taken)
        for worker in workers:
            worker.join(_RUN_S)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.terminate()
    return [m / s for m, s in zip(moved, seconds, strict=True)]


def _failed(directory: str | os.PathLike[str], why: str) -> StorageError:
    return StorageError("measuring", name="several processes", path=os.fspath(directory), offset=0, wanted=0, got=0, why=why)
