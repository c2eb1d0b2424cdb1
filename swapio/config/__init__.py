"""The config in DeepSpeed's format."""

from ._batch import batch_triple
from ._docs import config_markdown, config_table
from ._keys import KEYS, Key, Kind
from ._load import load_config, scheduler_params
from ._params import REFUSED_OPTIMIZERS
from ._schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    DataTypesConfig,
    Fp16Config,
    MonitorConfig,
    OffloadConfig,
    OptimizerConfig,
    OwnConfig,
    SchedulerConfig,
    SwapioConfig,
    ZeroConfig,
)

__all__ = [
    "KEYS",
    "REFUSED_OPTIMIZERS",
    "ActivationCheckpointingConfig",
    "AioConfig",
    "Bf16Config",
    "DataTypesConfig",
    "Fp16Config",
    "Key",
    "Kind",
    "MonitorConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "OwnConfig",
    "SchedulerConfig",
    "SwapioConfig",
    "ZeroConfig",
    "batch_triple",
    "config_markdown",
    "config_table",
    "load_config",
    "scheduler_params",
]
