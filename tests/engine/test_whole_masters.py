"""State that stays in memory keeps whole fp32 masters beside bfloat16 weights; the bits are those of split ones."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from swapio import utils
from swapio.engine._budget import HostPlan
from swapio.zero import Kept
from tests.checkpoint.work import engine_of, rest, same, snapshot, train


def whole(monkeypatch: pytest.MonkeyPatch, choose: Any) -> None:
    monkeypatch.setattr(
        HostPlan, "resident", lambda *_: {k for k in (Kept("state", u, c) for u in range(40) for c in range(40)) if choose(k)}
    )


def everything(item: Kept) -> bool:
    return True


def mixed(item: Kept) -> bool:
    return zlib.crc32(repr(item).encode()) % 2 == 0


@pytest.mark.parametrize("choose", [everything, mixed])
def test_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choose: Any) -> None:
    monkeypatch.setattr("swapio.engine._initialize._CHUNK_NUMELS", (2048,))
    with engine_of(tmp_path, dtype="bf16") as engine:
        train(engine, 0, 2)
        with torch.no_grad():
            engine.module.first.bias.fill_(0.3)
        train(engine, 2, 3)
        engine.save_checkpoint(tmp_path / "saved")
        want = snapshot(engine), train(engine, 3, 5), snapshot(engine), rest(engine)
    whole(monkeypatch, choose)
    with engine_of(tmp_path, dtype="bf16") as engine:
        layouts = [c.layout for chunks in engine._stepper.chunks.values() for c in chunks]
        assert any(not c.split for c in layouts)
        train(engine, 0, 2)
        with torch.no_grad():
            engine.module.first.bias.fill_(0.3)
        train(engine, 2, 3)
        same(snapshot(engine), want[0])
        assert train(engine, 3, 5) == want[1]
        same(snapshot(engine), want[2])
    with engine_of(tmp_path, dtype="bf16", seed=5) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        same(snapshot(engine), want[0])
        assert train(engine, 3, 5) == want[1]
        assert rest(engine) == want[3]


def test_masters_are_read_and_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch, mixed)
    with engine_of(tmp_path, dtype="bf16") as engine:
        train(engine, 0, 1)
        for name, param in engine.module.named_parameters():
            if param.numel() and not name.startswith("still"):
                value = torch.randn(param.shape, generator=torch.Generator().manual_seed(1))
                utils.safe_set_full_fp32_param(param, value)
                got: Any = utils.safe_get_full_fp32_param(param)
                assert torch.equal(got, value)
                assert torch.equal(param, (value.view(torch.int32) | 1).view(torch.float32).bfloat16())
