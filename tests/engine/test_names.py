"""DeepSpeed's names, as scripts use them."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import swapio as deepspeed

from . import models
from .models import check_same, config, make, train, train_plain


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield monkeypatch
    if dist.is_initialized():
        dist.destroy_process_group()


def test_alone_is_a_group_of_one(no_group: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deepspeed.init_distributed(timeout=datetime.timedelta(seconds=30))
    deepspeed.init_distributed(dist_backend="gloo")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 1, "nccl" if torch.cuda.is_available() else "gloo")
    with deepspeed.initialize(model=make(), config=config(tmp_path))[0] as engine:
        check_same(train(engine), train_plain(make()))


@pytest.mark.parametrize("required", [None, False, True])
def test_initialize_joins_where_it_is_asked(no_group: pytest.MonkeyPatch, tmp_path: Path, required: bool | None) -> None:
    with deepspeed.initialize(model=make(), config=config(tmp_path), dist_init_required=required)[0]:
        assert dist.is_initialized() is (required is True)


def test_ranks_need_numbers(no_group: pytest.MonkeyPatch, tmp_path: Path) -> None:
    no_group.setenv("WORLD_SIZE", "2")
    with pytest.raises(deepspeed.ConfigError, match=r"RANK: not set of 2 ranks .*torchrun --nproc-per-node=2"):
        deepspeed.initialize(model=make(), config=config(tmp_path))
    no_group.setenv("RANK", "2")
    with pytest.raises(deepspeed.ConfigError, match="RANK: 2 of 2 ranks"):
        deepspeed.init_distributed()
    deepspeed.init_distributed(dist_init_required=False)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_backend_that_is_not_there(no_group: pytest.MonkeyPatch) -> None:
    with pytest.raises(deepspeed.ConfigError, match="dist_backend: 'nccl' needs CUDA; use \"gloo\""):
        deepspeed.init_distributed("nccl")


def test_adams_by_their_names(tmp_path: Path) -> None:
    settings = config(tmp_path)
    del settings["optimizer"]
    adams = (deepspeed.ops.adam.DeepSpeedCPUAdam, deepspeed.ops.adam.FusedAdam)
    for adam in adams:
        model = make()
        optimizer = adam(model.parameters(), lr=1e-2, weight_decay=0.1)
        with deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0] as engine:
            check_same(train(engine), train_plain(make()))
        with pytest.raises(deepspeed.ConfigError, match="bias_correction: False"):
            adam(model.parameters(), bias_correction=False)
    params = [torch.nn.Parameter(torch.ones(1))]
    assert type(adams[0](params, adamw_mode=False)) is torch.optim.Adam
    assert type(adams[1](params, adam_w_mode=False)) is torch.optim.Adam


def test_memory_is_told_when_it_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "swapio"):
        deepspeed.runtime.utils.see_memory_usage("before")
        deepspeed.runtime.utils.see_memory_usage("after", force=True)
    assert [r.message.split(" | ")[0] for r in caplog.records] == ["after"]
    assert "resident" in caplog.text


@pytest.mark.parametrize(("stage", "name"), [(3, "zero3"), (2, "zero2")])
def test_the_estimate_is_what_initialize_needs(tmp_path: Path, stage: int, name: str) -> None:
    place = deepspeed.runtime.zero.stage3 if stage == 3 else deepspeed.runtime.zero.stage_1_and_2
    estimate = getattr(place, f"estimate_{name}_model_states_mem_needs_all_live")
    for each in estimate(make()):
        settings = config(tmp_path, params=each.offload_param, state=each.offload_optimizer)
        settings["zero_optimization"]["stage"] = stage
        assert each.host_nbytes == models.smallest_budget(make(), settings)
        assert each.fast_nbytes >= each.host_nbytes
    nbytes = 4 * sum(p.numel() for p in make().parameters())
    assert nbytes * 3 <= each.drive_nbytes < nbytes * 3 * 1.5
    shared = estimate(make(), num_gpus_per_node=1, num_nodes=4)[-1]
    assert shared.drive_nbytes < each.drive_nbytes


def test_batch_sizes_change(tmp_path: Path) -> None:
    with deepspeed.initialize(model=make(), config=config(tmp_path))[0] as engine:
        engine.set_train_batch_size(6)
        assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6, 3)
        applied = []
        for step in range(6):
            engine.backward(engine(*models.batch(step)))
            engine.step()
            applied.append(engine.was_step_applied())
        assert applied == [False, False, True] * 2
        engine.set_train_micro_batch_size(1)
        assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (3, 1)
        engine.set_train_micro_batch_size(2)
        for wrong in (5, 0):
            with pytest.raises(deepspeed.ConfigError, match=f"train_batch_size: {wrong} is no multiple"):
                engine.set_train_batch_size(wrong)
        with pytest.raises(deepspeed.ConfigError, match="micro_batch_size_per_gpu: 0"):
            engine.set_train_micro_batch_size(0)


def test_16_bit_gradients_are_not_accumulated_unasked(tmp_path: Path) -> None:
    with deepspeed.initialize(model=make(), config=config(tmp_path, dtype="bf16"))[0] as engine:
        engine.set_train_batch_size(2)
        with pytest.raises(deepspeed.UsageError, match="gradient_accumulation_steps of 2 or more"):
            engine.set_train_batch_size(4)


def test_states_go_and_come(tmp_path: Path) -> None:
    settings = models.with_budget(config(tmp_path), models.smallest_budget(make(), config(tmp_path)) + 2 * models.largest_unit(make()))
    with deepspeed.initialize(model=make(), config=settings)[0] as engine:
        train(engine, steps=1)
        engine.offload_states()
        assert not any(unit.attached for unit in engine.zero.units)
        engine.reload_states()
        with engine.coalesce_grad_reduction():
            engine.backward(engine(*models.batch(1)))
        engine.step()
        assert engine.checkpoint_engine is None
    with deepspeed.initialize(model=make(), config=config(tmp_path, state="none", device="simulated"))[0] as engine:
        with pytest.raises(deepspeed.UsageError, match=r'zero_optimization.offload_optimizer.device is "none"'):
            engine.offload_states()
        engine.abandon()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's own, while it compiles
def test_compiled_units_train_the_same(tmp_path: Path) -> None:
    compiled: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    with deepspeed.initialize(model=make(), config=config(tmp_path))[0] as engine:
        engine.compile(backend=backend)
        check_same(train(engine), train_plain(make()))
    assert compiled


def test_train_and_eval_reach_the_module(tmp_path: Path) -> None:
    with deepspeed.initialize(model=make(), config=config(tmp_path))[0] as engine:
        engine.eval()
        assert not engine.training and not any(m.training for m in engine.module.modules())
        assert engine.train() is engine
        assert all(m.training for m in engine.module.modules())
