from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.config import Fp16Config, load_config
from swapio.engine._scaler import LossScaler
from swapio.errors import UsageError


def trace(scaler: LossScaler, steps: str) -> list[float]:
    """The scale after each step: `x` overflows, `.` does not."""
    scales = []
    for step in steps:
        scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


SEQUENCES: list[tuple[dict[str, Any], str, list[float]]] = [
    # the second overflow halves, and from then on each one
    ({}, "xxx.x", [16, 8, 4, 4, 2]),
    ({"hysteresis": 1}, "xx", [8, 4]),
    ({"hysteresis": 3}, "xxxx", [16, 16, 8, 4]),
    # a step without overflow does not start the count anew ...
    ({}, "x.x", [16, 16, 8]),
    # ... unless asked for
    ({"consecutive_hysteresis": True}, "x.xx.x", [16, 16, 16, 8, 8, 8]),
    # after a window of 3, the next good step doubles; so does each further window
    ({"loss_scale_window": 3}, "........", [16, 16, 16, 32, 32, 32, 64, 64]),
    ({"loss_scale_window": 1}, "....", [16, 32, 64, 128]),
    # an overflow starts the window anew, whether it halves or not
    ({"loss_scale_window": 3}, "..x....", [16, 16, 16, 16, 16, 16, 32]),
    # doubling starts the count of overflows anew
    ({"loss_scale_window": 2}, "xx...xx", [16, 8, 8, 8, 16, 16, 8]),
    # not below the minimum, which need not be a power of two
    ({"hysteresis": 1, "min_loss_scale": 5}, "xx", [8, 5]),
    ({"hysteresis": 1, "min_loss_scale": 0.25}, "xxxxxx", [8, 4, 2, 1, 0.5, 0.25]),
    # a fixed scale
    ({"loss_scale": 24}, "xx....x", [24] * 7),
]


@pytest.mark.parametrize(("settings", "steps", "scales"), SEQUENCES)
def test_the_scale_follows_the_trace_worked_out_by_hand(settings: dict[str, Any], steps: str, scales: list[float]) -> None:
    scaler = LossScaler(**{"initial_scale_power": 4, "loss_scale_window": 1000} | settings)
    assert scaler.scale == settings.get("loss_scale", 16)
    assert trace(scaler, steps) == scales
    assert scaler.dynamic == ("loss_scale" not in settings)


def test_an_overflow_at_the_minimum_is_an_error_and_changes_nothing() -> None:
    scaler = LossScaler(initial_scale_power=1, hysteresis=2)
    assert trace(scaler, "xx") == [2, 1]
    before = scaler.state_dict()
    for _ in range(2):
        with pytest.raises(UsageError, match=r"loss scale of 1, .*fp16\.min_loss_scale.*bf16"):
            scaler.update(True)
    assert scaler.state_dict() == before
    assert trace(LossScaler(initial_scale_power=0, hysteresis=2), "x") == [1]  # the first only counts


def test_defaults_are_deepspeeds() -> None:
    scaler = LossScaler.from_config(Fp16Config(enabled=True))
    assert (scaler.scale, scaler.dynamic) == (65536.0, True)
    assert trace(scaler, "x" + "." * 1001)[-2:] == [65536.0, 131072.0]
    assert trace(scaler, "xx") == [131072.0, 65536.0]


@pytest.mark.parametrize(("name", "value"), [("hysteresis", 1), ("loss_scale", 7.0), ("initial_scale_power", 2), ("min_loss_scale", 65536)])
def test_the_config_is_heeded(name: str, value: float) -> None:
    scaler = LossScaler.from_config(Fp16Config.model_validate({name: value}))
    plain = LossScaler(**{name: value})  # type: ignore[arg-type]
    assert scaler.__dict__ == plain.__dict__
    assert plain.__dict__ != LossScaler().__dict__
    assert load_config({"fp16": {"initial_scale_power": 5}}).fp16.initial_scale_power == 5


@given(st.text("x.", max_size=60), st.text("x.", max_size=30), st.booleans(), st.integers(1, 4), st.integers(1, 4))
def test_a_saved_state_goes_on_alike(before: str, after: str, consecutive: bool, window: int, hysteresis: int) -> None:
    settings: dict[str, Any] = {"loss_scale_window": window, "consecutive_hysteresis": consecutive, "hysteresis": hysteresis}
    scaler, resumed = (LossScaler(initial_scale_power=100, **settings) for _ in range(2))
    trace(scaler, before)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert trace(resumed, after) == trace(scaler, after)


def test_a_fixed_scale_stays_the_configs() -> None:
    scaler = LossScaler(loss_scale=8)
    scaler.load_state_dict(LossScaler(initial_scale_power=3).state_dict() | {"scale": 2.0})
    assert scaler.scale == 8
