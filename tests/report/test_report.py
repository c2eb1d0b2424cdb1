from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from swapio.report import PHASES, LiveRun, StepEntry, Totals, memory_table, percent, plot_run, time_table


def entry(step: int, **changes: Any) -> StepEntry:
    given: dict[str, Any] = {
        "step": step, "loss": 5.0 / step, "seconds": 2.0, "bytes_read": 3 << 30, "bytes_written": 1 << 30, "tokens": 100,
        "learning_rate": 1e-3, "stall_seconds": 0.5, "phase_seconds": dict.fromkeys(PHASES, 0.5),
        "phase_stall_seconds": dict.fromkeys(PHASES, 0.25), "bytes_on_nvme": 1 << 30, "bytes_on_host": 1 << 20, "bytes_on_device": 0,
        "gradient_bytes": 1 << 19, "host_memory_used": 3 << 20, "host_memory_budget": 4 << 20, "rss": 300 << 20,
    }  # fmt: skip
    return StepEntry(**given | changes)


def stats(**changes: Any) -> dict[str, Any]:
    return {
        "bytes_on_nvme": 1 << 30, "bytes_on_host": 1 << 20, "bytes_on_device": 0, "host_memory_budget": 4 << 20,
        "host_memory_peak": 3 << 20, "backend": "direct", "backend_reason": "it was tried", "path": "/mnt/x",
    } | changes  # fmt: skip


def totals(steps: int) -> Totals:
    result = Totals()
    for step in range(1, steps + 1):
        result.add(entry(step))
    return result


def shown(*things: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(*things)
    return out.getvalue()


def test_totals_are_sums() -> None:
    sums = totals(3)
    assert (sums.num_steps, sums.seconds, sums.bytes_read, sums.tokens) == (3, 6.0, 9 << 30, 300)
    assert sums.phase_seconds == dict.fromkeys(PHASES, 1.5)
    assert sums.gradient_bytes == 1 << 19


def test_memory_table_names_each_tier_and_the_budget() -> None:
    text = shown(memory_table(stats(), totals(2), peak_rss=300 << 20))
    for part in ("1.0 GiB", "in /mnt/x", "direct: it was tried", "75% of the budget of 4.0 MiB", "512.0 KiB", "300.0 MiB"):
        assert part in text
    assert "accelerator" not in text
    assert "drive" not in shown(memory_table(stats(bytes_on_nvme=0), totals(2), peak_rss=1))
    text = shown(memory_table(stats(host_memory_budget=None, bytes_on_device=5 << 20), totals(2), peak_rss=1))
    assert "no limit" in text
    assert "5.0 MiB" in text


def test_time_table_has_each_phase() -> None:
    text = shown(time_table(totals(4)))
    for part in (*PHASES, "a whole step", "50%", "25%", "3.0 GiB, 1.61 GB/s", "1.0 GiB, 0.54 GB/s"):
        assert part in text
    assert "0.00" in shown(time_table(Totals()))


def test_percent_of_nothing_is_no_number() -> None:
    assert (percent(1, 4), percent(1, 0)) == ("25%", "-")


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("budget", [None, 4 << 20, 1 << 50])
def test_picture(tmp_path: Path, steps: int, budget: int | None) -> None:
    entries = [entry(s, host_memory_budget=budget).as_dict() for s in range(1, steps + 1)]
    assert plot_run(entries, tmp_path / "x.png", title="a run")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_no_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not plot_run([entry(1).as_dict()], tmp_path / "x.png", title="a run")
    assert list(tmp_path.iterdir()) == []


def run(console: Console, steps: int) -> None:
    with LiveRun(console, num_steps=steps) as live:
        for step in range(1, steps + 1):
            live.update(entry(step))


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (100, 21), (1000, 21)])
def test_progress_without_a_terminal_is_a_few_lines(steps: int, lines: int) -> None:
    out = io.StringIO()
    run(Console(file=out, width=80), steps)
    found = out.getvalue().splitlines()
    assert len(found) == lines
    figures = "50 tokens/s  stalled 25%  drive 1.61 GB/s read, 0.54 written  RAM 3.0 MiB of 4.0 MiB"
    assert found[-1] == f"step {steps}/{steps}  loss {5 / steps:.4f}  {figures}"
    assert "\x1b" not in out.getvalue()


def test_progress_without_a_drive_does_not_speak_of_one() -> None:
    out = io.StringIO()
    with LiveRun(Console(file=out, width=80), num_steps=1) as live:
        live.update(entry(1, bytes_on_nvme=0))
    assert "drive" not in out.getvalue()


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = io.StringIO()
    run(Console(file=out, width=80, force_terminal=True), 3)
    assert "3/3" in out.getvalue()
    assert "50 tokens/s" in out.getvalue()
