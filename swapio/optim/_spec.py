"""Which optimizers are stepped, with which hyper-parameters and which state per element."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["Group", "OptimizerSpec", "from_config", "from_torch", "state_fields"]

Kind = Literal["adamw", "adam", "sgd"]
Group = Mapping[str, Any]
"""Hyper-parameters of one param group, by PyTorch's names; `optimizer.param_groups[i]` is one."""

_CLASSES: dict[Kind, type[torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay")
_SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
# They choose among implementations of the same update; swapio has its own.
_NO_EFFECT = ("foreach", "fused", "torch_adam")


@dataclasses.dataclass(frozen=True)
class OptimizerSpec:
    """What the state of an optimizer looks like, fixed when the engine is made.

    Attributes:
        kind: which update. `adam` with `decoupled_weight_decay` in a group steps that group as `adamw`.
        groups: the hyper-parameters at construction, one read-only mapping per param group, tensors turned into numbers.
            What a step uses are the *live* groups, since schedulers write into them.
        fields: names of the state tensors, all fp32 with one value per element, in the order in which they are stored:
            what any group needs, so that all chunks look alike.
    """

    kind: Kind
    groups: tuple[Group, ...]
    fields: tuple[str, ...]

    @property
    def torch_class(self) -> type[torch.optim.Optimizer]:
        """The optimizer that this spec steps like: `torch_class(params, **groups[0])` makes one."""
        return _CLASSES[self.kind]


def state_fields(kind: Kind, group: Group) -> tuple[str, ...]:
    """Names of the state tensors that one group needs."""
    if kind == "sgd":
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def from_torch(optimizer: torch.optim.Optimizer) -> tuple[OptimizerSpec, dict[Tensor, int]]:
    """The spec of a fresh `torch.optim.AdamW`, `Adam` or `SGD`, and the group index of each of its parameters.

    `foreach` and `fused` have no effect here. A learning rate may be a tensor of one element: it is read at each step.

    Raises:
        ConfigError: another optimizer or a subclass, `capturable`, `differentiable`, or an optimizer that has stepped.
    """
    kind = next((kind for kind, known in _CLASSES.items() if type(optimizer) is known), None)
    if kind is None:
        name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        why = "a subclass may change the update" if isinstance(optimizer, tuple(_CLASSES.values())) else "its update is not known here"
        raise ConfigError(
            f"optimizer: {name} is not supported: {why}. The state is stepped in slices of flat tensors, which is exact only for "
            "updates that treat each element alone; use torch.optim.AdamW, Adam or SGD themselves",
            key="optimizer",
            value=optimizer,
        )
    if any(optimizer.state.values()):
        raise ConfigError(
            f"optimizer: this {type(optimizer).__name__} has stepped before, and taking over its state is not supported yet; "
            "make a new one from the same parameters",
            key="optimizer",
            value=optimizer,
        )
    for index, group in enumerate(optimizer.param_groups):
        for key, why in (("capturable", "the step is not captured in a CUDA graph"), ("differentiable", "no graph of the step is kept")):
            if group.get(key):
                dotted = f"optimizer.param_groups[{index}].{key}"
                raise ConfigError(f"{dotted}: True is not supported: {why}; use {key}=False", key=dotted, value=True)
    names = _SGD if kind == "sgd" else _ADAM[:-1] if kind == "adamw" else _ADAM
    groups = tuple(
        types.MappingProxyType({name: _plain(group[name]) for name in names if name in group}) for group in optimizer.param_groups
    )
    needed = max((state_fields(kind, group) for group in groups), key=len)  # each is a prefix of the longest
    return (
        OptimizerSpec(kind, groups, needed),
        {parameter: index for index, group in enumerate(optimizer.param_groups) for parameter in group["params"]},
    )


def from_config(type_name: str, params: Mapping[str, Any]) -> OptimizerSpec:
    """The spec, with one group, of the section `optimizer` of a config in DeepSpeed's format.

    As there: names in any case; `Adam` means decoupled weight decay unless `adam_w_mode` is false; `weight_decay`
    is 0 when not given, for `AdamW` too (PyTorch: 0.01); a value `"auto"` counts as not given.

    Raises:
        ConfigError: unknown type or key, or a value that PyTorch refuses; with the dotted path.
    """
    given = {key: value for key, value in params.items() if not (isinstance(value, str) and value == "auto")}
    kind = next((kind for kind in _CLASSES if kind == type_name.lower()), None)
    if kind is None:
        raise ConfigError(
            f"optimizer.type: {type_name!r} is not supported: only updates that treat each element alone are exact when the state is "
            'stepped in slices; use "AdamW", "Adam" or "SGD"',
            key="optimizer.type",
            value=type_name,
        )
    options = dict.fromkeys(_NO_EFFECT)
    if kind != "sgd":
        options.update(bias_correction=None, adam_w_mode=None)
    known = [*(_SGD if kind == "sgd" else _ADAM[:-1]), *options]
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
        return from_torch(_CLASSES[kind]([torch.zeros(1)], **kwargs))[0]
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"optimizer.params: {error}", key="optimizer.params", value=dict(params)) from error


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_plain, value)) if isinstance(value, (tuple, list)) else value
