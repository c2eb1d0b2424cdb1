from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import swapio


def test_nothing_given() -> None:
    parser = argparse.ArgumentParser()
    assert swapio.add_config_arguments(parser) is parser
    args = parser.parse_args([])
    assert (args.deepspeed, args.deepspeed_config) == (False, None)


@pytest.mark.parametrize("name", ["deepspeed", "deepscale"])
def test_a_scripts_own_arguments_stay(name: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    args = swapio.add_config_arguments(parser).parse_args(["--epochs", "3", f"--{name}", f"--{name}_config", "c.json"])
    assert (args.epochs, args.deepspeed, args.deepspeed_config) == (3, True, "c.json")


def test_initialize_finds_the_config(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"train_batch_size": 6, "optimizer": {"type": "SGD"}, "swapio": {"device": "cpu"}}')
    args = swapio.add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed_config", str(tmp_path / "c.json")])
    engine, _, _, _ = swapio.initialize(args, torch.nn.Linear(2, 2))
    with engine:
        assert engine.config.train_batch_size == 6
