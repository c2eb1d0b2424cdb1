"""What was found about a machine: one line for each check, and what all of them come to."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

__all__ = ["Check", "Status", "check_line", "check_table", "verdict", "worst"]


class Status(enum.StrEnum):
    """The better first; the place is the exit code."""

    OK = "ok"
    """Nothing to do."""
    DEGRADED = "degraded"
    """Training works, but is slower or less safe than this machine allows."""
    BROKEN = "broken"
    """Training, or what it is for, fails."""

    @property
    def exit_code(self) -> int:
        return list(Status).index(self)


_STYLES = {Status.OK: "green", Status.DEGRADED: "yellow", Status.BROKEN: "bold red"}
_MEANINGS = {
    Status.OK: "this machine is ready",
    Status.DEGRADED: "training works here, but not as well as it could",
    Status.BROKEN: "training like this fails; mend what is broken first",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One check. `found` and `advice` are made one printable line each; `advice` is empty where there is nothing to say."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        for field in ("found", "advice"):  # paths and other programs' errors may hold anything
            text = getattr(self, field).encode(errors="backslashreplace").decode()
            line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
            object.__setattr__(self, field, line)


def worst(checks: Sequence[Check]) -> Status:
    """What all checks come to; the status of none is ok."""
    return max((check.status for check in checks), key=lambda status: status.exit_code, default=Status.OK)


def verdict(checks: Sequence[Check]) -> str:
    """One line: `"degraded: training works here, but not as well as it could (12 ok, 1 degraded, 0 broken)"`."""
    counts = ", ".join(f"{sum(check.status is status for check in checks)} {status}" for status in Status)
    return f"{worst(checks)}: {_MEANINGS[worst(checks)]} ({counts})"


def check_line(check: Check) -> str:
    """For a log."""
    advice = f" -> {check.advice}" if check.advice else ""
    return f"{check.status:<9} {check.name:<12} {check.found}{advice}"


def check_table(checks: Sequence[Check]) -> Table:
    """For a terminal; below what was found stands the advice."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        style = _STYLES[check.status]
        advice = Text(f"\n{check.advice}", style="dim" if check.status is Status.OK else style) if check.advice else Text()
        table.add_row(Text(check.status, style=style), Text(check.name), Text(check.found).append_text(advice))
    return table
