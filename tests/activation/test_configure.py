"""`configure` takes DeepSpeed's arguments and config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio as deepspeed
from swapio import ConfigError
from swapio.activation._configure import current
from swapio.memory import SimulatedDevice

SECTION = {
    "partition_activations": False, "contiguous_memory_optimization": True, "cpu_checkpointing": True, "number_checkpoints": 4,
    "synchronize_checkpoint_boundary": True, "profile": True,
}  # fmt: skip


def in_force() -> tuple[int | None, bool]:
    return current().number_checkpoints, current().offload is not None


def test_it_works_without() -> None:
    assert not deepspeed.checkpointing.is_configured()
    assert in_force() == (None, False)
    deepspeed.checkpointing.reset()
    deepspeed.checkpointing.configure()
    assert deepspeed.checkpointing.is_configured()
    assert in_force() == (None, False)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_config_in_deepspeeds_format(tmp_path: Path, as_file: bool) -> None:
    config: Any = {"train_batch_size": 2, "activation_checkpointing": SECTION}
    if as_file:
        (tmp_path / "ds.json").write_text(json.dumps(config))
        config = tmp_path / "ds.json"
    deepspeed.checkpointing.configure(None, deepspeed_config=config, device=SimulatedDevice())
    assert in_force() == (4, True)


def test_arguments_count_more_than_the_config() -> None:
    config = {"activation_checkpointing": SECTION}
    deepspeed.checkpointing.configure(None, config, False, True, 2, False, True, True)
    assert in_force() == (2, False)
    deepspeed.checkpointing.configure(None, config, checkpoint_in_cpu=None, num_checkpoints=None, device=SimulatedDevice())
    assert in_force() == (4, True)


def test_reset_keeps_what_was_configured() -> None:
    deepspeed.checkpointing.configure(num_checkpoints=3, checkpoint_in_cpu=True, device=SimulatedDevice())
    deepspeed.checkpointing.reset()
    assert deepspeed.checkpointing.is_configured()
    assert in_force() == (3, True)


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        ({"mpu_": object()}, "mpu_", "leave it out"),
        ({"num_checkpoints": 0}, "activation_checkpointing.number_checkpoints", "greater than or equal to 1"),
        ({"num_checkpoints": "all"}, "activation_checkpointing.number_checkpoints", "'all'"),
        ({"checkpoint_in_cpu": 1}, "activation_checkpointing.cpu_checkpointing", "valid boolean"),
        ({"deepspeed_config": {"activation_checkpointing": {"cpu": 1}}}, "activation_checkpointing.cpu", "did you mean"),
        ({"checkpoint_in_cpu": True, "device": "abacus"}, "device", "'abacus'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_an_error_and_changes_nothing(arguments: dict[str, Any], key: str, says: str) -> None:
    deepspeed.checkpointing.configure(num_checkpoints=7)
    with pytest.raises(ConfigError, match=says) as caught:
        deepspeed.checkpointing.configure(**arguments)
    assert caught.value.key == key
    assert in_force() == (7, False)


def test_initialize_reads_the_section() -> None:
    config = {"train_batch_size": 2, "activation_checkpointing": {"number_checkpoints": 2}, "swapio": {"device": "cpu"}}
    with deepspeed.initialize(model=torch.nn.Linear(2, 2), config=config)[0]:
        assert in_force() == (2, False)
