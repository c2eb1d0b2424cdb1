"""Checkpoints that DeepSpeed saved, and training that goes on from them. `deepspeed/make.py` made them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import swapio
from swapio.checkpoint import DeepSpeedStored

from .deepspeed.make import CASES, HERE, Net, batch, config
from .work import snapshot


def engine_of(path: Path, dtype: str, **zero: Any) -> Any:
    torch.manual_seed(5)
    settings = config(1, dtype) | {"swapio": {"device": "cpu"}}
    settings["zero_optimization"] |= zero
    net = Net()
    settings |= {"train_micro_batch_size_per_gpu": 8}
    return swapio.initialize(model=net, model_parameters=net.groups(), config=settings)[0]


@pytest.mark.parametrize(("stage", "dtype"), CASES)
def test_training_goes_on(tmp_path: Path, stage: int, dtype: str) -> None:
    """One rank, with both batches at once, wherever it rests: the losses that DeepSpeed had."""
    directory = HERE / f"stage{stage}_{dtype}"
    want = json.loads((directory / "losses.json").read_text())
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    with engine_of(tmp_path, dtype, offload_param=nvme, offload_optimizer=nvme) as engine:
        path, client_state = engine.load_checkpoint(directory)
        assert (path, client_state) == (str(directory / "global_step3"), {"epoch": 7})
        assert (engine.global_steps, engine.global_samples, engine.module.calls.item()) == (3, 24, 3)
        if dtype == "fp16":  # of three steps one overflowed
            assert (engine.skipped_steps, engine.loss_scale()) == (1, 2**15)
            assert {*engine._stepper.num_updates[engine.zero.units[0]]} == {2}
        found = snapshot(engine)
        losses = []
        for step in range(3, 6):
            loss = engine(torch.cat([batch(step, rank, dtype) for rank in range(2)]))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert losses == pytest.approx(want[3:], rel={"bf16": 2e-2, "fp16": 1e-3, "fp32": 1e-5}[dtype])
        engine.load_checkpoint(directory, load_module_only=True)
    assert not torch.equal(found["exp_avg last.weight"], torch.zeros(7, 13))
    torch.manual_seed(0)
    assert torch.equal(found["weight still.weight"], Net().still.weight.to(found["weight still.weight"].dtype))


def test_all_stages_say_the_same() -> None:
    """Of the same training in fp32, every tensor."""
    two, three = (DeepSpeedStored(HERE / f"stage{s}_fp32" / "global_step3") for s in (2, 3))
    assert two.shapes == three.shapes and two.dtypes == three.dtypes and len(two.shapes) == 12
    for name, shape in two.shapes.items():
        numel = torch.Size(shape).numel()
        a, b = (s._read(name, 0, numel, torch.float32) for s in (two, three))
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-8), name
        halves = [three._read(name, *part, torch.float32) for part in ((0, numel // 2), (numel // 2, numel))]
        assert torch.equal(torch.cat(halves), b)


def test_what_does_not_fit(tmp_path: Path) -> None:
    directory = HERE / "stage3_fp32"
    shutil.copytree(directory, tmp_path / "short")
    (tmp_path / "short" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    shutil.copytree(directory, tmp_path / "cut")
    cut = tmp_path / "cut" / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    cut.write_bytes(cut.read_bytes()[:-100])
    with engine_of(tmp_path, "fp32") as engine:
        before = snapshot(engine)
        with pytest.raises(swapio.StorageError, match=r"1 of the 2 files \*_optim_states\.pt are there"):
            engine.load_checkpoint(tmp_path / "short")
        with pytest.raises(swapio.StorageError, match=r"zero_pp_rank_1_mp_rank_00_optim_states\.pt.* it is damaged"):
            engine.load_checkpoint(tmp_path / "cut")
        assert all(torch.equal(t, before[n]) for n, t in snapshot(engine).items())
        with pytest.raises(swapio.UsageError, match="has no checkpoint 'other'; it has 'global_step3'"):
            engine.load_checkpoint(directory, "other")
    for path in (directory, directory / "global_step3"):
        with pytest.raises(swapio.UsageError, match=r"global_step3 is DeepSpeed's: load it with engine\.load_checkpoint"):
            swapio.get_fp32_state_dict(path)
    names = r"not in the checkpoint: 'bias', 'weight'; not in the model: 'calls', 'first\.bias'"
    other = swapio.initialize(model=torch.nn.Linear(2, 3), config={"swapio": {"device": "cpu"}})[0]
    with other, pytest.raises(swapio.UsageError, match=names):
        other.load_checkpoint(directory)
