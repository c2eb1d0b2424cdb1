"""Where loss, learning rate and other scalars are written while training: CSV files and TensorBoard, on rank 0."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ..config import MonitorConfig, SwapioConfig
from ..errors import ClosedError, ConfigError

__all__ = ["Event", "Monitor"]

Event = tuple[str, Any, int]
"""Tag (`Train/Samples/lr`), value (a number, or a tensor of one element), step."""


class Monitor:
    """Writes events wherever the config says; on ranks other than 0, nowhere.

    Args:
        config: its sections `csv_monitor` and `tensorboard`.
        rank: of this process.

    Attributes:
        enabled: whether `write` does anything; gather no events otherwise.

    Raises:
        ConfigError: the package tensorboard is missing (on every rank, so that none waits for another), or a folder cannot be made.
    """

    def __init__(self, config: SwapioConfig, *, rank: int = 0) -> None:
        self._writers: list[_Writer] = []
        self._closed = False
        if config.tensorboard.enabled and importlib.util.find_spec("tensorboard") is None:
            raise ConfigError(
                "tensorboard.enabled: the package tensorboard is not installed; pip install tensorboard, or use csv_monitor",
                key="tensorboard.enabled", value=True,
            )  # fmt: skip
        if rank == 0:
            if config.csv_monitor.enabled:
                self._writers.append(_CsvWriter(_folder(config.csv_monitor, "csv_monitor")))
            if config.tensorboard.enabled:
                self._writers.append(_TensorBoardWriter(_folder(config.tensorboard, "tensorboard")))
        self.enabled = bool(self._writers)

    def write(self, events: Iterable[Event]) -> None:
        """Append the events and hand them to the operating system. One thread at a time.

        Raises:
            ClosedError: after `close`; OSError: the disk is full, or alike.
        """
        if self._closed:
            raise ClosedError("the monitor is closed")
        numbers = [(tag, float(value), int(step)) for tag, value, step in events] if self.enabled else []
        for writer in self._writers:
            writer.write(numbers)

    write_events = write
    """The same, by DeepSpeed's name."""

    def close(self) -> None:
        """Close all files. Idempotent."""
        self._closed = True
        while self._writers:
            self._writers.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Writer(Protocol):
    def write(self, events: list[tuple[str, float, int]]) -> None: ...

    def close(self) -> None: ...


class _CsvWriter:
    """One file for each tag, as DeepSpeed has them: `Train/Samples/lr` is `Train_Samples_lr.csv` with the columns step and lr."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, io.FileIO] = {}  # unbuffered: a row that fails is an error now, not one more when closing

    def write(self, events: list[tuple[str, float, int]]) -> None:
        for tag, value, step in events:
            self._file(tag).write(_row(step, value))

    def _file(self, tag: str) -> io.FileIO:
        name = tag.replace("/", "_").replace(" ", "_")
        if name not in self._files:
            path = self._folder / f"{name}.csv"
            torn = _ends_within_a_row(path)
            file = self._files[name] = path.open("ab", buffering=0)
            if torn:
                file.write(b"\n")
            elif file.tell() == 0:
                file.write(_row("step", tag.rpartition("/")[2]))
        return self._files[name]

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


class _TensorBoardWriter:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional, and slow to import

        self._writer: Any = SummaryWriter(folder)

    def write(self, events: list[tuple[str, float, int]]) -> None:
        for event in events:
            self._writer.add_scalar(*event)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _row(*cells: object) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _ends_within_a_row(path: Path) -> bool:
    """Whether a run that was killed has left half a row at the end."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _folder(section: MonitorConfig, name: str) -> Path:
    folder = Path(section.output_path) / section.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{name}.output_path: the folder {os.fspath(folder)!r} cannot be made: {error.strerror}",
            key=f"{name}.output_path", value=section.output_path,
        ) from error  # fmt: skip
    return folder
