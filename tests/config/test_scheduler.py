"""The section `scheduler`; what the types do is tested beside the engine."""

from __future__ import annotations

from typing import Any

import pytest

from swapio.config import load_config
from swapio.errors import ConfigError

ADAMW = {"type": "AdamW", "params": {"lr": 0.02}}


def test_params_are_completed() -> None:
    loaded = load_config({"scheduler": {"type": "warmupdecaylr", "params": {"total_num_steps": 50, "warmup_num_steps": "auto"}}})
    assert loaded.scheduler is not None
    assert loaded.scheduler.type == "WarmupDecayLR"
    assert loaded.scheduler.params == {
        "total_num_steps": 50, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000, "warmup_type": "log",
        "last_batch_iteration": -1,
    }  # fmt: skip
    assert loaded.sources["scheduler.params.total_num_steps"] == "given"
    assert loaded.sources["scheduler.params.warmup_num_steps"] == "default"
    assert load_config(loaded.resolved()).scheduler == loaded.scheduler


def test_the_full_rate_is_the_one_each_group_has() -> None:
    loaded = load_config({"optimizer": ADAMW, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}})
    assert loaded.scheduler is not None
    assert loaded.scheduler.params["warmup_max_lr"] is None
    assert load_config(loaded.resolved()).scheduler == loaded.scheduler


@pytest.mark.parametrize(("params", "noted"), [({}, True), ({"warmup_max_lr": 0.001}, False), ({"warmup_max_lr": [0.1, 0.2]}, False)])
def test_another_full_rate_than_the_optimizers_is_noted(params: dict[str, Any], noted: bool) -> None:
    section = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, **params}}
    assert any("not optimizer.params.lr 0.02" in note for note in load_config({"optimizer": ADAMW, "scheduler": section}).notes) == noted


@pytest.mark.parametrize("section", [{}, None, "auto", {"type": None, "params": None}])
def test_all_null_is_off(section: Any) -> None:
    assert load_config({"scheduler": section}).scheduler is None


@pytest.mark.parametrize(
    ("section", "key", "says"),
    [
        ({"params": {"warmup_num_steps": 3}}, "scheduler.type", "WarmupCosineLR"),
        ({"type": "WarmupLRR"}, "scheduler.type", 'did you mean "WarmupLR"'),
        ({"type": 3}, "scheduler.type", "3 is none"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "scheduler.params.warmup_steps", "'scheduler.params.warmup_num_steps'"),
        (
            {"type": "WarmupLR", "params": {"total_num_steps": 3}},
            "scheduler.params.total_num_steps",
            "scheduler.type; it has .*warmup_max_lr",
        ),
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps", "missing"),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}, "scheduler.params.total_num_steps", "missing"),
        ({"type": "OneCycle", "params": {"cycle_max_lr": 1.0}}, "scheduler.params.cycle_min_lr", "missing"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "scheduler.params.warmup_num_steps", "0"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 2.5}}, "scheduler.params.warmup_num_steps", "2.5"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cosine"}}, "scheduler.params.warmup_type", "'linear'"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": -1}}, "scheduler.params.warmup_max_lr", "got -1"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": []}}, "scheduler.params.warmup_max_lr", "for example 0.001"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, "x"]}}, "scheduler.params.warmup_max_lr", "for example 0.001"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": float("inf")}}, "scheduler.params.warmup_max_lr", "got inf"),
        ({"typ": "WarmupLR"}, "scheduler.typ", "'scheduler.type'"),
        ({"type": "WarmupLR", "params": 3}, "scheduler.params", "no section"),
    ],
)
def test_errors(section: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config({"scheduler": section})
    assert caught.value.key == key
