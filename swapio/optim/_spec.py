"""Which optimizers are stepped, with which hyper-parameters and which state per element."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..config import REFUSED_OPTIMIZERS
from ..errors import ConfigError
from ._state import SCALE_NUMEL, StateDtype

__all__ = ["CUT_NUMEL", "Group", "OptimizerSpec", "from_config", "from_torch", "state_fields", "with_state_dtype"]

Kind = Literal["adamw", "adam", "sgd", "adagrad", "rmsprop", "adadelta", "adamax", "radam"]
CUT_NUMEL = 64
"""Flat tensors may be cut at multiples of this many elements without a change of any bit: whole vectors of any CPU, so
that the kernels' scalar tails, which round differently, stay where they are."""

Group = Mapping[str, Any]
"""Hyper-parameters of one param group, by PyTorch's names; `optimizer.param_groups[i]` is one."""


class Rule(NamedTuple):
    """How one kind of optimizer looks in PyTorch.

    Attributes:
        torch_class: the optimizer.
        settings: names of the hyper-parameters of a group.
        fields: names of the state tensors, in the order in which PyTorch's function takes them; with each the setting
            that it needs to be on, if any.
    """

    torch_class: type[torch.optim.Optimizer]
    settings: tuple[str, ...]
    fields: dict[str, str | None]


_ADAM = ("lr", "betas", "eps", "weight_decay", "maximize")
_MOMENTS: dict[str, str | None] = {"exp_avg": None, "exp_avg_sq": None}
_AMSGRAD = _MOMENTS | {"max_exp_avg_sq": "amsgrad"}
_RULES: dict[Kind, Rule] = {
    "adamw": Rule(torch.optim.AdamW, (*_ADAM, "amsgrad"), _AMSGRAD),
    "adam": Rule(torch.optim.Adam, (*_ADAM, "amsgrad", "decoupled_weight_decay"), _AMSGRAD),
    "sgd": Rule(
        torch.optim.SGD, ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"), {"momentum_buffer": "momentum"}
    ),
    "adagrad": Rule(
        torch.optim.Adagrad, ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"), {"sum": None}
    ),
    "rmsprop": Rule(
        torch.optim.RMSprop, ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"),
        {"square_avg": None, "grad_avg": "centered", "momentum_buffer": "momentum"},
    ),
    "adadelta": Rule(torch.optim.Adadelta, ("lr", "rho", "eps", "weight_decay", "maximize"), {"square_avg": None, "acc_delta": None}),
    "adamax": Rule(torch.optim.Adamax, _ADAM, {"exp_avg": None, "exp_inf": None}),
    "radam": Rule(torch.optim.RAdam, (*_ADAM, "decoupled_weight_decay"), _MOMENTS),
}  # fmt: skip
_REFUSED_FIELDS = {"grad_avg": "its square is subtracted from the mean of squares, which may give less than 0 when they are rounded"}
_REFUSED_8_BITS = {
    "max_exp_avg_sq": "each rounding up would stay",
    "sum": "it grows by less than 8 bits can tell",
    "acc_delta": "what it is divided by is rounded too",
    "exp_inf": "it is neither signed nor a mean of squares",
}
_NAMES = ", ".join(rule.torch_class.__name__ for rule in _RULES.values())
_OFF = {
    "capturable": "the step is not captured in a CUDA graph",
    "differentiable": "no graph of the step is kept",
    "initial_accumulator_value": "state starts as zeros",
}
# They choose among implementations of the same update; swapio has its own.
_NO_EFFECT = ("foreach", "fused", "torch_adam")


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """What the state of an optimizer looks like, fixed when the engine is made.

    Attributes:
        kind: which update. `adam` with `decoupled_weight_decay` in a group steps that group as `adamw`.
        groups: the hyper-parameters at construction, one read-only mapping per param group, tensors turned into numbers.
            What a step uses are the *live* groups, since schedulers write into them.
        fields: names of the state tensors, all with one value per element, in the order in which they are stored:
            what any group needs, so that all chunks look alike.
        state_dtype: what the fields are stored as; see [Note: Stochastic rounding] and [Note: 8 bits].
    """

    kind: Kind
    groups: tuple[Group, ...]
    fields: tuple[str, ...]
    state_dtype: StateDtype = "fp32"

    @property
    def cut_numel(self) -> int:
        """Parameters start at multiples of this many elements, and they alone are stepped up to the next."""
        return SCALE_NUMEL if self.state_dtype == "int8" else CUT_NUMEL

    @property
    def rule(self) -> Rule:
        """What PyTorch's optimizer of this kind has."""
        return _RULES[self.kind]

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The optimizer that this spec steps like: `torch_class(params, **groups[0])` makes one."""
        return self.rule.torch_class

    @property
    def fused(self) -> bool:
        """PyTorch's fused kernel steps it, without temporaries; else its function for one tensor does (`foreach=False`)."""
        return self.kind in ("adamw", "adam", "sgd")


def state_fields(kind: Kind, group: Group) -> tuple[str, ...]:
    """Names of the state tensors that one group needs."""
    return tuple(name for name, setting in _RULES[kind].fields.items() if setting is None or group[setting])


