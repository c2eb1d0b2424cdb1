"""`swapio.tuned`: the file of `swapio tune` fills in what the config does not give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swapio.config import load_config
from swapio.errors import ConfigError

TUNED = {"swapio_config": {"aio": {"block_size": 1 << 20, "queue_depth": 16}, "swapio": {"backend": "mmap"}}, "measured": [1, 2]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(TUNED))
    return path


def test_it_fills_in_what_is_not_given(file: Path) -> None:
    loaded = load_config({"swapio": {"tuned": file, "backend": "auto"}, "aio": {"queue_depth": 2}})
    assert (loaded.aio.block_size, loaded.aio.queue_depth, loaded.swapio.backend) == (1 << 20, 2, "mmap")
    assert loaded.sources["aio.block_size"] == loaded.sources["swapio.backend"] == f"tuned {file}"
    assert (loaded.sources["aio.queue_depth"], loaded.sources["swapio.tuned"]) == ("given", "given")
    assert load_config(loaded.resolved()).resolved() == loaded.resolved()
    assert json.dumps(loaded.resolved())


def test_a_part_will_do(file: Path) -> None:
    file.write_text('{"swapio_config": {"aio": {"queue_depth": 7}}}')
    loaded = load_config({"swapio": {"tuned": str(file)}})
    assert (loaded.aio.queue_depth, loaded.sources["aio.block_size"]) == (7, "default")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        ("{", "line 1, column 2"),
        ("[]", "holds a list"),
        ("{}", "no object `swapio_config`"),
        ({"swapio_config": 3}, "no object `swapio_config`"),
        ({"swapio_config": {"aio": 3}}, "sets 'aio', which is not tuned"),
        ({"swapio_config": {"aio": {"use_gds": True}}}, "sets 'aio.use_gds', which is not tuned"),
        ({"swapio_config": {"bf16": {"enabled": True}}}, "it may set aio.block_size, "),
        ({"swapio_config": {"aio": {"block_size": 1000}}}, "aio.block_size: .*4096.*got 1000"),
        ({"swapio_config": {"swapio": {"backend": "floppy"}}}, "swapio.backend: "),
    ],
)
def test_a_file_that_cannot_work_is_an_error_at_once(tmp_path: Path, content: Any, says: str) -> None:
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    given = {"swapio": {"tuned": str(path), "backend": "direct"}, "aio": {"block_size": 4096}}
    with pytest.raises(ConfigError, match=rf"^swapio\.tuned: .*{says}") as caught:
        load_config(given)
    assert caught.value.key == "swapio.tuned"
    assert str(path) in str(caught.value)


def test_the_path_is_a_path() -> None:
    with pytest.raises(ConfigError, match=r"^swapio\.tuned: .*got 3"):
        load_config({"swapio": {"tuned": 3}})
