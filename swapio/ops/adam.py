"""DeepSpeed's Adams by their arguments: each is the `torch.optim` class with the same update, which the engine steps."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def DeepSpeedCPUAdam(  # noqa: N802  (DeepSpeed's name)
    model_params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Adam:
    """`torch.optim.AdamW`, or `Adam` with `adamw_mode=False`. The state is fp32 in any case.

    Raises:
        ConfigError: `bias_correction=False`.
    """
    if not bias_correction:
        raise ConfigError("bias_correction: False is not supported; use True", key="bias_correction", value=False)
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    return kind(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


def FusedAdam(  # noqa: N802  (DeepSpeed's name)
    params: Any,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Adam:
    """As `DeepSpeedCPUAdam`: where it is stepped is the config's choice. Each step drops the gradients in any case."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
