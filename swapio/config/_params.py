"""`optimizer.params` and `scheduler.params`: what each type may hold, with defaults."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

__all__ = ["OPTIMIZERS", "REFUSED_OPTIMIZERS", "SCHEDULERS", "Section"]


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rates(value: Any) -> Any:
    rates = value if isinstance(value, list) else [value]
    if not rates or any(isinstance(r, bool) or not isinstance(r, int | float) or not 0 <= r < math.inf for r in rates):
        raise ValueError("write one learning rate, or a list with one for each param group; for example 0.001")
    return [float(r) for r in rates] if isinstance(value, list) else float(value)


Rate = Annotated[float, Field(ge=0)]
Rates = Annotated[Any, BeforeValidator(_rates)]
"""One value for all param groups, or a list with one for each."""
Beta = Annotated[float, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Unknown keys, and values of another type, are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class _OptimizerParams(Section):
    lr: Rate = Field(default=1e-3, description="learning rate (Adagrad, RMSprop: 0.01; Adadelta: 1.0; Adamax: 0.002)")
    weight_decay: Rate = Field(default=0.0, description="as in DeepSpeed 0 when not given, for AdamW too (PyTorch: 0.01)")
    maximize: bool = Field(default=False, description="ascend")


class _MomentsParams(_OptimizerParams):
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = Field(default=(0.9, 0.999), description="decay of the two moments")
    eps: Rate = Field(default=1e-8, description="added to the denominator (Adagrad: 1e-10; Adadelta: 1e-06)")


class _AdamParams(_MomentsParams):
    amsgrad: bool = Field(default=False, description="keep the largest second moment")
    adam_w_mode: bool = Field(default=True, description='type "Adam": true, as in DeepSpeed, makes it AdamW')


class _AdamaxParams(_MomentsParams):
    lr: Rate = 2e-3


class _RAdamParams(_MomentsParams):
    decoupled_weight_decay: bool = Field(default=False, description="RAdam: decay the weights as AdamW does")


class _SgdParams(_OptimizerParams):
    momentum: Rate = Field(default=0.0, description="SGD, RMSprop: 0 keeps no state")
    dampening: float = Field(default=0.0, description="of the momentum")
    nesterov: bool = Field(default=False, description="Nesterov's momentum")


class _AdagradParams(_OptimizerParams):
    lr: Rate = 1e-2
    lr_decay: Rate = Field(default=0.0, description="Adagrad: before update n the rate is divided by 1 + this times n - 1")
    eps: Rate = 1e-10


class _RMSpropParams(_OptimizerParams):
    lr: Rate = 1e-2
    alpha: Rate = Field(default=0.99, description="RMSprop: decay of the second moment")
    eps: Rate = 1e-8
    momentum: Rate = 0.0
    centered: bool = Field(default=False, description="RMSprop: divide by the variance instead of the second moment")


class _AdadeltaParams(_OptimizerParams):
    lr: Rate = 1.0
    rho: Annotated[float, Field(ge=0, le=1)] = Field(default=0.9, description="Adadelta: decay of both averages")
    eps: Rate = 1e-6


OPTIMIZERS: dict[str, tuple[str, type[_OptimizerParams]]] = {
    "adamw": ("AdamW", _AdamParams),
    "adam": ("Adam", _AdamParams),
    "sgd": ("SGD", _SgdParams),
    "adagrad": ("Adagrad", _AdagradParams),
    "rmsprop": ("RMSprop", _RMSpropParams),
    "adadelta": ("Adadelta", _AdadeltaParams),
    "adamax": ("Adamax", _AdamaxParams),
    "radam": ("RAdam", _RAdamParams),
}
"""By type in lower case: the resolved type, and what `params` may hold, with the defaults of PyTorch but for the decay of AdamW."""

REFUSED_OPTIMIZERS = {
    "nadam": "it multiplies up one number per parameter from the momenta of all updates, and only state per element is kept",
    "asgd": "it keeps numbers per parameter from one update to the next, and only state per element is kept",
    "rprop": "its step sizes do not start as zeros, as state does here",
}
"""Those of `torch.optim` that would be asked for, by type in lower case, and why they are not supported."""


class _SchedulerParams(Section):
    last_batch_iteration: int = Field(default=-1, ge=-1, description="index of the last step taken; -1 starts from the beginning")


class _LRRangeTestParams(_SchedulerParams):
    lr_range_test_min_lr: Rates = Field(default=1e-3, description="learning rate at the start; or a list, one for each param group")
    lr_range_test_step_size: Steps = Field(default=2000, description="steps in which it grows by step_rate times its start")
    lr_range_test_step_rate: Rate = Field(default=1.0, description="growth per step_size, of the start")
    lr_range_test_staircase: bool = Field(default=False, description="grow once every step_size instead of at each step")


class _OneCycleParams(_SchedulerParams):
    cycle_min_lr: Rate = Field(description="learning rate at both ends of the cycle; needed")
    cycle_max_lr: Rate = Field(description="learning rate in the middle of the cycle; needed")
    decay_lr_rate: Rate = Field(default=0.0, description="after the cycle, the rate is divided by 1 + this per decay_step_size")
    cycle_first_step_size: Steps = Field(default=2000, description="steps up")
    cycle_second_step_size: Steps | None = Field(default=None, description="steps down; null: as many as up")
    cycle_first_stair_count: int = Field(default=0, ge=0, description="stairs up; 0: a slope")
    cycle_second_stair_count: Annotated[int, Field(ge=0)] | None = Field(default=None, description="stairs down; null: as many as up")
    decay_step_size: int = Field(default=0, ge=0, description="steps after the cycle in which the decay counts once; 0: no decay")
    cycle_momentum: bool = Field(default=True, description="cycle Adam's first beta against the rate; its second is then 0.99")
    cycle_min_mom: Beta = Field(default=0.8, description="first beta in the middle of the cycle, and in the first step")
    cycle_max_mom: Beta = Field(default=0.9, description="first beta at both ends of the cycle")
    decay_mom_rate: Rate = Field(default=0.0, description="after the cycle, the first beta is multiplied by 1 + this per decay_step_size")


class _WarmupParams(_SchedulerParams):
    warmup_num_steps: Steps = Field(default=1000, description="steps until the full rate; 1 counts as 2")
    warmup_type: Literal["log", "linear"] = Field(default="log", description="how the rate grows")


class _WarmupLRParams(_WarmupParams):
    warmup_min_lr: Rates = Field(default=0.0, description="learning rate at the start; or a list, one for each param group")
    warmup_max_lr: Rates = Field(default=None, description="full rate; null: the one that each param group has (WarmupDecayLR: 0.001)")


class _WarmupDecayLRParams(_WarmupLRParams):
    warmup_max_lr: Rates = Field(default=1e-3, description=_WarmupLRParams.model_fields["warmup_max_lr"].description)
    total_num_steps: Steps = Field(description="steps of the whole training; needed")


class _WarmupCosineLRParams(_WarmupParams):
    warmup_min_ratio: Rate = Field(default=0.0, description="share of the optimizer's rate at the start of the warm-up")
    cos_min_ratio: Rate = Field(default=1e-4, description="share of the optimizer's rate at the end")
    total_num_steps: Steps = Field(description="steps of the whole training; needed")


SCHEDULERS: dict[str, tuple[str, type[_SchedulerParams]]] = {
    "lrrangetest": ("LRRangeTest", _LRRangeTestParams),
    "onecycle": ("OneCycle", _OneCycleParams),
    "warmuplr": ("WarmupLR", _WarmupLRParams),
    "warmupdecaylr": ("WarmupDecayLR", _WarmupDecayLRParams),
    "warmupcosinelr": ("WarmupCosineLR", _WarmupCosineLRParams),
}
"""The same for schedulers: DeepSpeed's names and defaults."""
