"""A block with dropout, and what a call of it leaves behind, to compare to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

DIM = 16


class Block(nn.Module):
    """Counts its runs."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.drop = nn.Dropout(0.5)
        self.down = nn.Linear(4 * dim, dim)
        self.num_runs = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.num_runs += 1
        out: torch.Tensor = x + self.down(self.drop(torch.tanh(self.up(x)))) * scale
        return out


def leave(call: Callable[[nn.Module, torch.Tensor], Any], make: Callable[[], nn.Module] = Block) -> dict[str, torch.Tensor]:
    """Outputs, gradients and the random state after one forward and backward of `call(module, x)`."""
    torch.manual_seed(0)
    module = make()
    x = torch.randn(3, DIM, requires_grad=True)
    out = call(module, x * 1)  # not a leaf, as in a model
    outputs = [out] if isinstance(out, torch.Tensor) else [o for o in out if o is not None]
    sum(((o * o).sum() for o in outputs), torch.zeros(())).backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"x": x.grad, "random": torch.get_rng_state(), **grads} | {f"output {i}": o for i, o in enumerate(outputs)}


def check_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name


@contextmanager
def kept() -> Iterator[list[torch.Tensor]]:
    """What is given to the saved-tensor hooks meanwhile: outside of checkpointed calls all that autograd saves, else the kept inputs."""
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield seen
