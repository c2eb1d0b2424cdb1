"""A model with everything that a checkpoint must keep, and what single processes do with it."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import swapio
from swapio import utils

Snapshot = dict[str, torch.Tensor]


class Net(nn.Module):
    """Dropout, buffers, frozen weights, strides and sizes of all kinds."""

    seen: torch.Tensor
    calls: torch.Tensor

    def __init__(self, *, freeze: bool = True, width: int = 97) -> None:
        super().__init__()
        self.first = nn.Linear(31, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2))
        self.still = nn.Linear(width, 53).requires_grad_(not freeze)
        self.turned = nn.Parameter(torch.randn(7, 53).t() * 0.1)
        self.pixels = nn.Parameter(torch.randn(2, 3, 5, 7).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.note = "new"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        self.seen.add_(x.detach().mean(0))
        self.calls.add_(1)
        x = self.still(x.tanh()) @ self.turned * self.scale
        loss: torch.Tensor = x.float().square().mean() + self.pixels.float().square().mean()
        return loss


class Tied(Net):
    """With a weight under two names; without what is no tensor."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.head = nn.Linear(31, 97, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(x) + self.head(x).float().square().mean()
        return loss


def make(seed: int = 0, **kwargs: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**kwargs)


def settings(
    path: Any, *, params: str = "nvme", state: str = "cpu", dtype: str = "fp32", stage: int = 3, timing: str = "auto", **more: Any
) -> dict[str, Any]:
    def place(device: str) -> dict[str, Any]:
        return {"device": device} | ({"nvme_path": str(path)} if device == "nvme" else {})

    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 22, "hysteresis": 1, "loss_scale_window": 2},
        "zero_optimization": {"stage": stage, "offload_param": place(params), "offload_optimizer": place(state)},
        "swapio": {"timeout_s": 30, "device": "cpu", "optimizer_step": timing},
    } | more


def engine_of(path: Any, *, seed: int = 0, model: nn.Module | None = None, **kwargs: Any) -> Any:
    return swapio.initialize(model=make(seed) if model is None else model, config=settings(path, **kwargs))[0]


def train(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step * engine.world_size + engine.global_rank)
        loss = engine(torch.randn(4, 31, generator=generator).to(engine.module.seen.dtype))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def snapshot(engine: Any) -> Snapshot:
    """All tensors, whole on every rank."""
    found = {f"weight {k}": v.clone() for k, v in engine.module.state_dict().items() if isinstance(v, torch.Tensor)}
    for name, param in engine.module.named_parameters():
        for key in ("master", "exp_avg", "exp_avg_sq"):
            read: Any = utils.safe_get_full_fp32_param(param) if key == "master" else utils.safe_get_full_optimizer_state(param, key)
            if read is not None:
                found[f"{key} {name}"] = read
    return found


def rest(engine: Any) -> list[Any]:
    """What is no tensor, and the numbers that each generator gives next."""
    return [
        engine.global_steps, engine.global_samples, engine.skipped_steps, engine.micro_steps, engine.loss_scale(), engine.get_lr(),
        list(engine._stepper.num_updates.values()), engine.module.note,
        torch.rand(1).item(), random.random(), float(np.random.rand()),
    ]  # fmt: skip


def same(a: Snapshot, b: Snapshot) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


# --- on several ranks ---


def train_and_save(
    rank: int, path: str, directory: str, stage: int, dtype: str, async_save: bool = False
) -> tuple[Snapshot, list[float], Snapshot]:
    """What was saved after three steps, and three steps more."""
    with engine_of(path, seed=rank, stage=stage, dtype=dtype, params="nvme", state="nvme") as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(directory, client_state={"epoch": 7}, async_save=async_save)
        saved = snapshot(engine)
        return saved, train(engine, 3, 6), snapshot(engine)


SHARED_ROWS = 12


def train_shared(
    rank: int, path: str, directory: str, num_ranks: int, first: int, last: int, places: list[tuple[int, str, str]]
) -> list[tuple[float, Snapshot]]:
    """Train on the same rows at any number of ranks, for each stage and pair of places: begun at step 0 and saved, else loaded."""
    results = []
    rows = SHARED_ROWS // num_ranks
    for stage, params, state in places:
        more: dict[str, Any] = {"train_micro_batch_size_per_gpu": rows}
        with engine_of(path, seed=rank, stage=stage, params=params, state=state, **more) as engine:
            engine.module.eval()  # dropout would depend on the rank
            if first:
                engine.load_checkpoint(directory)
            for step in range(first, last):
                batch = torch.randn(SHARED_ROWS, 31, generator=torch.Generator().manual_seed(step))
                loss = engine(batch[rank * rows : (rank + 1) * rows])
                engine.backward(loss)
                engine.step()
            if not first:
                engine.save_checkpoint(directory)
            results.append((engine.get_global_grad_norm(), snapshot(engine)))
    return results


