from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from swapio.config import SwapioConfig
from swapio.engine._monitor import Monitor
from swapio.errors import ClosedError, ConfigError


def config(folder: Path, *names: str, **more: Any) -> SwapioConfig:
    return SwapioConfig.model_validate({name: {"enabled": True, "output_path": str(folder), "job_name": "job", **more} for name in names})


def rows(folder: Path, name: str) -> list[list[str]]:
    with (folder / "job" / name).open(newline="") as file:
        return list(csv.reader(file))


def test_csv_has_a_file_for_each_tag(tmp_path: Path) -> None:
    with Monitor(config(tmp_path, "csv_monitor")) as monitor:
        assert monitor.enabled
        monitor.write([("Train/Samples/lr", 1e-3, 8), ("Train/Samples/train loss", torch.tensor(2.5), 8)])
        monitor.write_events([("Train/Samples/lr", 1, 16)])
        # what is written is there, whatever happens to the process
        assert rows(tmp_path, "Train_Samples_lr.csv") == [["step", "lr"], ["8", "0.001"], ["16", "1.0"]]
    assert rows(tmp_path, "Train_Samples_train_loss.csv") == [["step", "train loss"], ["8", "2.5"]]
    assert len(list((tmp_path / "job").iterdir())) == 2


def test_values_come_back_to_the_bit(tmp_path: Path) -> None:
    values = [0.1 + 0.2, 1e-45, -0.0, math.inf, 2**70]
    with Monitor(config(tmp_path, "csv_monitor")) as monitor:
        monitor.write(("x", value, step) for step, value in enumerate(values))
    assert [float(value) for _, value in rows(tmp_path, "x.csv")[1:]] == values


@pytest.mark.parametrize("left", ["step,x\n1,0.5\n", "step,x\n1,0.5\n2,0.", "step,x\r\n1,0.5\r\n", "", None])
def test_csv_appends_to_what_an_earlier_run_left(tmp_path: Path, left: str | None) -> None:
    (tmp_path / "job").mkdir()
    if left is not None:
        (tmp_path / "job" / "x.csv").write_bytes(left.encode())
    for step in (3, 4):
        with Monitor(config(tmp_path, "csv_monitor")) as monitor:
            monitor.write([("x", 0.25, step)])
    found = rows(tmp_path, "x.csv")
    assert found[0] == ["step", "x"]
    assert found[-2:] == [["3", "0.25"], ["4", "0.25"]]
    assert len(found) == 3 + (len(left.splitlines()) - 1 if left else 0)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Monitor(config(tmp_path, "csv_monitor"), rank=1) as monitor:
        assert not monitor.enabled
        monitor.write([("x", 1.0, 1)])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_on_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Monitor(SwapioConfig()) as monitor:
        monitor.write([("x", 1.0, 1)])
    assert not monitor.enabled
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_where_the_program_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Monitor(SwapioConfig.model_validate({"csv_monitor": {"enabled": True}})) as monitor:
        monitor.write([("x", 1.0, 1)])
    assert (tmp_path / "DeepSpeedJobName" / "x.csv").is_file()


def test_a_closed_monitor_says_so(tmp_path: Path) -> None:
    monitor = Monitor(config(tmp_path, "csv_monitor"))
    monitor.close()
    monitor.close()
    with pytest.raises(ClosedError, match="closed"):
        monitor.write([("x", 1.0, 1)])
    assert list((tmp_path / "job").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file")
    with pytest.raises(ConfigError, match=r"csv_monitor\.output_path: .*job.* cannot be made: File exists") as caught:
        Monitor(config(tmp_path, "csv_monitor"))
    assert caught.value.key == "csv_monitor.output_path"


def test_a_write_that_fails_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "x.csv").symlink_to("/dev/full")
    with Monitor(config(tmp_path, "csv_monitor")) as monitor, pytest.raises(OSError, match="No space left"):
        monitor.write([("x", 1.0, 1)])


@pytest.mark.parametrize("rank", [0, 1])
def test_without_the_package_tensorboard_every_rank_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard\.enabled: .* pip install tensorboard, or use csv_monitor"):
        Monitor(config(tmp_path, "tensorboard"), rank=rank)


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ([1, 2], [3]):
        with Monitor(config(tmp_path, "tensorboard", "csv_monitor")) as monitor:
            monitor.write([("Train/loss", step / 4, step) for step in steps])
    found = EventAccumulator(str(tmp_path / "job")).Reload().Scalars("Train/loss")
    assert [(event.step, event.value) for event in found] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert len(rows(tmp_path, "Train_loss.csv")) == 4
