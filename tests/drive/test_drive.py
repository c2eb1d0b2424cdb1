from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import swapio
from swapio.cli._app import app
from swapio.drive import (
    QUICK,
    STANDARD,
    TINY,
    DriveFile,
    Plan,
    Search,
    Setting,
    best_setting,
    fio_run,
    forecast,
    measure,
    run_bench,
    run_tune,
)
from swapio.drive._bench import ratio_interval
from swapio.drive._workload import READ_SHARE, transfer_nbytes, transfers, written_nbytes
from swapio.errors import ConfigError, StorageError, UsageError
from swapio.io import FILE_BACKENDS, WrapperStorage, aligned_buffer, cached_nbytes, drop_cache
from swapio.report import drive_tables
from swapio.spec import Extent

KiB, MiB = 1 << 10, 1 << 20


def test_several_blocks_are_handed_over_at_once_but_none_larger_than_a_block() -> None:
    assert transfer_nbytes(256 * KiB, 512 * MiB) == MiB
    assert transfer_nbytes(4 * MiB, 512 * MiB) == 4 * MiB
    assert transfer_nbytes(384 * KiB, 512 * MiB) == 768 * KiB
    assert transfer_nbytes(64 * KiB, 2 * MiB) == 128 * KiB
    assert transfer_nbytes(MiB, MiB) == MiB


def test_transfers_go_through_the_file_in_order_and_around() -> None:
    extent = Extent(4096, 4 * KiB * 4)
    assert list(transfers("write", extent, 4 * KiB, 6 * 4 * KiB)) == [("write", 4096 + 4096 * (i % 4)) for i in range(6)]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 13, 100, 1000, 10000])
def test_a_mix_has_its_share_of_reads_and_they_are_ahead(num_blocks: int) -> None:
    each = transfer_nbytes(4096, num_blocks * 4096)
    made = list(transfers("mix", Extent(0, num_blocks * 4096), each, num_blocks * 4096))
    reads = [offset for kind, offset in made if kind == "read"]
    assert len(made) == num_blocks * 4096 // each
    assert len(reads) == round(len(made) * READ_SHARE)
    assert written_nbytes("mix", 4096, num_blocks * 4096) == each * (len(made) - len(reads))
    front = {"read": -1, "write": -1}
    for kind, offset in made:
        front[kind] = offset
        assert front["read"] >= front["write"] or len(made) == 1


@pytest.mark.parametrize("backend", FILE_BACKENDS)
@pytest.mark.parametrize("checksums", [False, True])
def test_what_is_measured_is_really_moved(tmp_path: Path, backend: str, checksums: bool) -> None:
    content = aligned_buffer(64 * KiB, os.urandom(999))
    with DriveFile(tmp_path, backend=backend, nbytes=MiB, checksums=checksums) as file:
        assert file.fill(aligned_buffer(64 * KiB, b"old")) == MiB
        sample = measure(file, Setting(backend, 64 * KiB, 3), "write", nbytes=640 * KiB, content=content)
        assert (sample.read_nbytes, sample.written_nbytes) == (0, 640 * KiB)
        with open(file.path_for_others, "rb") as other:
            other.seek(file.extent.offset)
            assert other.read(640 * KiB) == bytes(content) * 10
            assert other.read(64 * KiB) == bytes(aligned_buffer(64 * KiB, b"old"))
        sample = measure(file, Setting(backend, 64 * KiB, 3), "mix", nbytes=640 * KiB, content=content)
        assert (sample.read_nbytes, sample.written_nbytes) == (5 * 64 * KiB, 5 * 64 * KiB)
        assert 0 < sample.p50_s <= sample.p99_s < sample.seconds
        assert sample.cpu_cores > 0
    assert list(tmp_path.iterdir()) == []


