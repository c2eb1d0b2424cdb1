"""What a drive gives: the bench, the search for the best setting, and what it means for training."""

from ._bench import QUICK, STANDARD, TINY, Plan, best_setting, check_room, config_block, run_bench
from ._fio import fio_run, fio_version
from ._forecast import STATES, Forecast, forecast
from ._tune import Search, run_tune
from ._workload import ACTIONS, DriveFile, Sample, Setting, measure

__all__ = [
    "ACTIONS",
    "QUICK",
    "STANDARD",
    "STATES",
    "TINY",
    "DriveFile",
    "Forecast",
    "Plan",
    "Sample",
    "Search",
    "Setting",
    "best_setting",
    "check_room",
    "config_block",
    "fio_run",
    "fio_version",
    "forecast",
    "measure",
    "run_bench",
    "run_tune",
]