def train_and_save_as(rank: int, path: str, directory: str, state_dtype: str) -> Snapshot:
    """What was saved after three steps at stage 3, with the optimizer's state in that dtype."""
    own = {"timeout_s": 30, "device": "cpu", "optimizer_state_dtype": state_dtype}
    with engine_of(path, seed=rank, stage=3, dtype="bf16", state="nvme", swapio=own) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(directory)
        return snapshot(engine)


def load_and_train(rank: int, path: str, directory: str, cases: list[tuple[int, str, str, str]]) -> list[Any]:
    """The same from the checkpoint, for each stage, pair of places and dtype."""
    results = []
    for stage, params, state, dtype in cases:
        with engine_of(path, seed=10 + rank, stage=stage, dtype=dtype, params=params, state=state) as engine:
            train(engine, 0, 1)
            _, client_state = engine.load_checkpoint(directory)
            assert client_state == {"epoch": 7}
            loaded = snapshot(engine)
            results.append((loaded, train(engine, 3, 6), snapshot(engine)))
    return results


def train_and_export(rank: int, path: str, out: str) -> None:
    """A checkpoint and the weights, into one folder."""
    with engine_of(path, stage=3) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(out)
        engine.save_16bit_model(out)


def fail_on_one_rank(rank: int, path: str, directory: str) -> list[str]:
    """What each rank is told of tags that differ, of a write that fails on rank 1, and of a file that is damaged."""
    told = []

    def fails(call: Callable[[], Any]) -> None:
        try:
            call()
        except (swapio.SwapioError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")

    with engine_of(path) as engine:
        train(engine, 0, 1)
        before = snapshot(engine)
        fails(lambda: engine.save_checkpoint(directory, tag=f"tag{rank}"))
        with torch.no_grad():
            weights = engine.module.first.weight
            if rank == 1:
                weights.add_(1)  # which one rank alone may not
        fails(lambda: engine.save_checkpoint(directory))
        engine.abandon()
    with engine_of(path) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(directory)
        if rank == 0:
            flip(Path(directory) / "global_step1" / "__1_0.distcp", -100)
        torch.distributed.barrier()
        fails(lambda: engine.load_checkpoint(directory))
        same(snapshot(engine), before)
        return told


def flip(path: Path, offset: int) -> None:
    """Change one bit of one byte."""
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


# --- killed ---


def die_at(path: str, directory: str, tag: str, moment: int) -> None:
    """Save a second checkpoint, which removes the first, and die at the `moment`-th thing that this does to the filesystem."""
    engine = engine_of(path, params="none", state="none")
    train(engine, 0, 1)
    engine.save_checkpoint(directory, tag=tag or None)
    train(engine, 1, 2)
    moments = 0

    def count(event: str = "", arguments: Any = ()) -> None:
        nonlocal moments
        if event in {"", "open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}:
            moments += not event or directory in str(arguments)
            if moments == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(descriptor: int, sync: Callable[[int], None] = os.fsync) -> None:
        count()
        sync(descriptor)
        count()

    os.fsync = counted  # type: ignore[assignment]
    sys.addaudithook(count)
    engine.save_checkpoint(directory, tag=tag or None, keep_last=1)
    os._exit(0)


def die_at_each_moment(path: str, directory: str, tag: str) -> None:
    """One child per moment, each with a folder of its own, until one lives to the end."""
    torch.set_num_threads(1)
    for moment in range(1, 200):
        child = os.fork()
        if not child:
            die_at(path, f"{directory}/{moment}", tag, moment)
        if not os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return
    raise AssertionError("no child lived")


def fill(path: str) -> None:
    """Save until the drive is full, then load what is there."""
    torch.set_num_threads(1)
    with engine_of(path, params="none", state="none") as engine:
        last = None
        for step in range(200):
            train(engine, step, step + 1)
            try:
                engine.save_checkpoint(path)
            except swapio.StorageError as error:
                assert "No space left" in str(error) and error.errno == 28, error
                break
            last = snapshot(engine), f"global_step{step + 1}"
        else:
            raise AssertionError("the drive is never full")
        assert last is not None
        assert not [p for p in Path(path).iterdir() if ".tmp-" in p.name]
        loaded, _ = engine.load_checkpoint(path)
        assert loaded == str(Path(path) / last[1])
        same(snapshot(engine), last[0])


class Gate:
    """Lets so many writes of a background thread through, then no more until it is open."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self.num_allowed = 0
        self.stuck = threading.Event()
        self.open = threading.Event()

    def write(self, writer: Any, *args: Any) -> None:
        if threading.current_thread().name == "swapio-snapshot":
            self.num_allowed -= 1
            if self.num_allowed < 0:
                self.stuck.set()
                self.open.wait(20)
        self._write(writer, *args)
