"""Each schedule against its curve drawn another way: with `numpy.interp`, other identities, and numbers worked out by hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

import swapio
from swapio.engine._schedulers import scheduler_from_config
from swapio.errors import ConfigError

STEPS = 240


def adamw(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates or (0.5,)])


def curve(optimizer: torch.optim.Optimizer, scheduler: LRScheduler, key: str = "lr", group: int = 0, steps: int = STEPS) -> list[Any]:
    """What each of the next optimizer steps uses."""
    values = []
    for _ in range(steps):
        values.append(optimizer.param_groups[group][key])
        optimizer.step()
        scheduler.step()
    return values


def run(type_name: str, params: dict[str, Any], key: str = "lr") -> list[Any]:
    optimizer = adamw()
    return curve(optimizer, scheduler_from_config(optimizer, type_name, params), key)


def twice_first(shape: Callable[[int], float]) -> list[float]:
    """The warm-ups: index 0 comes with the second optimizer step."""
    return [shape(0), *(shape(index) for index in range(STEPS - 1))]


def test_lr_range_test() -> None:
    params = {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 7, "lr_range_test_step_rate": 3.0}
    slope = run("LRRangeTest", params)
    assert slope == pytest.approx(np.linspace(0.01, 0.01 + 0.03 * (STEPS - 1) / 7, STEPS))
    assert (slope[0], slope[7], slope[14]) == pytest.approx((0.01, 0.04, 0.07))
    stairs = run("LRRangeTest", params | {"lr_range_test_staircase": True})
    assert stairs == pytest.approx(np.repeat(0.01 + 0.03 * np.arange(STEPS), 7)[:STEPS])


def test_warmup_log() -> None:
    params = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.9, "warmup_num_steps": 64}
    rates = run("WarmupLR", params)
    assert rates == pytest.approx(twice_first(lambda index: 0.1 + 0.8 * min(1.0, math.log2(index + 1) / 6)))
    assert (rates[0], rates[1], rates[2], rates[4], rates[8], rates[64], rates[65]) == pytest.approx(
        (0.1, 0.1, 0.1 + 0.8 / 6, 0.1 + 1.6 / 6, 0.5, 0.9, 0.9)
    )


def test_warmup_linear_up_to_the_rate_of_each_group() -> None:
    optimizer = adamw(0.5, 0.2)
    params = {"warmup_num_steps": 50, "warmup_type": "linear"}
    scheduler = scheduler_from_config(optimizer, "warmuplr", params)
    first = curve(optimizer, scheduler)
    assert first == pytest.approx(twice_first(lambda index: float(np.interp(index, [0, 50], [0, 0.5]))))
    assert optimizer.param_groups[1]["lr"] == scheduler.get_last_lr()[1] == 0.2


def test_a_warmup_of_one_step_counts_as_two() -> None:
    assert run("WarmupLR", {"warmup_num_steps": 1})[:5] == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert run("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"})[:5] == [0.0, 0.0, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(("total", "end"), [(150, 150), (400, 400)])
def test_warmup_decay(total: int, end: int) -> None:
    params = {"total_num_steps": total, "warmup_num_steps": 30, "warmup_type": "linear", "warmup_min_lr": 0.01, "warmup_max_lr": 0.2}
    rates = run("WarmupDecayLR", params)
    assert rates == pytest.approx(twice_first(lambda index: float(np.interp(index, [0, 30, end], [0.01, 0.2, 0.01]))))


def test_a_decay_that_ends_before_its_warmup(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "swapio"):
        rates = run("WarmupDecayLR", {"total_num_steps": 20, "warmup_num_steps": 40, "warmup_type": "linear", "warmup_max_lr": 0.2})
    assert rates == pytest.approx([0.0] + [0.2 * index / 40 for index in range(40)] + [0.0] * (STEPS - 41))
    assert "total_num_steps 20 ends before warmup_num_steps 40" in caplog.text


@pytest.mark.parametrize("growth", ["log", "linear"])
def test_warmup_cosine(growth: str) -> None:
    params = {"total_num_steps": 200, "warmup_num_steps": 32, "warmup_min_ratio": 0.2, "cos_min_ratio": 0.1, "warmup_type": growth}

    def shape(index: int) -> float:
        if index < 32:
            return 0.2 + 0.8 * (math.log2(index + 1) / 5 if growth == "log" else index / 32)
        return 0.1 + 0.9 * math.cos(min(1.0, (index - 31) / 168) * math.pi / 2) ** 2

    rates = run("WarmupCosineLR", params)
    assert rates == pytest.approx([0.0] + [0.5 * shape(index) for index in range(STEPS - 1)])
    assert rates[200:] == pytest.approx([0.05] * 40)


def test_one_cycle() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 50, "cycle_second_step_size": 80}
    rates = run("OneCycle", params)
    assert rates == pytest.approx(np.interp(range(STEPS), [0, 50, 130], [0.01, 0.1, 0.01]))
    betas = run("OneCycle", params | {"cycle_min_mom": 0.6, "cycle_max_mom": 0.8}, "betas")
    assert {second for _, second in betas} == {0.99}
    expected = np.interp(range(STEPS), [0, 50, 130], [0.8, 0.6, 0.8])
    assert [first for first, _ in betas] == pytest.approx([0.6, *expected[1:]])


def test_one_cycle_decays_after_its_end() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 20, "decay_step_size": 10}
    rates = run("OneCycle", params | {"decay_lr_rate": 0.5})
    assert rates[40:] == pytest.approx([0.01 / (1 + 0.05 * step) for step in range(STEPS - 40)])
    assert (rates[60], rates[80]) == pytest.approx((0.005, 0.01 / 3))
    betas = run("OneCycle", params | {"cycle_max_mom": 0.5, "decay_mom_rate": 0.01}, "betas")
    assert [first for first, _ in betas[40:]] == pytest.approx(np.linspace(0.5, 0.5 + 0.0005 * (STEPS - 41), STEPS - 40))


def test_one_cycle_in_stairs() -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0, "cycle_first_step_size": 10, "cycle_first_stair_count": 5}
    up, down = [0, 0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0], [0.8, 0.8, 0.6, 0.6, 0.4, 0.4, 0.2, 0.2, 0, 0]
    assert run("OneCycle", params)[:22] == pytest.approx([*up, *down, 0])
    assert run("OneCycle", params | {"cycle_second_stair_count": 1})[10:22] == pytest.approx([1.0] + [0] * 11)
    assert run("OneCycle", params | {"cycle_second_stair_count": 0})[10:13] == pytest.approx([1.0, 0.9, 0.8])


def test_one_cycle_leaves_an_optimizer_without_betas_alone(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.7)
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 2}
    with caplog.at_level(logging.WARNING, "swapio"):
        rates = curve(optimizer, scheduler_from_config(optimizer, "OneCycle", params))
    assert rates[:5] == pytest.approx([0.01, 0.055, 0.1, 0.055, 0.01])
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert "SGD has no betas" in caplog.text


def test_a_momentum_that_reaches_one_is_an_error() -> None:
    params = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 1, "decay_step_size": 1, "decay_mom_rate": 0.1}
    with pytest.raises(ConfigError, match=r"decay_mom_rate: 0\.1 has brought the first beta to 1\.08 at step 3") as caught:
        run("OneCycle", params)
    assert caught.value.key == "scheduler.params.decay_mom_rate"


ALL: dict[str, dict[str, Any]] = {
    "LRRangeTest": {"lr_range_test_step_size": 9},
    "OneCycle": {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 30, "decay_step_size": 20, "decay_lr_rate": 1.0},
    "WarmupLR": {"warmup_num_steps": 50},
    "WarmupDecayLR": {"warmup_num_steps": 20, "total_num_steps": 90},
    "WarmupCosineLR": {"warmup_num_steps": 20, "total_num_steps": 90},
}


@pytest.mark.parametrize("type_name", ALL)
@pytest.mark.parametrize("how", ["state_dict", "params", "step"])
@pytest.mark.parametrize("at", [0, 1, 19, 61, 89])
def test_a_schedule_goes_on_where_it_was(type_name: str, how: str, at: int) -> None:
    optimizer = adamw(0.5, 0.2)
    whole = scheduler_from_config(optimizer, type_name, ALL[type_name])
    for _ in range(at + 1):
        optimizer.step()
        whole.step()
    assert whole.state_dict() == {"last_batch_iteration": at}
    again = adamw(0.5, 0.2)
    if how == "params":
        resumed = scheduler_from_config(again, type_name, ALL[type_name] | {"last_batch_iteration": at})
    else:
        resumed = scheduler_from_config(again, type_name, ALL[type_name])
        resumed.load_state_dict(whole.state_dict()) if how == "state_dict" else resumed.step(at)
    assert resumed.get_last_lr() == whole.get_last_lr() == [group["lr"] for group in again.param_groups] == resumed.get_lr()
    for group in (0, 1):
        for key in ("lr", "betas"):
            assert curve(again, resumed, key, group, 5) == curve(optimizer, whole, key, group, 5)


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)
    scheduler = scheduler_from_config(optimizer, "WarmupLR", {"warmup_num_steps": 10, "warmup_type": "linear", "warmup_max_lr": 1.0})
    scheduler.load_state_dict({"last_batch_iteration": 3})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(0.3)
    optimizer.step()
    scheduler.step()
    assert rate.item() == pytest.approx(0.4)


def test_rates_are_one_for_all_groups_or_one_for_each() -> None:
    optimizer = adamw(0.5, 0.2)
    scheduler_from_config(optimizer, "WarmupLR", {"warmup_min_lr": [0.1, 0.3], "warmup_max_lr": 1.0})
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    with pytest.raises(ConfigError, match=r"warmup_min_lr: 3 rates for 2 param groups") as caught:
        scheduler_from_config(optimizer, "WarmupLR", {"warmup_min_lr": [0.1, 0.3, 0.2]})
    assert caught.value.key == "scheduler.params.warmup_min_lr"


def test_what_the_config_would_refuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        scheduler_from_config(adamw(), "WarmupLRs", {})
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: missing"):
        scheduler_from_config(adamw(), "WarmupDecayLR", {"total_num_steps": "auto"})
    with pytest.raises(ConfigError, match=r"scheduler\.params\.warmup: not a setting"):
        scheduler_from_config(adamw(), "WarmupLR", {"warmup": 3})


def test_an_engine_steps_it() -> None:
    model = torch.nn.Linear(4, 4)
    engine, optimizer, _, scheduler = swapio.initialize(
        model=model,
        config={"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "swapio": {"device": "cpu"}},
        lr_scheduler=lambda optimizer: scheduler_from_config(optimizer, "LRRangeTest", {"lr_range_test_step_size": 1}),
    )
    with engine:
        before = model.bias.detach().clone()
        for rate in (0.001, 0.002, 0.003):
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
            engine.backward(engine(torch.ones(1, 4)).sum())
            engine.step()
        assert torch.allclose(model.bias, before - 0.006)
        assert scheduler.last_batch_iteration == 2
