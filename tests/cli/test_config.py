from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from swapio.cli._app import app
from swapio.config import config_markdown, load_config
from swapio.errors import ConfigError


def test_without_a_file_it_is_the_page_of_all_keys() -> None:
    result = CliRunner().invoke(app, ["config"])
    assert (result.exit_code, result.stdout) == (0, config_markdown())


def test_a_file_is_shown_with_sources(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 8, "bf16": {"enabled": true}}')
    result = CliRunner().invoke(app, ["config", str(tmp_path / "c.json")])
    assert result.exit_code == 0
    assert result.stdout == load_config(tmp_path / "c.json", world_size_source="--world-size").describe() + "\n"
    assert "(given)" in result.stdout


def test_what_cannot_work_is_the_error_that_training_would_raise(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 9}')
    error = CliRunner().invoke(app, ["config", str(tmp_path / "c.json"), "--world-size", "2"]).exception
    assert isinstance(error, ConfigError)
    assert "world size 2 (--world-size): 9 cannot be split evenly" in str(error)
