"""swapio trains PyTorch models larger than the machine's memory."""

from . import checkpointing, ops, runtime, utils, zero
from .checkpoint import get_fp32_state_dict
from .engine import Engine, add_config_arguments, init_distributed, initialize, load_pretrained
from .engine import initialize as init
from .errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    ForkError,
    RankError,
    StorageError,
    SwapioError,
    TransferTimeoutError,
    UsageError,
)
from .swap import SwapManager, Transfer

__all__ = [
    "BudgetError",
    "ClosedError",
    "ConfigError",
    "Engine",
    "ForkError",
    "RankError",
    "StorageError",
    "SwapManager",
    "SwapioError",
    "Transfer",
    "TransferTimeoutError",
    "UsageError",
    "add_config_arguments",
    "checkpointing",
    "get_fp32_state_dict",
    "init",
    "init_distributed",
    "initialize",
    "load_pretrained",
    "ops",
    "runtime",
    "utils",
    "zero",
]
__version__ = "0.1.0"
