"""The demo, with a model that a step takes milliseconds for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import swapio
from swapio.cli import _demo, main
from swapio.cli._app import app
from swapio.cli._meter import peak_rss
from swapio.cli._place import Place
from swapio.report import LiveRun, StepEntry

SMALL = ["--layers", "2", "--dim", "64", "--seq", "16", "--batch", "2", "--steps", "4", "--dtype", "fp32"]


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `swapio demo` in an empty directory, with `drive` for the swap file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_demo, "_SAMPLE_TOKENS", 8)
    (tmp_path / "drive").mkdir()

    def run(*args: str) -> Result:
        path = [] if "--offload" in args or "--nvme-path" in args else ["--nvme-path", str(tmp_path / "drive")]
        return CliRunner().invoke(app, ["demo", *SMALL, *path, *args])

    return run


def log(folder: Path = Path("demo-out")) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "demo.jsonl").read_text().splitlines()]


def run_main(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["swapio", *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_a_run_shows_and_keeps_what_it_did(demo: Callable[..., Result], tmp_path: Path) -> None:
    result = demo()
    assert result.exit_code == 0, result.output
    for text in (
        "The model.",
        "The place.",
        "The budget.",
        "step 4/4",
        "What it writes by now",
        "Where the bytes rested",
        "What a step waited for",
    ):
        assert text in result.output
    entries = log()
    assert [e["step"] for e in entries] == [1, 2, 3, 4]
    assert entries[-1]["loss"] < entries[0]["loss"]
    for entry in entries:
        assert entry["seconds"] > 0
        assert entry["bytes_read"] >= 0
        assert entry["bytes_written"] >= 0
        assert entry["bytes_on_nvme"] >= 12 * 120_000
        assert 0 < entry["host_memory_used"] <= entry["host_memory_budget"]
        assert entry["gradient_bytes"] > 0
    summary = json.loads(Path("demo-out/demo.json").read_text())
    assert summary["totals"]["bytes_written"] == sum(e["bytes_written"] for e in entries)
    assert summary["peak_rss"] >= max(e["rss"] for e in entries)
    assert Path("demo-out/demo.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "drive").iterdir()) == []


def test_losses_are_the_same_wherever_the_state_rests(demo: Callable[..., Result]) -> None:
    losses = {}
    for args in (["--nvme-path", "drive"], ["--offload", "cpu"], ["--offload", "none"], ["--nvme-path", "drive", "--device", "simulated"]):
        result = demo(*args)
        assert result.exit_code == 0, result.output
        losses[tuple(args)] = [e["loss"] for e in log()]
    first, *others = losses.values()
    assert all(other == first for other in others)
    assert demo("--seed", "1").exit_code == 0
    assert [e["loss"] for e in log()] != first


def test_bf16_trains(demo: Callable[..., Result]) -> None:
    result = demo("--dtype", "bf16")
    assert result.exit_code == 0, result.output
    assert log()[-1]["loss"] < log()[0]["loss"]


@pytest.mark.usefixtures("demo")
def test_without_a_path_it_says_which_place_it_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Place(tmp_path / "drive", "ext4", 10 << 30, False)
    monkeypatch.setattr("swapio.cli._demo.pick_directory", lambda nbytes: (place, "because it is the only one"))
    result = CliRunner().invoke(app, ["demo", *SMALL], env={"COLUMNS": "500"})
    assert result.exit_code == 0, result.output
    assert f"{place.path} (because it is the only one, ext4 with 10.0 GiB free" in result.output
    assert list(place.path.iterdir()) == []


def test_ctrl_c_ends_the_step_and_shows_it(demo: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    update = LiveRun.update

    def interrupt(self: LiveRun, entry: StepEntry) -> None:
        update(self, entry)
        if entry.step == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(LiveRun, "update", interrupt)
    result = demo()
    assert result.exit_code == 130
    assert "Stopping after this step" in result.output
    assert "Where the bytes rested" in result.output
    assert len(log()) == 2
    assert json.loads(Path("demo-out/demo.json").read_text())["interrupted"]
    assert list((tmp_path / "drive").iterdir()) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_stops_at_once(demo: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    backward = swapio.Engine.backward

    def interrupt(self: swapio.Engine, loss: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return backward(self, loss)

    monkeypatch.setattr(swapio.Engine, "backward", interrupt)
    result = demo()
    assert result.exit_code != 0
    assert "Where the bytes rested" not in result.output
    assert list((tmp_path / "drive").iterdir()) == []


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--dim", "100"], 2, "--dim: 100 is no multiple of 64"),
        (["--host-memory", "many"], 2, "--host-memory: 'many' is not a size in bytes"),
        (["--host-memory", "1MiB"], 2, "use at least"),
        (["--nvme-path", "/no/such/place"], 2, "--nvme-path: /no/such/place is no directory"),
        (["--out", "/dev/null/x"], 2, "--out: /dev/null/x cannot be written"),
        (["--seq", "9000000"], 2, "--seq: 9000000 is longer than the text"),
    ],
)
def test_what_cannot_work_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_main(monkeypatch, "demo", *SMALL, "--nvme-path", str(tmp_path), *args) == code
    error = capsys.readouterr().err
    assert "error: " in error
    assert message in error
    assert "Traceback" not in error


def test_the_budget_that_an_error_names_works(demo: Callable[..., Result]) -> None:
    refused = demo("--host-memory", "1MiB")
    assert isinstance(refused.exception, swapio.BudgetError)
    works = refused.exception.works_nbytes
    assert works is not None
    assert isinstance(demo("--host-memory", str(works - 1)).exception, swapio.BudgetError)
    assert demo("--host-memory", str(works)).exit_code == 0


def test_a_failing_drive_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise swapio.StorageError("read", name="blocks.0", path="/mnt/x", offset=0, wanted=4096, got=0)

    monkeypatch.setattr(_demo, "initialize", fail)
    assert run_main(monkeypatch, "demo", *SMALL, "--nvme-path", str(tmp_path)) == 1
    assert "[EIO]" in capsys.readouterr().err


def test_the_module_runs() -> None:
    done = subprocess.run([sys.executable, "-m", "swapio", "--version"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, swapio.__version__ + "\n", "")


@pytest.mark.parametrize(("args", "text"), [(["--help"], "demo"), (["demo", "--help"], "Hard limit, like"), ([], "Usage")])
def test_help(args: list[str], text: str) -> None:
    assert text in CliRunner().invoke(app, args, env={"COLUMNS": "200"}).output


def test_peak_rss_is_this_process() -> None:
    assert peak_rss() > 50 << 20
