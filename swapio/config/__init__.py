"""The config in DeepSpeed's format."""

from ._batch import batch_triple
from ._keys import KEYS, Key, Kind, config_table
from ._load import load_config
from ._schema import (
    ActivationCheckpointingConfig,
    AioConfig,
    Bf16Config,
    Fp16Config,
    OffloadConfig,
    OptimizerConfig,
    OwnConfig,
    SwapioConfig,
    ZeroConfig,
)

__all__ = [
    "KEYS",
    "ActivationCheckpointingConfig",
    "AioConfig",
    "Bf16Config",
    "Fp16Config",
    "Key",
    "Kind",
    "OffloadConfig",
    "OptimizerConfig",
    "OwnConfig",
    "SwapioConfig",
    "ZeroConfig",
    "batch_triple",
    "config_table",
    "load_config",
]
