"""Settings as users of other engines get them wrong, through `initialize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import swapio
from tests.engine.models import check_same, config, train, train_plain

from .compare import layers, mean_square


def test_auto_counts_as_not_given(tmp_path: Path) -> None:
    settings = config(tmp_path) | {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    settings["bf16"] = {"enabled": "auto"}
    settings["zero_optimization"] |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    settings["optimizer"]["params"] |= {"betas": "auto", "eps": "auto"}
    with swapio.initialize(model=layers(), config=settings)[0] as engine:
        assert engine.config.train_micro_batch_size_per_gpu == 2
        check_same(train(engine, mean_square), train_plain(layers(), mean_square))


def test_the_world_that_was_seen_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for sizes in ({"train_batch_size": 6}, {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}):
        with pytest.raises(swapio.ConfigError, match=rf"train_batch_size.?{sizes['train_batch_size']}.* world size 4 \(WORLD_SIZE\)"):
            swapio.initialize(model=layers(), config=config(tmp_path) | sizes)


def test_what_is_in_force_can_be_read(tmp_path: Path) -> None:
    """Every value, and for each where it came from; what is given and changes nothing is listed with the reason."""
    settings = config(tmp_path)
    settings["zero_optimization"] |= {"overlap_comm": True, "stage3_max_live_parameters": 10}
    settings["zero_optimization"]["offload_param"]["pin_memory"] = False
    with swapio.initialize(model=layers(), config=settings)[0] as engine:
        resolved = json.loads(json.dumps(engine.config.resolved()))
        assert resolved["optimizer"]["params"]["lr"] == 1e-2
        assert resolved["gradient_accumulation_steps"] == 1
        sources = engine.config.sources
        assert sources["optimizer.params.lr"] == "given"
        assert sources["optimizer.params.eps"] == "default"
        assert sources["train_micro_batch_size_per_gpu"].startswith("inferred from train_batch_size")
        assert set(engine.config.accepted_without_effect) == {
            "zero_optimization.overlap_comm",
            "zero_optimization.stage3_max_live_parameters",
            "zero_optimization.offload_param.pin_memory",
        }


def test_features_that_are_not_there_stop_initialize(tmp_path: Path) -> None:
    """Each is refused before the model is touched; nobody trains for hours without what he asked for."""
    for given in ({"bf16": {"bf16_optimizer_states": True}}, {"checkpoint": {"load_universal": True}}):
        model = layers()
        with pytest.raises(swapio.ConfigError, match="not supported"):
            swapio.initialize(model=model, config=config(tmp_path) | given)
        train_plain(model, mean_square, steps=1)


def test_nvme_without_a_directory_is_refused_with_an_example() -> None:
    settings = {"zero_optimization": {"offload_param": {"device": "nvme"}}}
    with pytest.raises(swapio.ConfigError, match=r'offload_param\.nvme_path: .*"nvme_path": "/mnt/nvme0"$'):
        swapio.initialize(model=layers(), config=settings)