def test_a_ramp_ends_before_the_last_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did not where as much is in flight as is timed, and the bytes of the ramp were taken for timed ones."""
    from swapio.drive import _workload

    asked, moved, changed = 0, 0, threading.Condition()

    def counted(*args: Any) -> Iterator[tuple[str, int]]:
        nonlocal asked
        for transfer in (*transfers(*args), None):
            with changed:
                asked += 1
                changed.notify_all()
            if transfer:
                yield transfer

    class Slow(WrapperStorage):
        """A transfer ends only when somebody waits for its buffer."""

        def move(self, action: str, offset: int, buffer: memoryview, *, name: str) -> None:
            nonlocal moved
            with changed:
                assert changed.wait_for(lambda: asked >= min(7 + moved, 9), 60)
                moved += 1
                self.inner.move(action, offset, buffer, name=name)

    monkeypatch.setattr(_workload, "transfers", counted)
    with DriveFile(tmp_path, backend="direct", nbytes=MiB) as file:
        file.storage = Slow(file.storage)
        setting, nbytes = Setting("direct", 64 * KiB, 4), 256 * KiB  # six of eight are handed over at first
        sample = measure(file, setting, "write", nbytes=nbytes, content=aligned_buffer(64 * KiB), ramp_nbytes=nbytes)
    assert sample.written_nbytes == 384 * KiB


@pytest.fixture
def fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program named fio that prints and ends as the file `says` tells, and keeps its arguments in `asked`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "fio").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{folder}/asked\n. {folder}/says\n')
    (folder / "fio").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return folder


def test_fio_moves_the_ramp_too(fio: Path, tmp_path: Path) -> None:
    """It stops after so many bytes with those of the ramp: a ramp as long as the run left nothing to time, or all."""
    job = {"error": 0, "read": {"runtime": 500, "io_bytes": 3 * MiB}, "write": {"runtime": 400, "io_bytes": 2 * MiB}}
    (fio / "says").write_text(f"cat <<END\nnote: a line before\n{json.dumps({'jobs': [job]})}\nEND\n")
    with DriveFile(tmp_path, backend="direct", nbytes=MiB) as file:
        found = fio_run(file, Setting("direct", 64 * KiB, 4), "mix", nbytes=4 * MiB, ramp_nbytes=2 * MiB, bytes_per_s=8 * MiB)
    assert found == (3 * MiB, 2 * MiB, 0.5)
    asked = (fio / "asked").read_text().splitlines()
    assert {f"--io_size={6 * MiB}", "--ramp_time=250ms"} < set(asked)


@pytest.mark.parametrize(
    ("says", "match"),
    [
        ("echo no such engine >&2; exit 1", r"fio failed \(1\): no such engine"),
        ("echo '{\"jobs\": []}'", r"fio failed \(0\)"),
        ('echo \'{"jobs": [{"error": 0, "read": {"runtime": 0, "io_bytes": 0}, "write": {"runtime": 0, "io_bytes": 0}}]}\'', "fio failed"),
    ],
    ids=["fails", "says nothing", "moves nothing"],
)
def test_a_fio_that_fails_is_a_note(fio: Path, tmp_path: Path, says: str, match: str) -> None:
    (fio / "says").write_text(says)
    with DriveFile(tmp_path, backend="direct", nbytes=MiB) as file, pytest.raises(UsageError, match=match):
        fio_run(file, Setting("direct", 64 * KiB, 4), "read", nbytes=MiB)


def test_an_error_ends_the_measurement(tmp_path: Path) -> None:
    with DriveFile(tmp_path, backend="direct", nbytes=MiB) as file:
        os.ftruncate(file.file.fileno(), 512 * KiB)
        with pytest.raises(StorageError, match="truncated"):
            measure(file, Setting("direct", 64 * KiB, 2), "read", nbytes=MiB, content=aligned_buffer(64 * KiB))


def test_the_page_cache_tells_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(MiB))
    with path.open("r+b") as file:
        assert cached_nbytes(file.fileno(), MiB) == MiB
        os.fsync(file.fileno())
        drop_cache(file.fileno())
        assert cached_nbytes(file.fileno(), MiB) == 0
        file.seek(0)
        os.pread(file.fileno(), 4096, 0)
        assert (cached_nbytes(file.fileno(), MiB) or 0) > 0
        os.ftruncate(file.fileno(), 0)
        assert cached_nbytes(file.fileno(), MiB) == 0


def test_the_proof_is_no_figure_of_speech(tmp_path: Path) -> None:
    """Buffered reads start with an empty cache, and on a filesystem in memory the sample says that nothing came from a drive."""
    content = aligned_buffer(64 * KiB, b"x")
    with DriveFile(tmp_path, backend="aiofiles", nbytes=MiB) as file:
        file.fill(content)
        assert measure(file, Setting("aiofiles", 64 * KiB, 2), "read", nbytes=MiB, content=content).cached_nbytes == 0
    if os.path.isdir("/dev/shm"):
        with DriveFile("/dev/shm", backend="direct", nbytes=MiB) as file:
            file.fill(content)
            assert (measure(file, Setting("direct", 64 * KiB, 2), "read", nbytes=MiB, content=content).cached_nbytes or 0) >= MiB


def test_fewest_bytes_in_flight_within_the_noise() -> None:
    def row(block: int, depth: int, speed: float) -> dict[str, object]:
        return {"action": "mix", "backend": "direct", "block_nbytes": block, "queue_depth": depth, "median_bytes_per_s": speed}

    rows = [row(4, 8, 1.00), row(4, 4, 0.98), row(1, 8, 0.979), row(1, 4, 0.9), row(1, 1, 2.0) | {"action": "read"}]
    assert best_setting(rows) == Setting("direct", 1, 8)
    assert best_setting(rows, within=0) == Setting("direct", 4, 8)
    assert best_setting(rows, "read") == Setting("direct", 1, 1)


def test_the_interval_holds_the_ratio() -> None:
    low, high = ratio_interval([1.0, 1.1, 0.9, 1.0, 1.05], [1.0, 0.95, 1.05, 1.0, 1.1])
    assert 0.8 < low <= 1.0 <= high < 1.2
    assert ratio_interval([2.0], [1.0]) == (2.0, 2.0)


def test_the_forecast_is_bytes_over_bandwidth() -> None:
    rows = {(row.model, row.state): row for row in forecast(1.3e9)}
    assert rows["1B", "bf16, fp32 moments"].seconds_per_step == pytest.approx(20.0)
    assert rows["7B", "bf16, fp32 moments"].terabytes_per_1000_steps == pytest.approx(84.0)
    assert rows["70B", "bf16, 8-bit moments"].bytes_on_drive == 6 * 70 * 10**9


@pytest.mark.parametrize("plan", [TINY, QUICK, STANDARD], ids=["tiny", "quick", "standard"])
def test_plans_read_cold_bytes_once(plan: Plan) -> None:
    assert plan.point_nbytes <= plan.file_nbytes
    assert all(plan.file_nbytes % block == 0 for block in plan.blocks)


@pytest.mark.slow
def test_a_whole_run_says_what_it_writes_and_leaves_nothing(tmp_path: Path) -> None:
    announced: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []
    result = run_bench(
        tmp_path,
        plan=TINY,
        announce=lambda *nbytes: announced.append(nbytes),
        progress=lambda done, total, what: seen.append((done, total)),
    )
    assert list(tmp_path.iterdir()) == []
    assert json.dumps(result)
    assert {(r["backend"], r["action"]) for r in result["grid"]} == {(k, a) for k in FILE_BACKENDS for a in ("read", "write", "mix")}
    assert all(r["cached_nbytes"] == 0 for r in result["grid"] if r["action"] != "write")
    assert {r["action"] for r in result["fio"]} == ({"read", "write", "mix"} if result["fio_version"] else set())
    assert [r["action"] for r in result["checksums"]] == ["write", "read"]
    assert result["sustained_write"]["first_nbytes"] + result["sustained_write"]["rest_nbytes"] == TINY.sustained_nbytes
    assert set(result["processes"]["together_bytes_per_s"]) == {"read", "write", "mix"}
    (moved, written), actual = announced[0], result["actual_nbytes"]
    assert actual["written"] == pytest.approx(written, rel=0.05)
    assert actual["moved"] == pytest.approx(moved, rel=0.02)
    assert seen[-1][0] == actual["moved"]
    swapio.config.load_config({"train_batch_size": 1, **result["swapio_config"]})


def test_without_fio_and_without_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)

    class Refused:
        def __init__(self, directory: object) -> None:
            raise StorageError("opening", name="swap file", path=str(directory), offset=0, wanted=0, got=0, why="no O_DIRECT there")

    monkeypatch.setitem(FILE_BACKENDS, "direct", Refused)
    plan = dataclasses.replace(TINY, repeats=1, checksum_repeats=1, sustained_nbytes=0, num_processes=1)
    result = run_bench(tmp_path, plan=plan)
    assert "no O_DIRECT there" in result["refused_backends"]["direct"]
    assert result["notes"] == ["fio is not installed"]
    assert result["best"]["backend"] in ("mmap", "aiofiles")


def test_what_there_is_no_time_for_is_left_out_and_named(tmp_path: Path) -> None:
    result = run_bench(tmp_path, plan=dataclasses.replace(TINY, sustained_nbytes=0, limit_s=0))
    assert result["grid"]
    assert result["best"]
    assert (result["fio"], result["checksums"], result["processes"]) == ([], [], None)
    assert result["notes"][:2] == ["512.0 KiB instead of 2.0 MiB per point, for time", "grid: 1 of 2 rounds, for time"]
    left_out = [f"fio, {a}" for a in ("read", "write", "mix")] if result["fio_version"] else []
    left_out += ["checksums, write", "checksums, read", "2 processes at once"]
    assert [note for note in result["notes"] if "left out" in note] == [f"{what}: left out, for time" for what in left_out]
    assert drive_tables(result)


def test_paths_that_cannot_be_measured(tmp_path: Path) -> None:
    for run in (run_bench, run_tune):
        with pytest.raises(ConfigError, match="missing: there is no such directory"):
            run(tmp_path / "missing")
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="file: is that a file"):
            run(tmp_path / "file")
        (tmp_path / "file").unlink()
        with pytest.raises(ConfigError, match=r"/proc: no file can be made there .*give a directory"):
            run("/proc")
    assert list(tmp_path.iterdir()) == []
    huge = dataclasses.replace(TINY, file_nbytes=1 << 60)
    with pytest.raises(ConfigError, match=r"are free, .* are needed; free some or take --quick"):
        run_bench(tmp_path, plan=huge)


def test_advice_is_no_plan_that_has_no_room_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(MiB, 0, MiB))
    for plan in (QUICK, STANDARD):
        with pytest.raises(ConfigError, match="free some, or give another directory"):
            run_bench(tmp_path, plan=plan)
    with pytest.raises(ConfigError, match=r"1.0 MiB are free, 1.4 GiB are needed"):  # it filled the drive with the file of one backend
        run_tune(tmp_path)


def test_a_limit_of_file_sizes_is_told_with_how_to_raise_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the same refusal of each backend in one line."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (MiB, resource.RLIM_INFINITY))
    wrong = r"files may have at most 1.0 MiB, 128.0 MiB are needed; .*ulimit -f unlimited"
    with pytest.raises(ConfigError, match=wrong):
        run_bench(tmp_path, plan=QUICK)
    with pytest.raises(ConfigError, match=wrong):
        run_tune(tmp_path)


def test_a_wrong_path_is_told_before_others_are_measured(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "--tiny", str(tmp_path), str(tmp_path / "missing"), "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, ConfigError)
    assert "no file stays" not in done.output


def test_an_earlier_result_stays_until_there_is_a_new_one(tmp_path: Path) -> None:
    """A run that failed took the file away that configs name; so it did with /dev/null."""
    old, wrong = tmp_path / "tuned.json", str(tmp_path / "missing")
    old.write_text("{}")
    (tmp_path / "drive.json").write_text("{}")
    for command in (["tune", wrong, "--out", str(old)], ["bench", wrong, "--out", str(tmp_path)]):
        assert isinstance(CliRunner().invoke(app, command).exception, ConfigError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drive.json", "tuned.json"]
    done = CliRunner().invoke(app, ["tune", str(tmp_path), "--out", str(tmp_path)])
    assert isinstance(done.exception, ConfigError)
    assert f"--out: {tmp_path} cannot be written (Is a directory); give another file" in str(done.exception)


@pytest.mark.slow
def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    command = [sys.executable, "-m", "swapio", "bench", "--quick", str(drive), "--out", str(tmp_path / "out")]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert run.stdout is not None
    for line in run.stdout:
        if "no file stays" in line:
            break
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode not in (0, -signal.SIGKILL)
    assert list(drive.iterdir()) == []


def test_the_search_ends_with_the_best_and_keeps_its_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from swapio.drive import _tune

    speeds = {Setting("direct", 64 * KiB, 2): 9e9, Setting("direct", 128 * KiB, 1): 8e9}
    real = measure

    def fake(file: DriveFile, setting: Setting, action: str, *, nbytes: int, content: memoryview) -> object:
        sample = real(file, setting, action, nbytes=nbytes, content=content)
        return dataclasses.replace(sample, seconds=(sample.read_nbytes + sample.written_nbytes) / speeds.get(setting, 1e9))

    monkeypatch.setattr(_tune, "measure", fake)
    announced: list[int] = []
    search = Search(blocks=(64 * KiB, 128 * KiB), depths=(1, 2), buffered_depth=2, nbytes=256 * KiB, file_nbytes=MiB)
    result = run_tune(tmp_path, search=search, announce=announced.append)
    assert result["best"] == {"backend": "direct", "block_nbytes": 64 * KiB, "queue_depth": 2}
    assert result["swapio_config"] == {"aio": {"block_size": 64 * KiB, "queue_depth": 2}, "swapio": {"backend": "direct"}}
    assert 0 < result["written_nbytes"] <= announced[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_tune_writes_a_file(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    done = CliRunner().invoke(app, ["tune", str(drive), "--out", str(tmp_path / "t.json")])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["swapio_config"]["aio"]["block_size"] == found["best"]["block_nbytes"]
    assert found["machine"]["torch"]
    assert list(drive.iterdir()) == []