def with_state_dtype(spec: OptimizerSpec, dtype: StateDtype, *, key: str) -> OptimizerSpec:
    """The same optimizer with its state stored as `dtype`.

    Args:
        key: of the config, which says so.

    Raises:
        ConfigError: a field that does not bear it.
    """
    for name in spec.fields if dtype != "fp32" else ():
        if name in _REFUSED_FIELDS or (dtype == "int8" and name in _REFUSED_8_BITS):
            why = _REFUSED_FIELDS.get(name) or _REFUSED_8_BITS[name]
            works = "fp32" if name in _REFUSED_FIELDS else "bf16"
            setting = spec.rule.fields[name]
            off = f", or leave {setting} off" if setting else ", or AdamW"
            raise ConfigError(
                f'{key}: "{dtype}" is not supported for {name!r} of {spec.torch_class.__name__}: {why}; use "{works}"{off}',
                key=key,
                value=dtype,
            )
    return dataclasses.replace(spec, state_dtype=dtype)


def from_torch(optimizer: torch.optim.Optimizer) -> tuple[OptimizerSpec, dict[Tensor, int]]:
    """The spec of a fresh optimizer of `torch.optim`, and the group index of each of its parameters.

    It may be AdamW, Adam, SGD, Adagrad, RMSprop, Adadelta, Adamax or RAdam. `foreach` and `fused` have no effect here. A
    learning rate may be a tensor of one element: it is read at each step.

    Raises:
        ConfigError: another optimizer or a subclass, `capturable`, `differentiable`, a state that would not start as zeros,
            or an optimizer that has stepped.
    """
    kind = next((kind for kind, rule in _RULES.items() if type(optimizer) is rule.torch_class), None)
    if kind is None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        why = REFUSED_OPTIMIZERS.get(type(optimizer).__name__.lower(), "its update is not known here")
        if isinstance(optimizer, tuple(rule.torch_class for rule in _RULES.values())):
            why = "a subclass may change the update"
        raise ConfigError(
            f"optimizer: {name} is not supported: {why}. The state is stepped in slices of flat tensors, which is exact only for "
            f"updates that treat each element alone; use one of torch.optim itself: {_NAMES}",
            key="optimizer",
            value=optimizer,
        )
    if any(state.get("step", 1) for state in optimizer.state.values() if state):  # Adagrad has made its state already
        raise ConfigError(
            f"optimizer: this {type(optimizer).__name__} has stepped before, and taking over its state is not supported yet; "
            "make a new one from the same parameters",
            key="optimizer",
            value=optimizer,
        )
    for index, group in enumerate(optimizer.param_groups):
        for key, why in _OFF.items():
            value = group.get(key)
            if value:
                dotted = f"optimizer.param_groups[{index}].{key}"
                raise ConfigError(f"{dotted}: {value} is not supported: {why}; use {key}={type(value)()}", key=dotted, value=value)
    groups = tuple(
        types.MappingProxyType({name: _plain(group[name]) for name in _RULES[kind].settings}) for group in optimizer.param_groups
    )
    needed = {name for group in groups for name in state_fields(kind, group)}
    return (
        OptimizerSpec(kind, groups, tuple(name for name in _RULES[kind].fields if name in needed)),
        {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]},
    )


def from_config(type_name: str, params: Mapping[str, Any]) -> OptimizerSpec:
    """The spec, with one group, of the section `optimizer` of a config in DeepSpeed's format.

    As there: names in any case; `Adam` means decoupled weight decay unless `adam_w_mode` is false; `weight_decay`
    is 0 when not given, for `AdamW` too (PyTorch: 0.01); other defaults are PyTorch's; a value `"auto"` counts as not given.

    Raises:
        ConfigError: unknown type or key, or a value that PyTorch refuses; with the dotted path.
    """
    given = {key: value for key, value in params.items() if not (isinstance(value, str) and value == "auto")}
    kind = next((kind for kind in _RULES if kind == type_name.lower()), None)
    if kind is None:
        why = REFUSED_OPTIMIZERS.get(type_name.lower(), "only updates that treat each element alone are exact when stepped in slices")
        raise ConfigError(
            f"optimizer.type: {type_name!r} is not supported: {why}; use one of {_NAMES}",
            key="optimizer.type",
            value=type_name,
        )
    options = [*_NO_EFFECT, *(("bias_correction", "adam_w_mode") if kind in ("adamw", "adam") else ())]
    known = [*_RULES["adamw" if kind == "adam" else kind].settings, *options]
    for key, value in given.items():
        if key not in known:
            dotted = f"optimizer.params.{key}"
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            hint = "use the top-level gradient_clipping" if key == "max_grad_norm" else f"did you mean {near!r}?"
            raise ConfigError(f"{dotted}: unknown for {type_name}; {hint}", key=dotted, value=value)
    if given.get("bias_correction", True) is not True:
        raise ConfigError(
            "optimizer.params.bias_correction: only true is supported",
            key="optimizer.params.bias_correction",
            value=given["bias_correction"],
        )
    if kind == "adam" and given.get("adam_w_mode", True):
        kind = "adamw"
    kwargs = {"weight_decay": 0.0, **{key: value for key, value in given.items() if key not in options}}
    try:
        optimizer = _RULES[kind].torch_class([torch.zeros(1)], **kwargs)
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"optimizer.params: {error}", key="optimizer.params", value=dict(params)) from error
    return from_torch(optimizer)[0]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value
