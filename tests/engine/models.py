"""Small models, their plain PyTorch training loops, and the same through the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import swapio
from swapio.optim import round_bf16

VOCAB, SEQ, DIM = 128, 32, 64
LossFn = Callable[[Any, int], torch.Tensor]


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.ln2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 4 * dim)
        self.fc2 = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, dim = x.shape
        q, k, v = (t.view(batch, seq, 4, dim // 4).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(dim, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, seq, dim))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, *, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, DIM)
        self.wpe = nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(layers))
        self.ln = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.ln(x)).float().flatten(0, 1), targets.flatten())

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, targets)


def make(seed: int = 0, **kwargs: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**kwargs)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def plain_loss(model: Any, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(*batch(step))
    return loss


def config(
    path: Any, *, params: str = "nvme", state: str = "nvme", dtype: str = "fp32", optimizer: Any = None, **own: Any
) -> dict[str, Any]:
    return {
        "train_batch_size": 2,
        "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": params} | ({"nvme_path": str(path)} if params == "nvme" else {}),
            "offload_optimizer": {"device": state} | ({"nvme_path": str(path)} if state == "nvme" else {}),
        },
        "swapio": {"timeout_s": 30, "device": "cpu"} | own,
    }


def with_budget(settings: dict[str, Any], nbytes: int) -> dict[str, Any]:
    settings = copy.deepcopy(settings)
    settings["swapio"]["host_memory"] = nbytes
    return settings


def smallest_budget(model: nn.Module, settings: dict[str, Any], optimizer: Any = None) -> int:
    """What the engine says it needs when it is given too little. `optimizer` makes one from a model."""
    model = copy.deepcopy(model)
    given = optimizer(model) if optimizer is not None else None
    try:
        swapio.initialize(model=model, optimizer=given, config=with_budget(settings, 4096))
    except swapio.BudgetError as error:
        assert error.works_nbytes is not None
        return error.works_nbytes
    raise AssertionError("a page of memory was accepted")


def largest_unit(model: nn.Module) -> int:
    return sum(p.numel() * 4 + 256 for p in Block(DIM).parameters())


def train_plain(model: Any, fn: LossFn = plain_loss, steps: int = 5) -> tuple[list[float], list[torch.Tensor]]:
    """fp32, `torch.optim.AdamW(fused=True)` on the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        loss = fn(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, values(model)


def train_plain_bf16(model: Any, fn: LossFn = plain_loss, steps: int = 5) -> tuple[list[float], list[torch.Tensor]]:
    """bf16 weights with fp32 masters by hand; weights are rounded as the split rounds them."""
    masters = [p.detach().clone() for p in model.parameters()]
    for p, master in zip(model.parameters(), masters, strict=True):
        p.data = round_bf16(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        loss = fn(model, step)
        loss.backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        optimizer.step()
        for p, master in zip(model.parameters(), masters, strict=True):
            p.data.copy_(round_bf16(master))
        losses.append(loss.item())
    return losses, values(model)


def train(engine: Any, fn: LossFn = plain_loss, steps: int = 5) -> tuple[list[float], list[torch.Tensor]]:
    losses = []
    for step in range(steps):
        loss = fn(engine.module, step)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses, values(engine.module)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [v.clone() for v in model.state_dict().values()]


def check_same(got: tuple[list[float], list[torch.Tensor]], want: tuple[list[float], list[torch.Tensor]]) -> None:
    assert got[0] == want[0]
    for a, b in zip(got[1], want[1], strict=True):
        assert torch.equal(a, b)
