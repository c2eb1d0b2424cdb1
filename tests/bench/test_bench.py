"""Every script under `bench/` runs at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted(p for p in (Path(__file__).parents[2] / "bench").glob("*.py") if not p.name.startswith("_"))

SAYS = {
    "drive.py": "no file stays",
    "gpu.py": "nine pairs, losses equal, device_memory kept",
    "hop.py": "a hit makes no hop, losses near",
    "memory.py": "as the formula says, losses equal",
    "scale.py": "2 sizes trained",
    "stripes.py": "two drives as one",
    "swap.py": "contents equal",
    "train_step.py": '"of_forecast"',
    "versus_deepspeed.py": "first losses near",
}
"""What a script prints when its checks held."""


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_tiny(script: Path, tmp_path: Path) -> None:
    drive, out = tmp_path / "drive", tmp_path / "out"
    drive.mkdir()
    out.mkdir()
    command = [sys.executable, str(script), "--tiny", "--nvme-path", str(drive)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert SAYS.get(script.name, "losses equal") in done.stdout
    assert not [p for p in drive.rglob("*") if p.is_file()]
