"""Every script under `bench/` runs at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(p for p in (Path(__file__).parents[2] / "bench").glob("*.py") if p.name != "__init__.py")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_tiny(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(script), "--tiny", "--nvme-path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "losses equal" in done.stdout
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
