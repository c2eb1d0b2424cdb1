"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapio
from swapio import utils
from swapio.checkpoint import StretchWriter
from swapio.zero import Snapshot
from tests.ranks import launch

from .work import Gate, engine_of, load_and_train, same, snapshot, train


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Holds back what the background writes, until a change to something that is not saved waits for it."""
    gate = Gate(StretchWriter.write)
    hand_over = Snapshot._hand_over

    def opening(self: Snapshot, key: Any) -> None:
        if key in self._left:
            gate.open.set()
        hand_over(self, key)

    monkeypatch.setattr(StretchWriter, "write", lambda self, *args: gate.write(self, *args))
    monkeypatch.setattr(Snapshot, "_hand_over", opening)
    yield gate
    gate.open.set()


def loaded(path: Path, directory: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    with engine_of(path, seed=5, params="none", state="none", **kwargs) as engine:
        engine.load_checkpoint(directory)
        return snapshot(engine)


@pytest.mark.parametrize(
    ("params", "state", "dtype", "timing"),
    [
        ("none", "none", "fp32", "at_step"),
        ("none", "nvme", "fp16", "in_forward"),
        ("cpu", "nvme", "fp16", "at_step"),
        ("nvme", "nvme", "bf16", "in_forward"),
        ("nvme", "nvme", "fp32", "in_backward"),
        ("nvme", "none", "bf16", "in_backward"),
    ],
)
@pytest.mark.parametrize("num_written", [0, 3, None])
def test_it_is_of_the_step_at_which_it_was_asked_for(
    tmp_path: Path, gate: Gate, params: str, state: str, dtype: str, timing: str, num_written: int | None
) -> None:
    """However much of it was written when the next step begins; and the steps are as without it."""
    kwargs: dict[str, Any] = {"params": params, "state": state, "dtype": dtype, "timing": timing}
    with engine_of(tmp_path, **kwargs) as engine:
        train(engine, 0, 2)
        want = snapshot(engine)
        losses = train(engine, 2, 4)
        end = snapshot(engine)
    with engine_of(tmp_path, **kwargs) as engine:
        train(engine, 0, 2)
        gate.num_allowed = 1000 if num_written is None else num_written
        engine.save_checkpoint(tmp_path / "saved", async_save=True)
        if num_written is None:
            engine.zero.snapshot._thread.join(20)
            assert (tmp_path / "saved" / "latest").exists()
        else:
            assert gate.stuck.wait(20)
        assert train(engine, 2, 4) == losses
        same(snapshot(engine), end)
        engine.wait_for_checkpoint()
        assert engine.zero.snapshot is None
    same(loaded(tmp_path, tmp_path / "saved", dtype=dtype), want)


def test_close_and_the_next_save_and_load_wait_for_it(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        for step in range(3):
            train(engine, step, step + 1)
            engine.save_checkpoint(tmp_path / "saved", async_save=True, keep_last=2)
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.global_steps == 3
        want = snapshot(engine)
        engine.save_checkpoint(tmp_path / "saved", tag="last", async_save=True)
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {"global_step2", "global_step3", "last", "latest"}
    same(loaded(tmp_path, tmp_path / "saved"), want)


def test_set_while_it_is_written(tmp_path: Path, gate: Gate) -> None:
    with engine_of(tmp_path) as engine:
        train(engine, 0, 1)
        want = snapshot(engine)
        engine.save_checkpoint(tmp_path / "saved", async_save=True)
        for _, param in engine.module.named_parameters():
            if param.requires_grad and param.numel():
                utils.safe_set_full_fp32_param(param, torch.ones_like(param))
                utils.safe_set_full_optimizer_state(param, torch.ones_like(param), "exp_avg")
    same(loaded(tmp_path, tmp_path / "saved"), want)


@pytest.mark.parametrize("away", [True, False])
def test_written_past_the_engine_while_it_is_written(tmp_path: Path, gate: Gate, away: bool) -> None:
    with engine_of(tmp_path) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "first")
        engine.save_checkpoint(tmp_path / "saved", async_save=True)
        if away:
            engine.module.turned.data = torch.zeros(53, 7)
        else:
            with torch.no_grad():
                engine.module.turned.zero_()
        for unit in engine.zero.units:
            unit.settle()
        gate.open.set()
        engine.zero.snapshot._thread.join(20)
        with pytest.raises(swapio.UsageError, match=r"'turned' was written while .* call engine\.wait_for_checkpoint\(\) before"):
            train(engine, 1, 2)
        train(engine, 1, 2)
        assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.parametrize("when", ["step", "close"])
def test_what_fails_in_the_background_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    def full(self: StretchWriter, *_: Any) -> None:
        raise self._error(OSError(28, "full"), "a tensor", 5)

    engine = engine_of(tmp_path)
    train(engine, 0, 1)
    engine.save_checkpoint(tmp_path / "saved")
    before = snapshot(engine)
    buffers = [*engine.module.buffers()]
    monkeypatch.setattr("swapio.engine._save.buffers", lambda _: [])
    monkeypatch.setattr(StretchWriter, "write", full)
    engine.save_checkpoint(tmp_path / "saved", tag="b", async_save=True)
    if when == "step":
        engine.zero.snapshot._thread.join()
        with pytest.raises(swapio.StorageError, match="write of 'a tensor' failed: No space left"):
            train(engine, 1, 2)
        train(engine, 1, 2)
        engine.close()
    else:
        with pytest.raises(swapio.StorageError, match="write of 'a tensor' failed: No space left"):
            engine.close()
        assert type(engine.module.turned) is nn.Parameter and buffers
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {"global_step1", "latest"}
    monkeypatch.undo()
    same(loaded(tmp_path, tmp_path / "saved"), before)


def test_an_engine_that_is_dropped(tmp_path: Path, gate: Gate) -> None:
    engine = engine_of(tmp_path)
    gone = weakref.ref(engine)
    engine.save_checkpoint(tmp_path / "saved", async_save=True)
    thread = engine.zero.snapshot._thread
    gate.open.set()
    del engine
    gc.collect()
    thread.join(20)
    assert gone() is None and not thread.is_alive()
    assert list((tmp_path / "saved").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_on_two_ranks(tmp_path: Path, stage: int) -> None:
    path, directory = str(tmp_path), str(tmp_path / "saved")
    saved = launch.run("train_and_save", 2, path, directory, stage, "fp32", True, module="tests.checkpoint.work")
    ((state, losses, _),) = load_and_train(0, path, directory, [(0, "none", "none", "fp32")])
    same(state, saved[0][0])
    assert len(losses) == 3


def test_a_step_that_raises_what_failed_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever catches it and goes on has the same run: the step, the scheduler and the counters were left half-way."""
    kwargs: dict[str, Any] = {"gradient_accumulation_steps": 2, "params": "none", "state": "none"}
    with engine_of(tmp_path, **kwargs) as engine:
        train(engine, 0, 6)
        want = snapshot(engine), engine.get_lr(), engine.micro_steps, engine.global_steps

    def full(self: StretchWriter, *_: Any) -> None:
        raise self._error(OSError(28, "full"), "a tensor", 5)

    with engine_of(tmp_path, **kwargs) as engine:
        train(engine, 0, 2)
        monkeypatch.setattr("swapio.engine._save.buffers", lambda _: [])
        monkeypatch.setattr(StretchWriter, "write", full)
        engine.save_checkpoint(tmp_path / "saved", async_save=True)
        engine.zero.snapshot._thread.join()
        with pytest.raises(swapio.StorageError, match="No space left"):
            train(engine, 2, 4)
        train(engine, 4, 6)
        same(snapshot(engine), want[0])
        assert (engine.get_lr(), engine.micro_steps, engine.global_steps) == want[1:]


