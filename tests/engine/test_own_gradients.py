"""Everything in memory: autograd's own tensors are the gradients, and whoever looks at them or changes them sees no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import swapio
from swapio.zero._grads import LeasedGrads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(33, 65), nn.Linear(65, 7)
        self.turned = nn.Parameter(torch.randn(33, 33).t() * 0.1)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.second(self.first(x @ self.turned).tanh()).float().square().mean()
        return loss


def make(dtype: str) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(torch.bfloat16 if dtype == "bf16" else torch.float32)


def engine_of(dtype: str, clipping: float, place: str = "cpu") -> Any:
    config = {
        "train_batch_size": 4,
        "bf16": {"enabled": dtype == "bf16"},
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": place}, "offload_optimizer": {"device": place}},
        "swapio": {"device": "cpu"},
    }
    return swapio.initialize(model=make(dtype), config=config)[0]


def nothing(module: nn.Module) -> None:
    pass


def double(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            param.grad.mul_(2)


def replace(module: Any) -> None:
    module.first.weight.grad = torch.full_like(module.first.weight, 0.5)


def drop(module: Any) -> None:
    module.second.weight.grad = None


def clip(module: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)


def batch(step: int, dtype: str) -> torch.Tensor:
    x = torch.randn(4, 33, generator=torch.Generator().manual_seed(step))
    return x.to(torch.bfloat16 if dtype == "bf16" else torch.float32)


@pytest.mark.parametrize("clipping", [0.0, 0.05])
@pytest.mark.parametrize("change", [nothing, double, replace, drop, clip])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_same_as_copied(dtype: str, change: Callable[[Any], None], clipping: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for kept in (True, False):
        if not kept:
            monkeypatch.setattr(LeasedGrads, "keep", lambda *_: False)
        norms = []
        with engine_of(dtype, clipping) as engine:
            for step in range(3):
                engine.backward(engine(batch(step, dtype)))
                slots = [(u.grads, s) for u in engine.zero.units if u.grads for s in u.layout.slots if u.has_grad[s.index]]
                assert len(slots) == 5 and all((g.kept(s) is not None) == kept for g, s in slots)
                change(engine.module)
                engine.step()
                norms.append(engine.get_global_grad_norm())
            found.append([p.detach().clone() for p in engine.module.parameters()])
        found[-1].append(torch.tensor(norms))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_gradient_that_others_have_is_copied() -> None:
    with engine_of("fp32", 0.0) as engine:
        held: list[torch.Tensor] = []
        handle = engine.module.first.weight.register_hook(lambda g: held.append(g) or g.view(-1).view(g.shape))  # type: ignore[func-returns-value]
        engine.backward(engine(batch(0, "fp32")))
        handle.remove()
        seen = held[0].clone()
        engine.module.first.weight.grad.mul_(0)
        assert torch.equal(held[0], seen)
