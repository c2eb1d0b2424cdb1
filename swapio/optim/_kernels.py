"""One optimizer update on flat fp32 tensors, by PyTorch's own fused kernels (CPU and CUDA)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import UsageError
from ._spec import Group, OptimizerSpec, state_fields
from ._split import BLOCK_NUMEL

__all__ = ["CUT_NUMEL", "first_nonfinite", "step_range"]

CUT_NUMEL = 64
"""Flat tensors may be cut at multiples of this many elements without a change of any bit: whole vectors of any CPU, so
that the kernels' scalar tails, which round differently, stay where they are."""


@torch.no_grad()
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
    """Update `master` and `fields` in place, bit-equal to `torch.optim` with `fused=True` on the same flat tensors.

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
        raise UsageError(
            f"a param group now needs the state {missing}, which was not laid out when the engine was made; set "
            f"{'momentum' if spec.kind == 'sgd' else 'amsgrad'} before that"
        )
    if master.numel() == 0:
        return
    scale = None if grad_scale is None else torch.full((), grad_scale, dtype=torch.float32, device=master.device)
    state = [[fields[name]] for name in names]
    lr, weight_decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group["maximize"])
    if spec.kind == "sgd":
        torch._fused_sgd_(
            [master],
            [grad],
            state[0] if state else [],
            weight_decay=weight_decay,
            momentum=float(group["momentum"]),
            lr=lr,
            dampening=float(group["dampening"]),
            nesterov=bool(group["nesterov"]),
            maximize=maximize,
            is_first_step=bool(state) and step == 1,  # the buffer becomes the gradient, without dampening
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
        state[2] if len(state) == 3 else [],
        [torch.full((), step, dtype=torch.float32, device=master.device)],
        lr=lr,
        beta1=float(beta1),
        beta2=float(beta2),
        weight_decay=weight_decay,
        eps=float(group["eps"]),
        amsgrad=bool(group["amsgrad"]),
        maximize=maximize,
        grad_scale=scale,
    )


@torch.no_grad()
def first_nonfinite(grads: Tensor) -> int | None:
    """Index of the first infinity or NaN in a flat tensor, `None` when all are finite.

    One read and no temporary when all are finite: neither survives a sum. On a GPU it waits for the result.
    """
    if math.isfinite(grads.sum().item()):
        return None
    for start in range(0, grads.numel(), BLOCK_NUMEL):  # or only the sum overflowed
        bad = torch.isfinite(grads[start : start + BLOCK_NUMEL]).logical_not_()
        if bad.any():
            return start + int(bad.to(torch.uint8).argmax())
    return None
