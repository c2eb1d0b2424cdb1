"""Optimizer state in fewer bytes: the same bits wherever it rests, through a checkpoint too, and into other dtypes."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio import utils
from tests.checkpoint.work import engine_of, make, rest, same, settings, snapshot, train
from tests.ranks import launch

from .models import smallest_budget, with_budget

DTYPES = ("fp32", "bf16", "int8")


def own(dtype: str) -> dict[str, Any]:
    return {"swapio": {"timeout_s": 30, "device": "cpu", "optimizer_state_dtype": dtype}}


@pytest.mark.parametrize("weights", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_same_bits_wherever_it_rests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, weights: str) -> None:
    found = []
    for place, chunk_numel in (("none", 1 << 20), ("nvme", 2048), ("cpu", 4096)):
        monkeypatch.setattr("swapio.engine._initialize._CHUNK_NUMELS", (chunk_numel,))
        config = settings(tmp_path, params=place, state=place, dtype=weights, **own(dtype))
        if place == "nvme":
            config = with_budget(config, smallest_budget(make(), config))
        with swapio.initialize(model=make(), config=config)[0] as engine:
            found.append((train(engine, 0, 4), snapshot(engine), engine.memory()["optimizer"]))
    for losses, tensors, _ in found[1:]:
        assert losses == found[0][0]
        same(tensors, found[0][1])


@pytest.mark.parametrize("weights", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_a_run_goes_on(tmp_path: Path, dtype: str, weights: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with engine_of(tmp_path, state="nvme", dtype=weights, **own(dtype)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "saved")
        saved = snapshot(engine)
        want = train(engine, 3, 5), snapshot(engine), rest(engine)
    with engine_of(tmp_path, seed=5, state="none", dtype=weights, **own(dtype)) as engine:
        train(engine, 0, 1)
        engine.load_checkpoint(tmp_path / "saved")
        same(snapshot(engine), saved)
        assert train(engine, 3, 5) == want[0]
        same(snapshot(engine), want[1])
        assert rest(engine) == want[2]
    assert "converted" not in caplog.text


@pytest.mark.parametrize(("there", "here"), [p for p in itertools.product(DTYPES, repeat=2) if p[0] != p[1]])
def test_it_is_converted(tmp_path: Path, there: str, here: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with engine_of(tmp_path, **own(there)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "saved")
        saved = snapshot(engine)
    with engine_of(tmp_path, seed=5, **own(here)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert f"optimizer state of a run with {there}; it is converted to {here}" in caplog.text
        loaded = snapshot(engine)
        for name, value in saved.items():
            if not name.startswith("exp_avg") or not value.numel() or here == "fp32":
                assert torch.equal(loaded[name], value), name
            elif here == "bf16":
                assert torch.equal(loaded[name], value.bfloat16().float()), name
            else:
                root = name.startswith("exp_avg_sq")
                error = (loaded[name].sqrt() - value.sqrt() if root else loaded[name] - value).abs().max()
                most = value.abs().max().sqrt() if root else value.abs().max()
                assert error <= most * 1.01 / (510 if root else 254), name
        train(engine, 3, 4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_is_read_and_set(tmp_path: Path, dtype: str) -> None:
    with engine_of(tmp_path, **own(dtype)) as engine:
        train(engine, 0, 2)
        before = snapshot(engine)
        for name, param in engine.module.named_parameters():
            if param.numel() and not name.startswith("still"):
                for key in ("exp_avg", "exp_avg_sq"):
                    read: Any = utils.safe_get_full_optimizer_state(param, key)
                    utils.safe_set_full_optimizer_state(param, read, key)
        same(snapshot(engine), before)


@pytest.mark.parametrize(("state", "head"), [("nvme", 2), ("cpu", 4)])
def test_bytes(tmp_path: Path, state: str, head: int) -> None:
    """Masters are split where the state rests on NVMe."""
    found = {}
    for dtype in DTYPES:
        config = settings(tmp_path, state=state, dtype="bf16", scheduler=None, **own(dtype))
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(16)))
        config = with_budget(config, smallest_budget(model, config))
        with swapio.initialize(model=model, config=config)[0] as engine:
            found[dtype] = engine._stepper.state_nbytes() / 1024**2 - head
    assert found == {"fp32": 8, "bf16": 4, "int8": 2 + 2 / 16}  # 1 KiB of scales takes a page


def test_what_does_not_bear_it(tmp_path: Path) -> None:
    adagrad = {"type": "Adagrad", "params": {"lr": 1e-2}}
    with pytest.raises(swapio.ConfigError, match=r'swapio\.optimizer_state_dtype: "int8" .* Adagrad: .*; use "bf16", or AdamW'):
        engine_of(tmp_path, optimizer=adagrad, scheduler=None, **own("int8"))
    with pytest.raises(swapio.ConfigError, match=r"swapio\.optimizer_state_dtype"):
        engine_of(tmp_path, **own("fp8"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_any_number_of_ranks(tmp_path: Path, dtype: str) -> None:
    """What two ranks saved is the same state on one."""
    kept = launch.run("train_and_save_as", 2, str(tmp_path), str(tmp_path / "saved"), dtype, module="tests.checkpoint.work")
    with engine_of(tmp_path, seed=5, dtype="bf16", **own(dtype)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        same({k: v for k, v in snapshot(engine).items() if k != "weight seen"}, {k: v for k, v in kept[0].items() if k != "weight seen"})
