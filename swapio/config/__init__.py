"""The config in DeepSpeed's format."""

from ._load import batch_triple, load_config
from ._schema import AioConfig, Bf16Config, OffloadConfig, OptimizerConfig, OwnConfig, SwapioConfig, ZeroConfig

__all__ = [
    "AioConfig",
    "Bf16Config",
    "OffloadConfig",
    "OptimizerConfig",
    "OwnConfig",
    "SwapioConfig",
    "ZeroConfig",
    "batch_triple",
    "load_config",
]
