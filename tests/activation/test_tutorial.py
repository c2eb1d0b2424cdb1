"""A tutorial's example of gradient checkpointing runs as it is printed, completed by what it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapio as deepspeed

EXAMPLE = """
import torch
from torch.utils.checkpoint import checkpoint

def custom_forward(*inputs):
    return model(*inputs)

# Gradient checkpointing
outputs = checkpoint(custom_forward, input_data)
loss = criterion(outputs, labels)
loss.backward()
"""


def left_out(settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh()) for _ in range(3)))
    engine = deepspeed.initialize(model=model, config=settings)[0]
    data = torch.randn(4, 8, requires_grad=True)  # PyTorch's default needs an input with a gradient; ours does not
    return {"model": engine, "input_data": data, "criterion": nn.MSELoss(), "labels": torch.zeros(4, 8), "deepspeed": deepspeed}


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint. the use_reentrant parameter:UserWarning")
@pytest.mark.parametrize("ours", [False, True])
def test_the_example(tmp_path: Path, ours: bool) -> None:
    rest = {"device": "nvme", "nvme_path": str(tmp_path)}
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2, "offload_optimizer": rest, "offload_param": rest},
        "activation_checkpointing": {"cpu_checkpointing": False, "number_checkpoints": 2},
    }
    example = EXAMPLE
    if ours:
        example = example.replace("from torch.utils.checkpoint import checkpoint", "checkpoint = deepspeed.checkpointing.checkpoint")
        deepspeed.checkpointing.configure(None, deepspeed_config=settings)
    results = []
    for text in (example, example.replace("checkpoint(custom_forward, input_data)", "custom_forward(input_data)")):
        names = left_out(settings)
        if ours:
            names["input_data"].requires_grad_(False)
        torch.manual_seed(1)
        with names["model"] as engine:
            before = engine.module.state_dict()
            exec(text, names)
            engine.step()
            results.append([names["loss"].detach(), *(v.clone() for v in engine.module.state_dict().values())])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert all(not torch.equal(got, value) for got, value in zip(results[0][1:], before.values(), strict=True)), "nothing was trained"
