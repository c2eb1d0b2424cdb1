"""The code of a tutorial on DeepSpeed's memory optimization, as it is printed there, run by swapio.

Each example is completed only by what the text leaves out: a model, its data, and a directory that exists. Gradient checkpointing, the
tutorial's other example, is in tests/activation/test_tutorial.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapio as deepspeed

ZERO = """
import deepspeed

model = MyModel()  # your dl model
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

# DeepSpeed configuration for ZeRO
ds_config = {
 "train_batch_size": 8,
 "zero_optimization": {
    "stage": 2,   # adjust the stage of ZeRO here
    "allgather_partitions": True,
    "reduce_scatter": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": True,
    "contiguous_gradients": True
 }
}
# Initialize DeepSpeed
model_engine, optimizer, _, _ = deepspeed.initialize(
  model=model,
  optimizer=optimizer,
  config_params=ds_config
)

# Training loop
for batch in train_dataloader:
    loss = model_engine(batch)
model_engine.backward(loss)
model_engine.step()
"""

CPU_OFFLOAD = """
ds_config = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True
        },
        "offload_param": {
            "device": "cpu",
            "pin_memory": True
        }
    }
}
model_engine, optimizer, _, _ = deepspeed.initialize(
   model=model,
   optimizer=optimizer,
   config_params=ds_config
)
"""

NVME_OFFLOAD = """
ds_config = {
    "train_batch_size": 8,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme"
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme"
        }
    }
}
model_engine, optimizer, _, _ = deepspeed.init(
   model=model,
   optimizer=optimizer,
   config_params=ds_config
)
"""

TRAINING_LOOP = ZERO[ZERO.index("# Training loop") :]
MODEL = """
model = MyModel()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
"""
PRINTED = "loss = model_engine(batch)\nmodel_engine.backward(loss)\nmodel_engine.step()"
MEANT = "loss = model_engine(batch)\n    model_engine.backward(loss)\n    model_engine.step()"
"""The text has lost the indentation of two lines, so that only the last batch trains; a reader puts it back."""


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(batch) - batch.relu()).pow(2).mean()
        return loss


def left_out() -> dict[str, Any]:
    data = torch.randn(24, 32, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=8)  # type: ignore[arg-type]
    return {"torch": torch, "deepspeed": deepspeed, "MyModel": MyModel, "train_dataloader": loader}


def run(text: str) -> tuple[float, list[torch.Tensor]]:
    """The last loss and the weights after an example's training loop."""
    names = left_out()
    exec(text.replace("import deepspeed\n", ""), names)
    with names["model_engine"] as engine:
        assert names["optimizer"] is engine.optimizer
        return names["loss"].item(), [v.clone() for v in engine.module.state_dict().values()]


def plain(*, every_batch: bool) -> tuple[float, list[torch.Tensor]]:
    names = left_out()
    model = MyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    batches = list(names["train_dataloader"])
    loss = torch.zeros(())
    for batch in batches if every_batch else batches[-1:]:
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item(), list(model.state_dict().values())


def check(text: str) -> None:
    for printed in (True, False):
        loss, weights = run(text if printed else text.replace(PRINTED, MEANT))
        want_loss, want_weights = plain(every_batch=not printed)
        assert loss == want_loss
        assert all(torch.equal(a, b) for a, b in zip(weights, want_weights, strict=True))


def test_the_loop_is_meant_otherwise() -> None:
    assert PRINTED in TRAINING_LOOP
    assert plain(every_batch=True)[0] != plain(every_batch=False)[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int) -> None:
    assert '"stage": 2' in ZERO
    check(ZERO.replace('"stage": 2', f'"stage": {stage}'))


@pytest.mark.parametrize("stage", [2, 3])
def test_cpu_offload(stage: int) -> None:
    check(MODEL + CPU_OFFLOAD.replace('"stage": 2', f'"stage": {stage}') + TRAINING_LOOP)


@pytest.mark.parametrize("stage", [2, 3])
def test_nvme_offload(tmp_path: Path, stage: int) -> None:
    example = NVME_OFFLOAD.replace("/local_nvme", str(tmp_path)).replace('"stage": 2', f'"stage": {stage}')
    check(MODEL + example + TRAINING_LOOP)
    assert list(tmp_path.iterdir()) == [], "nothing is left on the drive"