def fail_to_hand_over(monkeypatch: pytest.MonkeyPatch, gate: Gate, error: BaseException) -> None:
    """Let what is copied next, for a save in the background, fail; the save goes on then."""

    def fail(*_: Any) -> None:
        gate.open.set()
        raise error

    monkeypatch.setattr("swapio.zero._snapshot.copied", fail)


def test_what_a_step_cannot_hand_over(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised after the step, or to whoever waits for the end, who did so for ever."""
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved", async_save=True)
        assert gate.stuck.wait(20)
        fail_to_hand_over(monkeypatch, gate, swapio.BudgetError("no room"))
        with pytest.raises(swapio.BudgetError, match="no room"):
            train(engine, 0, 1)
            engine.wait_for_checkpoint()
        monkeypatch.undo()
        assert list((tmp_path / "saved").iterdir()) == []
        engine.save_checkpoint(tmp_path / "saved")
        want = snapshot(engine)
    same(loaded(tmp_path, tmp_path / "saved"), want)


def test_interrupted_while_it_is_waited_for(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread went on beside the next save."""
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved", async_save=True)
        assert gate.stuck.wait(20)
        fail_to_hand_over(monkeypatch, gate, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            engine.wait_for_checkpoint()
        monkeypatch.undo()
        assert engine.zero.snapshot is None and list((tmp_path / "saved").iterdir()) == []
        train(engine, 0, 1)


def test_in_another_directory(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint("saved", async_save=True)
        (tmp_path / "away").mkdir()
        monkeypatch.chdir(tmp_path / "away")
        gate.open.set()
        engine.wait_for_checkpoint()
    assert (tmp_path / "saved" / "latest").exists()
