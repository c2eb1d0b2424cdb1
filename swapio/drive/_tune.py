"""The best setting of a drive with few bytes: successive halving (Jamieson and Talwalkar, AISTATS 2016)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
from collections.abc import Callable
from typing import Any

from ..io import aligned_buffer, filesystem_of
from ._bench import best_setting, check_room, config_block, spread
from ._workload import Setting, measure, open_files, written_nbytes

__all__ = ["Search", "run_tune"]

KiB, MiB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Search:
    """What is tried, with the optimizer's mix: each block at each depth for `direct`, at one depth for the others, `nbytes` at first.

    In each round the better half goes on, with twice the bytes.
    """

    blocks: tuple[int, ...] = (MiB, 2 * MiB, 4 * MiB, 8 * MiB)
    depths: tuple[int, ...] = (2, 4, 8, 16)
    buffered_depth: int = 4
    nbytes: int = 16 * MiB
    file_nbytes: int = 128 * MiB

    def settings(self, backends: list[str]) -> list[Setting]:
        """The candidates."""
        return [
            Setting(kind, block, depth)
            for kind in backends
            for block in self.blocks
            for depth in (self.depths if kind == "direct" else (self.buffered_depth,))
        ]

    def amount(self, setting: Setting, nbytes: int) -> int:
        """What one measurement moves when rounds move `nbytes`: at least two blocks."""
        return max(nbytes, 2 * setting.block_nbytes)

    def written_nbytes(self, backends: list[str]) -> int:
        """At most so many bytes are written, whoever goes on."""
        settings = self.settings(backends)
        left, nbytes = len(settings), self.nbytes
        total = len(backends) * self.file_nbytes
        while left > 1:
            each = sorted((written_nbytes("mix", s.block_nbytes, self.amount(s, nbytes)) for s in settings), reverse=True)
            total += sum(each[:left])
            left, nbytes = (left + 1) // 2, min(2 * nbytes, self.file_nbytes)
        return total


def run_tune(
    directory: str | os.PathLike[str],
    *,
    search: Search | None = None,
    announce: Callable[[int], None] = lambda written: None,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Find block, depth and backend; nothing is left in `directory`.

    Args:
        announce: called before anything is written, with the most bytes that will be.
        progress: called with the measurements done, those of all rounds, and what comes next.

    Returns:
        what was found, ready for JSON; `swapio_config` is the block for a config, and the whole is what `"swapio": {"tuned": FILE}` takes.

    Raises:
        ConfigError: too little room; StorageError: the directory cannot be used.
    """
    search = search or Search()
    check_room(directory, search.file_nbytes)
    samples: dict[Setting, list[float]] = {}
    written = 0
    with contextlib.ExitStack() as stack:
        files, refused = open_files(directory, stack, nbytes=search.file_nbytes)
        announce(search.written_nbytes(list(files)))
        content = aligned_buffer(max(search.blocks), os.urandom(MiB))
        written += sum(file.fill(content) for file in files.values())
        left, nbytes = search.settings(list(files)), search.nbytes
        total, done = _num_measurements(len(left)), 0
        while len(left) > 1:
            for setting in left:
                progress(done, total, str(setting))
                amount = search.amount(setting, nbytes)
                sample = measure(files[setting.backend], setting, "mix", nbytes=amount, content=content)
                samples.setdefault(setting, []).append(sample.bytes_per_s)
                written += sample.written_nbytes
                done += 1
            left.sort(key=lambda s: -statistics.median(samples[s]))
            left, nbytes = left[: (len(left) + 1) // 2], min(2 * nbytes, search.file_nbytes)
        progress(total, total, "done")
    rows = [dataclasses.asdict(s) | {"action": "mix", "num_samples": len(v)} | spread(v) for s, v in samples.items()]
    most = max(row["num_samples"] for row in rows)
    best = best_setting(row for row in rows if row["num_samples"] == most)
    return {
        "path": os.fspath(directory),
        "filesystem": dataclasses.asdict(filesystem_of(directory)),
        "search": dataclasses.asdict(search),
        "refused_backends": refused,
        "written_nbytes": written,
        "measured": sorted(rows, key=lambda row: (-row["num_samples"], -row["median_bytes_per_s"])),
        "best": dataclasses.asdict(best),
        "swapio_config": config_block(best),
    }


def _num_measurements(left: int) -> int:
    total = 0
    while left > 1:
        total += left
        left = (left + 1) // 2
    return total
