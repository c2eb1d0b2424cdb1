"""The bench of a drive: what is measured, in which order, and what comes out of it.

[Note: What makes a figure believed]
The file's blocks are written once before anything is timed: a first write into reserved blocks is slower. Around the page cache (`direct`)
the cache is looked at before each read, and holds nothing; the other backends start each read with an empty cache, pass through the file
once, and their writes end when they are durable. All points are measured in rounds, each in an order of its own, so that a drive that slows
down or is shared slows all of them; medians and the spread of the rounds are given. fio takes turns with ours, first and last in turn, and
each moves as much as it is timed for before: while a process starts, a drive that allows bursts saves one up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil

from ..errors import ConfigError, UsageError
from ..io import FILE_BACKENDS, aligned_buffer, filesystem_of
from ..spec import format_nbytes
from ._fio import fio_run, fio_version
from ._forecast import forecast
from ._pair import measure_processes
from ._workload import ACTIONS, READ_SHARE, DriveFile, Sample, Setting, measure, open_files, written_nbytes

__all__ = ["QUICK", "STANDARD", "TINY", "Plan", "Progress", "check_room", "run_bench"]

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
KEPT_FREE_NBYTES = GiB
Progress = Callable[[int, int, str], None]
"""Called with the bytes done, those of the whole run, and what is measured now."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        file_nbytes: of the file of each backend.
        point_nbytes: moved by one measurement.
        blocks, depths: of the grid for `direct`; the other backends take each block at `buffered_depths`.
        repeats: rounds over the grid.
        fio_points: block and depth of the comparison with fio; the best setting is compared too.
        fio_repeats: pairs of fio and ours, each of `fio_nbytes` after as many that do not count (`measure`); 0 leaves fio out.
        checksum_repeats: pairs with and without checksums.
        sustained_nbytes: written in one go, 0 leaves it out.
        num_processes: at once on one drive; 1 leaves it out.
        limit_s: seconds; each part has a share of it, gets fewer rounds or none when that is used up, and `notes` says so. One round over
            the grid is always done, with fewer bytes on a slow drive.
    """

    file_nbytes: int
    point_nbytes: int
    blocks: tuple[int, ...]
    depths: tuple[int, ...]
    buffered_depths: tuple[int, ...]
    repeats: int
    fio_points: tuple[tuple[int, int], ...]
    fio_repeats: int
    fio_nbytes: int
    checksum_repeats: int
    sustained_nbytes: int
    num_processes: int
    limit_s: float = math.inf


STANDARD = Plan(
    GiB, 256 * MiB, (256 * KiB, MiB, 4 * MiB, 16 * MiB), (1, 2, 4, 8, 16), (4,), 3, ((256 * KiB, 8), (MiB, 8)), 11, 256 * MiB, 5, 8 * GiB, 2
)
# of the 30 s of `--quick`, the imports and the picture take the rest on a busy machine
QUICK = Plan(128 * MiB, 64 * MiB, (MiB, 4 * MiB), (4, 8), (4,), 3, (), 3, 128 * MiB, 3, 0, 2, limit_s=13)
TINY = Plan(8 * MiB, 2 * MiB, (64 * KiB, 256 * KiB), (1, 2), (2,), 2, (), 2, 4 * MiB, 2, 8 * MiB, 2)

_GRID_SHARE, _FIO_SHARE, _CHECKSUM_SHARE = 0.4, 0.65, 0.8  # of a plan's time, until which a part may go on

_FIRST_NBYTES = 2 * 10**9  # of a sustained write; many drives take about so much into a faster part
_CHUNK_NBYTES = 256 * MiB


class _Run:
    """One run over one directory."""

    def __init__(self, directory: str | os.PathLike[str], plan: Plan, progress: Progress) -> None:
        self.directory = os.fspath(directory)
        self.plan = plan
        self.files: dict[str, DriveFile] = {}
        self.refused: dict[str, str] = {}
        self.samples: list[Sample] = []
        self.written = 0
        self.read = 0
        self.total = 0  # bytes that the whole run moves
        self.cut: list[str] = []
        self.point_nbytes = plan.point_nbytes
        self._start = time.monotonic()
        self._import_s = time.time() - psutil.Process().create_time()  # what a process takes to start here, now
        self._progress = progress
        self._content = aligned_buffer(max(*plan.blocks, MiB), os.urandom(MiB))
        self.fio = fio_version() if plan.fio_repeats else None

    # what will be done ---------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> list[Setting]:
        plan = self.plan
        return [
            Setting(kind, block, depth)
            for kind in self.files
            for block in plan.blocks
            for depth in (plan.depths if kind == "direct" else plan.buffered_depths)
        ]

    def planned(self) -> tuple[int, int]:
        """Bytes moved and, among them, written by the whole run; of parts that depend on the best setting, for the largest block."""
        plan = self.plan
        points: list[tuple[str, int, int, int]] = [  # action, block, bytes, how often
            (action, s.block_nbytes, plan.point_nbytes, plan.repeats) for s in self.settings for action in ACTIONS
        ]
        block = min(plan.blocks)
        if self.fio and "direct" in self.files:
            points += [(action, block, 2 * plan.fio_nbytes, 2 * plan.fio_repeats * (1 + len(plan.fio_points))) for action in ACTIONS]
        points += [(action, block, plan.point_nbytes, 2 * plan.checksum_repeats) for action in ("read", "write")]
        points += [
            ("write", block, plan.sustained_nbytes, 1),
            ("write", block, plan.file_nbytes, len(self.files)),
            ("write", block, plan.point_nbytes, 1),
        ]
        if plan.num_processes > 1:
            points.append(("write", block, plan.num_processes * self._share, 1))
            points += [(action, block, plan.num_processes * self._share, 2) for action in ACTIONS]
        moved = sum(nbytes * times for _, _, nbytes, times in points)
        return moved, sum(written_nbytes(action, block, nbytes) * times for action, block, nbytes, times in points)

    @property
    def _share(self) -> int:
        """Bytes of the file of each of several processes, and of what each moves."""
        return min(self.plan.file_nbytes, self.point_nbytes)

    # doing it ------------------------------------------------------------------------------------------------------------

    def count(self, read: int, written: int, what: str) -> None:
        self.read += read
        self.written += written
        self._progress(self.read + self.written, self.total, what)

    def count_all(self, nbytes: int, read: int, written: int, what: str) -> None:
        """Count `nbytes`, of which those that were timed are a sample."""
        share = round(nbytes * read / (read + written))
        self.count(share, nbytes - share, what)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def fill(self) -> None:
        for kind, file in self.files.items():
            self.count(0, file.fill(self._content), f"filling the file of {kind}")
        per_s = self.written / max(self.elapsed_s, 1e-9)
        affordable = self.plan.limit_s * _GRID_SHARE * per_s / (len(ACTIONS) * len(self.settings))
        while self.point_nbytes > max(affordable, 2 * max(self.plan.blocks)):
            self.point_nbytes //= 2
        if self.point_nbytes < self.plan.point_nbytes:
            now, then = format_nbytes(self.point_nbytes), format_nbytes(self.plan.point_nbytes)
            self.cut.append(f"{now} instead of {then} per point, for time")

    def take(self, setting: Setting, action: str, nbytes: int, file: DriveFile | None = None, *, ramp_nbytes: int = 0) -> Sample:
        used = file or self.files[setting.backend]
        sample = measure(used, setting, action, nbytes=nbytes, content=self._content, ramp_nbytes=ramp_nbytes)
        read, written = sample.read_nbytes, sample.written_nbytes
        self.count_all(ramp_nbytes + nbytes if ramp_nbytes else read + written, read, written, f"{action}: {setting}")
        return sample

    def rounds(self, num: int, what: str, *, share: float, least: int = 0) -> Iterator[int]:
        """The numbers of the rounds, as long as another one like the last fits this part's share of the time."""
        last_s = 0.0
        for i in range(num):
            begin = self.elapsed_s
            if i >= least and begin + last_s > share * self.plan.limit_s:
                self.cut.append(f"{what}: {f'{i} of {num} rounds' if i else 'left out'}, for time")
                return
            yield i
            last_s = self.elapsed_s - begin

    def grid(self) -> list[dict[str, Any]]:
        order = random.Random(0)
        for _ in self.rounds(self.plan.repeats, "grid", share=_GRID_SHARE, least=1):
            points = [(s, action) for s in self.settings for action in ACTIONS]
            order.shuffle(points)
            self.samples += [self.take(s, action, self.point_nbytes) for s, action in points]
        rows = []
        for setting in self.settings:
            for action in ACTIONS:
                found = [s for s in self.samples if s.setting == setting and s.action == action]
                rows.append(
                    dataclasses.asdict(setting)
                    | {"action": action}
                    | spread([s.bytes_per_s for s in found])
                    | {
                        "p50_ms": 1e3 * statistics.median(s.p50_s for s in found),
                        "p99_ms": 1e3 * statistics.median(s.p99_s for s in found),
                        "cpu_cores": statistics.median(s.cpu_cores for s in found),
                        "cached_nbytes": max((s.cached_nbytes for s in found if s.cached_nbytes is not None), default=None),
                    }
                )
        return rows

    def compare_fio(self, best: Setting) -> list[dict[str, Any]]:
        rows = []
        nbytes = self.plan.fio_nbytes
        settings = dict.fromkeys([*(Setting("direct", *point) for point in self.plan.fio_points), best])
        for setting in settings:
            for action in ACTIONS:
                ours: list[float] = []
                theirs: list[float] = []
                same = [s for s in self.samples if (s.setting, s.action) == (setting, action)] or self.samples
                expected = statistics.median(s.bytes_per_s for s in same)
                idle_s = 0.0  # fio's, until it begins: a drive that saves up bursts while idle must have had as long for ours
                for i in self.rounds(self.plan.fio_repeats, f"fio, {action}", share=_FIO_SHARE):
                    for who in ("ours", "fio") if i % 2 else ("fio", "ours"):
                        if who == "ours":
                            time.sleep(idle_s)
                            ours.append(self.take(setting, action, nbytes, ramp_nbytes=nbytes).bytes_per_s)
                        else:
                            begin = time.monotonic()
                            file = self.files["direct"]
                            read, written, seconds = fio_run(file, setting, action, nbytes=nbytes, ramp_nbytes=nbytes, bytes_per_s=expected)
                            theirs.append((read + written) / seconds)
                            idle_s = max(time.monotonic() - begin - 2 * nbytes / theirs[-1], 0.0)
                            expected = statistics.median(theirs)
                            self.count_all(2 * nbytes, read, written, f"{action}: fio, {setting}")
                if not ours:
                    continue
                low, high = ratio_interval(ours, theirs)
                rows.append(
                    dataclasses.asdict(setting)
                    | {"action": action, "ours": spread(ours), "fio": spread(theirs)}
                    | {"ratio": statistics.median(ours) / statistics.median(theirs), "ratio_90_percent": [low, high]}
                )
        return rows

    def compare_checksums(self, best: Setting) -> list[dict[str, Any]]:
        rows = []
        with DriveFile(self.directory, backend=best.backend, nbytes=self.point_nbytes, checksums=True) as checked:
            self.count(0, checked.fill(self._content), "filling the file with checksums")
            files = {"off": self.files[best.backend], "on": checked}
            for action in ("write", "read"):
                kept: dict[str, list[Sample]] = {"off": [], "on": []}
                for i in self.rounds(self.plan.checksum_repeats, f"checksums, {action}", share=_CHECKSUM_SHARE):
                    for how in ("off", "on") if i % 2 else ("on", "off"):
                        kept[how].append(self.take(best, action, self.point_nbytes, files[how]))
                if not kept["on"]:
                    continue
                speeds = {how: spread([s.bytes_per_s for s in samples]) for how, samples in kept.items()}
                ratio = speeds["on"]["median_bytes_per_s"] / speeds["off"]["median_bytes_per_s"]
                cpu = {f"cpu_cores_{how}": statistics.median(s.cpu_cores for s in samples) for how, samples in kept.items()}
                rows.append({"action": action, **speeds, "ratio": ratio, **cpu})
        return rows

    def sustained(self, setting: Setting) -> dict[str, Any]:
        total = self.plan.sustained_nbytes
        chunk = min(_CHUNK_NBYTES, self.plan.file_nbytes, total // 4)
        samples = [self.take(setting, "write", min(chunk, total - at)) for at in range(0, total, chunk)]
        first, rest, done = [0, 0.0], [0, 0.0], 0
        for sample in samples:
            part = first if done < min(_FIRST_NBYTES, total / 2) else rest
            part[0] += sample.written_nbytes
            part[1] += sample.seconds
            done += sample.written_nbytes
        speeds = [nbytes / seconds for nbytes, seconds in (first, rest)]
        return {
            "first_nbytes": first[0], "rest_nbytes": rest[0], "first_bytes_per_s": speeds[0], "rest_bytes_per_s": speeds[1],
            "ratio": speeds[1] / speeds[0], "chunks_bytes_per_s": [s.bytes_per_s for s in samples],
        }  # fmt: skip

    def processes(self, best: Setting) -> dict[str, Any] | None:
        if self.elapsed_s + self.plan.num_processes * self._import_s > self.plan.limit_s:
            self.cut.append(f"{self.plan.num_processes} processes at once: left out, for time")
            return None
        several = measure_processes(
            self.directory, best, [*ACTIONS, *ACTIONS], num_processes=self.plan.num_processes, file_nbytes=self._share, nbytes=self._share
        )
        n = self.plan.num_processes
        for action in ("write", *ACTIONS, *ACTIONS):
            written = n * written_nbytes(action, best.block_nbytes, self._share)
            self.count(n * self._share - written, written, f"{n} processes")
        one = {a: statistics.median(s.bytes_per_s for s in self.samples if s.setting == best and s.action == a) for a in ACTIONS}
        both = {a: statistics.median(several[i :: len(ACTIONS)]) for i, a in enumerate(ACTIONS)}
        return {"num_processes": n, "one_bytes_per_s": one, "together_bytes_per_s": both, "ratio": {a: both[a] / one[a] for a in ACTIONS}}


def run_bench(
    directory: str | os.PathLike[str],
    *,
    plan: Plan = STANDARD,
    announce: Callable[[int, int], None] = lambda moved, written: None,
    progress: Progress = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measure the drive under `directory`; nothing is left there, also when interrupted.

    Args:
        announce: called once before anything is written, with the bytes that will be moved and, among them, written.

    Returns:
        everything that was found, ready for JSON.

    Raises:
        ConfigError: too little room; StorageError: the directory cannot be used.
    """
    check_room(directory, plan.file_nbytes)
    run = _Run(directory, plan, progress)
    with contextlib.ExitStack() as stack:
        run.files, run.refused = open_files(directory, stack, nbytes=plan.file_nbytes)
        moved, written = run.planned()
        run.total = moved
        announce(moved, written)
        run.fill()
        grid = run.grid()
        best = best_setting(grid)
        notes = run.cut
        fio: list[dict[str, Any]] = []
        if run.fio and "direct" in run.files:
            try:
                fio = run.compare_fio(best if best.backend == "direct" else best_setting([r for r in grid if r["backend"] == "direct"]))
            except UsageError as error:
                notes.append(str(error))
        elif plan.fio_repeats:
            notes.append("fio is not installed" if not run.fio else "O_DIRECT is refused there, so fio has nothing to be compared with")
        checksums = run.compare_checksums(best)
        sustained = run.sustained(best_setting(grid, "write")) if plan.sustained_nbytes else None
        processes = run.processes(best) if plan.num_processes > 1 else None
    mix = next(r["median_bytes_per_s"] for r in grid if _setting(r) == best and r["action"] == "mix")
    filesystem = filesystem_of(directory)
    return {
        "path": run.directory,
        "filesystem": dataclasses.asdict(filesystem),
        "plan": dataclasses.asdict(plan) | {"read_share_of_mix": READ_SHARE, "order": "shuffled in each round, seed 0"},
        "fio_version": run.fio,
        "refused_backends": run.refused,
        "planned_nbytes": {"moved": moved, "written": written},
        "actual_nbytes": {"moved": run.read + run.written, "written": run.written},
        "grid": grid,
        "fio": fio,
        "checksums": checksums,
        "sustained_write": sustained,
        "processes": processes,
        "best": dataclasses.asdict(best) | {"mix_bytes_per_s": mix},
        "swapio_config": config_block(best),
        "forecast": [dataclasses.asdict(f) for f in forecast(mix)],
        "notes": notes,
    }


def check_directory(directory: str | os.PathLike[str]) -> None:
    """
    Raises:
        ConfigError: no file can be made there. A directory that was made would be on the drive of its parent, which nobody asked about.
    """
    path = os.fspath(directory)
    if not os.path.isdir(path):
        wrong = "is that a file" if os.path.exists(path) else "there is no such directory; is the drive mounted"
        raise ConfigError(f"{path}: {wrong}? Give a directory that exists", key="path", value=path)
    try:
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        why = os.strerror(error.errno or errno.EIO)
        raise ConfigError(
            f"{path}: no file can be made there ({why}); give a directory on a local drive that you may write to", key="path", value=path
        ) from error


def check_room(directory: str | os.PathLike[str], file_nbytes: int) -> None:
    """
    Raises:
        ConfigError: no file can be made there, or not one of `file_nbytes` for each backend.
    """
    check_directory(directory)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < file_nbytes:
        wrong = f"files may have at most {format_nbytes(limit)}, {format_nbytes(file_nbytes)} are needed"
        raise ConfigError(f"{os.fspath(directory)}: {wrong}; raise the limit: ulimit -f unlimited", key="path")
    room = shutil.disk_usage(directory).free
    need, least = (len(FILE_BACKENDS) * nbytes + KEPT_FREE_NBYTES for nbytes in (file_nbytes, QUICK.file_nbytes))
    if room < need:
        advice = "free some or take --quick" if least <= room else "free some, or give another directory"
        raise ConfigError(f"{os.fspath(directory)}: {format_nbytes(room)} are free, {format_nbytes(need)} are needed; {advice}", key="path")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most, in bytes per second."""
    return {"median_bytes_per_s": statistics.median(values), "min_bytes_per_s": min(values), "max_bytes_per_s": max(values)}


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """The middle 90% of the ratio of medians, by bootstrap (Efron 1979)."""
    draw = np.random.default_rng(0)
    a, b = (np.median(draw.choice(np.asarray(v), (2000, len(v))), axis=1) for v in (ours, theirs))
    low, high = np.quantile(a / b, (0.05, 0.95))
    return float(low), float(high)


def _setting(row: dict[str, Any]) -> Setting:
    return Setting(row["backend"], row["block_nbytes"], row["queue_depth"])


def best_setting(rows: Iterable[dict[str, Any]], action: str = "mix", *, within: float = 0.03) -> Setting:
    """Of the settings that reach the best median but for `within`, the one with the fewest bytes in flight."""
    rows = [r for r in rows if r["action"] == action]
    top = max(r["median_bytes_per_s"] for r in rows)
    good = [_setting(r) for r in rows if r["median_bytes_per_s"] >= (1 - within) * top]
    return min(good, key=lambda s: (s.block_nbytes * s.queue_depth, s.queue_depth))


def config_block(setting: Setting) -> dict[str, Any]:
    """The part of a config that asks for a setting."""
    return {
        "aio": {"block_size": setting.block_nbytes, "queue_depth": setting.queue_depth},
        "swapio": {"backend": setting.backend},
    }
