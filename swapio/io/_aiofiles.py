"""Buffered files by way of `aiofiles`: slower than the others, and works on whatever has files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import aiofiles

from ._file import FileStorage

__all__ = ["AiofilesStorage"]

_T = TypeVar("_T")
_NUM_WORKERS = 8


class AiofilesStorage(FileStorage):
    """A file in the page cache, used by coroutines on an event loop of our own, several handles at once."""

    kind = "aiofiles"
    _thread: threading.Thread | None = None

    def _start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._idle: list[Any] = []  # open handles that no transfer uses; only the loop's thread looks
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="swapio-aiofiles-worker")
        self._thread = threading.Thread(target=self._loop.run_forever, name="swapio-aiofiles", daemon=True)
        self._thread.start()

    def _run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _move(self, method: str, offset: int, buffer: memoryview) -> int:
        file = self._idle.pop() if self._idle else await aiofiles.open(self.file, "r+b", buffering=0, executor=self._workers)
        try:
            await file.seek(offset)
            return await getattr(file, method)(buffer) or 0
        finally:
            self._idle.append(file)

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return self._run(self._move("readinto", offset, buffer))

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        return self._run(self._move("write", offset, buffer))

    async def _close_files(self) -> None:
        for file in self._idle:
            await file.close()

    def _release(self) -> None:
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # at the end of the interpreter no thread pool takes work
                self._run(self._close_files())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._workers.shutdown()
        super()._release()
