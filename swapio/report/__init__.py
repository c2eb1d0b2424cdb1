"""What people look at: progress, tables and pictures of a run."""

from ._check import Check, Status, check_line, check_table, verdict, worst
from ._drive import drive_tables, plot_drive
from ._live import LiveRun
from ._machine import machine
from ._plot import plot_run
from ._run import PHASES, StepEntry, Totals
from ._tables import memory_table, percent, table, time_table

__all__ = [
    "PHASES",
    "Check",
    "LiveRun",
    "Status",
    "StepEntry",
    "Totals",
    "check_line",
    "check_table",
    "drive_tables",
    "machine",
    "memory_table",
    "percent",
    "plot_drive",
    "plot_run",
    "table",
    "time_table",
    "verdict",
    "worst",
]
