"""One optimizer update on flat fp32 tensors, by PyTorch's own kernels and functions (CPU and CUDA)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adamax import adamax
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop

from ..errors import UsageError
from ._grad import without_grad
from ._spec import Group, OptimizerSpec, state_fields
from ._split import BLOCK_NUMEL

__all__ = ["first_nonfinite", "step_range"]

_FUNCTIONS: dict[str, Callable[..., None]] = {
    "adadelta": adadelta, "adagrad": adagrad, "adamax": adamax, "radam": radam, "rmsprop": rmsprop,
}  # fmt: skip


@without_grad
def step_range(
    spec: OptimizerSpec,
    group: Group,
    *,
    master: Tensor,
    grad: Tensor,
    fields: Mapping[str, Tensor],
    step: int,
    grad_scale: float | None = None,
) -> None:
    """Update `master` and `fields` in place, bit-equal to `torch.optim` on the same flat tensors.

    That is with `fused=True` for AdamW, Adam and SGD, and with `foreach=False`, PyTorch's default on the CPU, for the others.

    Args:
        group: the live hyper-parameters; numbers are read now, so a tensor on a GPU waits for it.
        master: fp32 `[numel]`.
        grad: fp32 `[numel]`; overwritten with the unscaled gradient when `grad_scale` is given.
        fields: fp32 `[numel]` for each name in `spec.fields`, zeros before step 1.
        step: number of this update of these elements, from 1.
        grad_scale: the gradient is divided by it first (as by `torch.amp.GradScaler`).

    Raises:
        UsageError: the group was changed so that it needs state which was not laid out.
        ValueError: `step` below 1.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, got {step}")
    names = state_fields(spec.kind, group)
    missing = [name for name in names if name not in fields]
    if missing:
        settings = ", ".join(str(spec.rule.fields[name]) for name in missing)
        raise UsageError(
            f"a param group now needs the state {missing}, which was not laid out when the engine was made; set {settings} before that"
        )
    if master.numel() == 0:
        return
    scale = None if grad_scale is None else torch.full((), grad_scale, dtype=torch.float32, device=master.device)
    state = [[fields[name]] if name in names else [] for name in spec.rule.fields]
    if not spec.fused:
        if scale is not None:
            grad.div_(scale)
        numbers = {name: group[name] for name in spec.rule.settings if name not in ("lr", "betas", "initial_accumulator_value")}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = group["betas"]
        steps = [torch.tensor(step - 1, dtype=torch.float32)]  # the functions count it up
        _FUNCTIONS[spec.kind]([master], [grad], *state, steps, foreach=False, lr=float(group["lr"]), **numbers)
        return
    lr, weight_decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    if spec.kind == "sgd":
        torch._fused_sgd_(
            [master],
            [grad],
            state[0],
            weight_decay=weight_decay,
            momentum=float(group["momentum"]),
            lr=lr,
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            maximize=maximize,
            is_first_step=bool(state[0]) and step == 1,  # the buffer becomes the gradient, without dampening
            grad_scale=scale,
        )
        return
    decoupled = group.get("decoupled_weight_decay", spec.kind == "adamw")
    update = torch._fused_adamw_ if decoupled else torch._fused_adam_
    beta1, beta2 = group["betas"]
    update(
        [master],
        [grad],
        state[0],
        state[1],
        state[2],
        [_number(step, master.device)],
        lr=lr,
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=weight_decay,
        eps=float(group["eps"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=maximize,
        grad_scale=scale,
    )


@functools.lru_cache(maxsize=8)
def _number(step: int, device: torch.device) -> Tensor:
    """As the kernels take it; they do not change it."""
    return torch.full((), step, dtype=torch.float32, device=device)


@torch.no_grad()
def first_nonfinite(grads: Tensor) -> int | None:
    """Index of the first infinity or NaN in a flat tensor, `None` when all are finite.

    One read and no temporary when all are finite: the extremes tell, and NaN is both. A sum would do for fp32, but one of
    float16 overflows soon. On a GPU it waits for the result.
    """
    if grads.numel() == 0 or all(math.isfinite(extreme.item()) for extreme in torch.aminmax(grads)):
        return None
    blocks = ((start, grads[start : start + BLOCK_NUMEL].isfinite().logical_not_()) for start in range(0, grads.numel(), BLOCK_NUMEL))
    return next(start + int(bad.to(torch.uint8).argmax()) for start, bad in blocks if bad.any())
