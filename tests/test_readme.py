"""What the README shows works when it is pasted into a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_example_is_short() -> None:
    assert BLOCKS[0].count("\n") <= 20


def test_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}  # the later ones go on where the first ends
    for block in BLOCKS:
        exec(compile(block.replace('"/tmp"', repr(str(tmp_path))), "README.md", "exec"), names)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines() if re.match(r"\d+ \d", line)]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert list(tmp_path.iterdir()) == []


def test_what_it_names_is_there() -> None:
    root = Path(__file__).parents[1]
    for name in re.findall(r"(?:tools|bench)/\w+(?:\.py)?", README):
        assert name == "bench/results" or (root / name).exists(), name
