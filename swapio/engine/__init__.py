"""`initialize`, the engine it returns, and what the config can name."""

from ._arguments import add_config_arguments
from ._distributed import init_distributed
from ._engine import Engine
from ._estimate import Estimate, estimate_model_states
from ._initialize import initialize
from ._monitor import Monitor
from ._pretrained import load_pretrained
from ._scaler import LossScaler
from ._schedulers import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, scheduler_from_config

__all__ = [
    "Engine",
    "Estimate",
    "LRRangeTest",
    "LossScaler",
    "Monitor",
    "OneCycle",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "add_config_arguments",
    "estimate_model_states",
    "init_distributed",
    "initialize",
    "load_pretrained",
    "scheduler_from_config",
]
