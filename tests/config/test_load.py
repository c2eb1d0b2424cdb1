from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.config import batch_triple, load_config
from swapio.errors import ConfigError


def test_the_tutorials_config_loads() -> None:
    loaded = load_config(
        {
            "train_batch_size": 8,
            "zero_optimization": {
                "stage": 2,
                "allgather_partitions": True,
                "reduce_scatter": True,
                "allgather_bucket_size": 5e8,
                "overlap_comm": True,
                "contiguous_gradients": True,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
                "offload_param": {"device": "cpu", "pin_memory": True},
            },
        }
    )
    assert loaded.train_micro_batch_size_per_gpu == 8
    assert loaded.zero_optimization.offload_optimizer is not None
    assert loaded.zero_optimization.offload_optimizer.paths == ["/local_nvme"]
    assert "zero_optimization.overlap_comm" in loaded.accepted_without_effect
    assert loaded.sources["train_micro_batch_size_per_gpu"] == "inferred"
    assert loaded.resolved()["swapio"]["host_memory"] == "auto"


@pytest.mark.parametrize(
    ("config", "key", "says"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "zero_optimization"),
        ({"zero_optimization": {"stagee": 3}}, "zero_optimization.stagee", "stage"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "4"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param", "nvme_path"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "zero_optimization.offload_param.device", "nvme"),
        ({"swapio": {"host_memry": 1}}, "swapio.host_memry", "host_memory"),
        ({"swapio": {"host_memory": True}}, "swapio.host_memory", "1GiB"),
        ({"swapio": {"timeout_s": 0}}, "swapio.timeout_s", "0"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "not supported yet"),
        ({"fp16": {"enabled": True}}, "fp16", "not supported yet"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "not supported yet"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "not supported yet"),
        ({"aio": {"block_size": 1000}}, "aio.block_size", "4096"),
        ({"train_batch_size": "8"}, "train_batch_size", "whole number"),
        ({"optimizer": {"typ": "AdamW"}}, "optimizer", "type"),
    ],
)
def test_errors_name_the_key(config: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(config)
    assert str(caught.value).startswith(key)


def test_off_values_are_accepted() -> None:
    loaded = load_config({"gradient_clipping": 0.0, "fp16": {"enabled": False, "loss_scale": 0}, "wandb": {"enabled": False, "project": "x"}})
    assert set(loaded.accepted_without_effect) == {"gradient_clipping", "fp16", "wandb"}


def test_old_spellings_map() -> None:
    loaded = load_config({"bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True, "prefetch_bucket_size": 5}})
    assert loaded.bf16.enabled
    assert loaded.zero_optimization.offload_optimizer is not None
    assert loaded.zero_optimization.offload_optimizer.device == "cpu"
    assert "cpu_offload" in loaded.sources["zero_optimization.offload_optimizer"]
    with pytest.raises(ConfigError, match="given too"):
        load_config({"bfloat16": {}, "bf16": {}})


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"train_batch_size": 4, "bf16": {"enabled": "auto"}}))
    assert load_config(path).train_batch_size == 4
    path.write_text('{"a": 1,\n "b" 2}')
    with pytest.raises(ConfigError, match="line 2"):
        load_config(str(path))
    path.write_text('{"bf16": {"enabled": true, "enabled": false}}')
    with pytest.raises(ConfigError, match="twice"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.json")


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sets(st.sampled_from(["total", "micro", "steps"])),
)
def test_batch_triple_infers_what_is_missing(micro: int, steps: int, world: int, hidden: set[str]) -> None:
    total = micro * steps * world
    shown = [None if name in hidden else value for name, value in (("total", total), ("micro", micro), ("steps", steps))]
    got = batch_triple(*shown, world_size=world)
    assert got[0] == got[1] * got[2] * world
    for have, want in zip(got, shown, strict=True):
        assert want in (None, have)
    if len(hidden) <= 1:
        assert got == (total, micro, steps)


def test_a_contradiction_shows_all_values() -> None:
    with pytest.raises(ConfigError, match=r"train_batch_size=10.*per_gpu=2.*steps=2.*world size 2"):
        batch_triple(10, 2, 2, world_size=2)
    with pytest.raises(ConfigError, match="evenly"):
        batch_triple(7, 2, None)
