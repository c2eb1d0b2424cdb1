from collections.abc import Callable
from typing import Any

import pytest
import torch

from swapio.errors import ConfigError
from swapio.optim import from_config, from_torch

ADAM = ("exp_avg", "exp_avg_sq")


def parameters(count: int = 2) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


@pytest.mark.parametrize(
    ("make", "kind", "fields"),
    [
        (lambda p: torch.optim.AdamW(p), "adamw", ADAM),
        (lambda p: torch.optim.Adam(p, fused=True), "adam", ADAM),
        (lambda p: torch.optim.Adam(p, amsgrad=True, foreach=True), "adam", (*ADAM, "max_exp_avg_sq")),
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd", ()),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "sgd", ("momentum_buffer",)),
        (lambda p: torch.optim.Adagrad(p), "adagrad", ("sum",)),
        (lambda p: torch.optim.RMSprop(p), "rmsprop", ("square_avg",)),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), "rmsprop", ("square_avg", "grad_avg", "momentum_buffer")),
        (lambda p: torch.optim.Adadelta(p), "adadelta", ("square_avg", "acc_delta")),
        (lambda p: torch.optim.Adamax(p), "adamax", ("exp_avg", "exp_inf")),
        (lambda p: torch.optim.RAdam(p), "radam", ADAM),
    ],
)
def test_kinds_and_fields(make: Callable[[Any], torch.optim.Optimizer], kind: str, fields: tuple[str, ...]) -> None:
    spec, _ = from_torch(make(parameters()))
    assert (spec.kind, spec.fields) == (kind, fields)


def test_groups_and_mapping() -> None:
    a, b, c = parameters(3)
    optimizer = torch.optim.AdamW(
        [{"params": [b], "weight_decay": 0.0, "amsgrad": True}, {"params": [a, c], "lr": torch.tensor(0.25)}], betas=(0.5, 0.75)
    )
    spec, group_of = from_torch(optimizer)
    assert (group_of[a], group_of[b], group_of[c]) == (1, 0, 1)
    assert spec.fields == (*ADAM, "max_exp_avg_sq")  # one group needs it, all chunks have it
    assert spec.groups[1] == {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
    assert type(spec.torch_class([a], **spec.groups[1])) is torch.optim.AdamW
    optimizer.param_groups[1]["lr"].fill_(1.0)
    assert spec.groups[1]["lr"] == 0.25


def test_fields_that_different_groups_need() -> None:
    a, b = parameters()
    spec, _ = from_torch(torch.optim.RMSprop([{"params": [a], "momentum": 0.9}, {"params": [b], "centered": True}]))
    assert spec.fields == ("square_avg", "grad_avg", "momentum_buffer")


class MyAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: MyAdamW(p), "MyAdamW is not supported: a subclass may change the update.*treat each element alone"),
        (lambda p: torch.optim.NAdam(p), "NAdam is not supported: it multiplies up one number per parameter"),
        (lambda p: torch.optim.Rprop(p), "Rprop is not supported: its step sizes do not start as zeros"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS is not supported: its update is not known"),
        (lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5), r"accumulator_value: 0.5 is not .*zeros; use .*_value=0"),
        (lambda p: torch.optim.AdamW(p, capturable=True), r"param_groups\[0\].capturable"),
        (lambda p: torch.optim.SGD(p, lr=0.1, differentiable=True), r"param_groups\[0\].differentiable"),
    ],
)
def test_refused(make: Callable[[Any], torch.optim.Optimizer], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_torch(make(parameters()))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad])
def test_an_optimizer_that_has_stepped_is_refused(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    optimizer = make(params := parameters(1))
    params[0].grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ConfigError, match="has stepped before"):
        from_torch(optimizer)


@pytest.mark.parametrize(
    ("name", "params", "kind", "expected"),
    [
        ("AdamW", {"lr": 0.1, "betas": [0.8, 0.9], "torch_adam": True}, "adamw", {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.0}),
        ("Adam", {"weight_decay": "auto", "eps": 1e-6}, "adamw", {"eps": 1e-6, "weight_decay": 0.0}),
        ("adam", {"adam_w_mode": False, "weight_decay": 0.1}, "adam", {"weight_decay": 0.1}),
        ("SGD", {"lr": 1, "momentum": 0.9, "nesterov": True}, "sgd", {"lr": 1, "momentum": 0.9, "nesterov": True, "dampening": 0}),
        ("Adagrad", {"initial_accumulator_value": 0, "foreach": True}, "adagrad", {"lr": 0.01, "eps": 1e-10, "weight_decay": 0.0}),
        ("rmsprop", {"centered": True}, "rmsprop", {"lr": 0.01, "alpha": 0.99, "centered": True, "momentum": 0}),
        ("Adadelta", {"rho": 0.8}, "adadelta", {"lr": 1.0, "rho": 0.8, "eps": 1e-6}),
        ("Adamax", {"betas": [0.8, 0.9]}, "adamax", {"lr": 2e-3, "betas": (0.8, 0.9)}),
        ("RAdam", {"decoupled_weight_decay": True}, "radam", {"lr": 1e-3, "decoupled_weight_decay": True}),
    ],
)
def test_from_config(name: str, params: dict[str, Any], kind: str, expected: dict[str, Any]) -> None:
    spec = from_config(name, params)
    assert spec.kind == kind
    assert {key: spec.groups[0][key] for key in expected} == expected


@pytest.mark.parametrize(
    ("name", "params", "key", "text"),
    [
        ("Lamb", {}, "optimizer.type", "Lamb"),
        ("ASGD", {}, "optimizer.type", "numbers per parameter"),
        ("RMSprop", {"betas": [0.9, 0.9]}, "optimizer.params.betas", "unknown for RMSprop"),
        ("Adam", {"decoupled_weight_decay": True}, "optimizer.params.decoupled_weight_decay", "unknown for Adam"),
        ("Adagrad", {"initial_accumulator_value": 0.1}, "optimizer.param_groups[0].initial_accumulator_value", "use .*=0"),
        ("AdamW", {"weight_deacy": 0.1}, "optimizer.params.weight_deacy", "did you mean 'weight_decay'"),
        ("SGD", {"betas": [0.9, 0.9]}, "optimizer.params.betas", "unknown for SGD"),
        ("AdamW", {"max_grad_norm": 1.0}, "optimizer.params.max_grad_norm", "gradient_clipping"),
        ("AdamW", {"bias_correction": False}, "optimizer.params.bias_correction", "only true"),
        ("AdamW", {"lr": -1.0}, "optimizer.params", "learning rate"),
        ("AdamW", {"lr": "fast"}, "optimizer.params", "str"),
        ("AdamW", {"betas": [0.9]}, "optimizer.params", "index"),
    ],
)
def test_from_config_refuses(name: str, params: dict[str, Any], key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        from_config(name, params)
    assert caught.value.key == key
