import itertools
from typing import Any

import pytest
import torch

from swapio.errors import UsageError
from swapio.optim import first_nonfinite, from_torch, step_range

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "amsgrad": True, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-3, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "centered": True, "eps": 1e-3, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    (torch.optim.Adadelta, {"lr": 0.9}),
    (torch.optim.Adadelta, {"lr": 1.0, "rho": 0.8, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    (torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.RAdam, {"lr": 0.01, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
]
FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
@pytest.mark.parametrize("grad_scale", [None, 1024.0, 3.0])
@pytest.mark.parametrize("numel", [1, 64, 1009, 5000])
def test_same_bits_as_torch_when_cut(
    make: type[torch.optim.Optimizer], options: dict[str, Any], numel: int, grad_scale: float | None
) -> None:
    generator = torch.Generator().manual_seed(numel)
    parameter = torch.nn.Parameter(torch.randn(numel, generator=generator))
    implementation: dict[str, Any] = {"fused": True} if make in FUSED else {"foreach": False}
    optimizer = make([parameter], **implementation, **options)
    spec, _ = from_torch(optimizer)
    assert spec.fused == (make in FUSED)
    master = parameter.detach().clone()
    fields = {name: torch.zeros(numel) for name in spec.fields}
    group = optimizer.param_groups[0]
    for step in range(1, 9):  # RAdam is another one from the sixth on
        group["lr"] *= 0.9  # a scheduler
        grad = torch.randn(numel, generator=generator)
        parameter.grad = grad.clone()
        if grad_scale is not None and not spec.fused:
            parameter.grad.div_(grad_scale)
        elif grad_scale is not None:
            optimizer.grad_scale = torch.tensor(grad_scale)  # type: ignore[attr-defined]
        optimizer.step()
        cuts = sorted({0, 64 % numel, 64 * (numel // 150), numel})
        for start, stop in itertools.pairwise(cuts):
            part = slice(start, stop)
            step_range(
                spec,
                group,
                master=master[part],
                grad=grad[part],
                fields={k: v[part] for k, v in fields.items()},
                step=step,
                grad_scale=grad_scale,
            )
    assert torch.equal(master, parameter.detach())
    for name in spec.fields:
        assert torch.equal(fields[name], optimizer.state[parameter][name])


def test_tensor_hyper_parameters_equal_numbers() -> None:
    results = []
    for convert in (float, torch.tensor):
        spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
        group = {**spec.groups[0], "lr": convert(0.125)}
        master, fields = torch.ones(64), {name: torch.zeros(64) for name in spec.fields}
        step_range(spec, group, master=master, grad=torch.ones(64), fields=fields, step=1)
        results.append(master)
    assert torch.equal(*results)


def test_decoupled_decay_of_a_plain_adam() -> None:
    parameter = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.Adam([parameter], weight_decay=0.1, decoupled_weight_decay=True, fused=True)
    spec, _ = from_torch(optimizer)
    master, fields = torch.ones(64), {name: torch.zeros(64) for name in spec.fields}
    parameter.grad = torch.ones(64)
    optimizer.step()
    step_range(spec, spec.groups[0], master=master, grad=torch.ones(64), fields=fields, step=1)
    assert torch.equal(master, parameter.detach())


def test_numel_0() -> None:
    spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
    empty = torch.zeros(0)
    step_range(spec, spec.groups[0], master=empty, grad=empty, fields=dict.fromkeys(spec.fields, empty), step=1)
    assert empty.numel() == 0


def test_misuse() -> None:
    spec, _ = from_torch(torch.optim.SGD([torch.zeros(1)], lr=0.1))
    one = torch.zeros(64)
    with pytest.raises(UsageError, match=r"momentum_buffer.*set momentum before"):
        step_range(spec, {**spec.groups[0], "momentum": 0.9}, master=one, grad=one, fields={}, step=2)
    spec, _ = from_torch(torch.optim.RMSprop([torch.zeros(1)]))
    with pytest.raises(UsageError, match=r"grad_avg.*momentum_buffer.*set centered, momentum before"):
        step_range(spec, {**spec.groups[0], "momentum": 0.9, "centered": True}, master=one, grad=one, fields={"square_avg": one}, step=2)
    with pytest.raises(ValueError, match="from 1"):
        step_range(spec, spec.groups[0], master=one, grad=one, fields={}, step=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 17, 300_000])
def test_first_nonfinite(dtype: torch.dtype, numel: int) -> None:
    grads = torch.ones(numel, dtype=dtype)
    assert first_nonfinite(grads) is None
    assert first_nonfinite(grads[:0]) is None
    grads.fill_(torch.finfo(dtype).max)  # their sum is infinite
    assert first_nonfinite(grads) is None
    for bad in (torch.inf, -torch.inf, torch.nan):
        grads[-1] = bad
        assert first_nonfinite(grads) == numel - 1
    grads[0] = -torch.inf
    assert first_nonfinite(grads) == 0
