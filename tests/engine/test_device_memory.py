"""`device_memory` as a dial: the more of it, the fewer uploads, and the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapio

NUM_BLOCKS = 6
BLOCK_NBYTES = 4 * (2 * 128 * 512 + 128 + 512)


def train(path: Path, device_memory: Any, place: str, timing: str) -> tuple[int, list[float]]:
    """Uploads in the last five steps, and losses."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(NUM_BLOCKS)))
    rest = {"device": place} | ({"nvme_path": str(path)} if place == "nvme" else {})
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": rest, "offload_optimizer": rest},
        "swapio": {"device": "simulated", "device_memory": device_memory, "host_memory": "64MiB", "optimizer_step": timing},
    }
    uploads, losses = [], []
    with swapio.initialize(model=model, config=config)[0] as engine:
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(1)).to(engine.device)
        for _ in range(8):
            before = engine.stats()["uploads"]
            loss = engine(x).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            uploads.append(engine.stats()["uploads"] - before)
            if device_memory is not None:
                assert engine.stats()["bytes_on_device"] <= device_memory
    return sum(uploads[3:]), losses


@pytest.mark.parametrize("timing", ["in_forward", "at_step"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_more_of_it_means_fewer_uploads(tmp_path: Path, place: str, timing: str) -> None:
    """Weights change on the host, so each comes once per step at least; what stays between forward and backward does not come again.

    Those of the next step may come before the end of one, so one turn more or less is counted.
    """
    _, losses = train(tmp_path, None, place, timing)
    for num_stay in (1, 2, 3, 4, NUM_BLOCKS):
        uploads, same = train(tmp_path, num_stay * BLOCK_NBYTES + 65536, place, timing)
        assert same == losses
        assert abs(uploads - 5 * (2 * NUM_BLOCKS - num_stay)) <= NUM_BLOCKS, (num_stay, uploads)
