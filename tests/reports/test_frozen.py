"""Frozen weights, adapters and recomputation: no state, no gradient and no write for what is not trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import swapio
from tests.engine.models import check_same, config, train, train_plain, values

from .compare import DIM, PLACES, both_devices, layers, managed, mean_square, rows, same_as_pytorch

RANK = 8


class Adapted(nn.Module):
    """A frozen linear layer with a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, RANK, bias=False)
        self.up = nn.Linear(RANK, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.relu(self.base(x) + self.up(self.down(x)))
        return out


def adapted(count: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(count)))


def head_only() -> nn.Sequential:
    """Three frozen units and a trained one."""
    model = layers(count=4)
    model[:3].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("place", "how"), [(place, "plain") for place in PLACES] + [(PLACES[4], "reentrant"), (PLACES[4], "not reentrant")]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters(tmp_path: Path, place: tuple[str, str, str], how: str, dtype: str) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        x = rows(step).to(model[0].down.weight.dtype).requires_grad_(how == "reentrant")
        for block in model:
            x = block(x) if how == "plain" else checkpoint(block, x, use_reentrant=how == "reentrant")
        return x.float().pow(2).mean()

    same_as_pytorch(tmp_path, adapted, fn, place=place, dtype=dtype)


def test_frozen_weights_have_no_state_and_no_gradient(tmp_path: Path) -> None:
    with managed(tmp_path, adapted()) as engine:
        engine.backward(mean_square(engine, 0))
        stats = engine.stats()
        trained = 2 * DIM * RANK
        assert stats["gradient_bytes"] == 3 * 4 * trained
        assert [unit["trained_numel"] for unit in engine.describe_units()] == [trained] * 3
        weights = sum(unit["nbytes"] for unit in engine.describe_units())
        assert stats["bytes_on_nvme"] == weights + 3 * (2 + 1) * 4 * trained  # moments, and gradients that wait
        for name, param in engine.module.named_parameters():
            assert (param.grad is None) == ("base" in name)


@both_devices
def test_frozen_units_are_never_written(tmp_path: Path, place: tuple[str, str, str]) -> None:
    with managed(tmp_path, head_only(), place=place) as engine:
        engine.manager.flush().wait()
        before = engine.stats()["bytes_written"]
        got = train(engine, mean_square, steps=3)
        engine.manager.flush().wait()
        last = engine.describe_units()[-1]["nbytes"]
        assert 0 < engine.stats()["bytes_written"] - before <= 3 * 4 * last, "what the head has, in each step"
    check_same(got, train_plain(head_only(), mean_square, steps=3))


def test_frozen_weights_beside_trained_ones_are_not_written(tmp_path: Path) -> None:
    with managed(tmp_path, adapted()) as engine:
        engine.manager.flush().wait()
        before = engine.stats()["bytes_written"]
        train(engine, mean_square, steps=3)
        engine.manager.flush().wait()
        trained = sum(4 * unit["trained_numel"] for unit in engine.describe_units())
        assert engine.stats()["bytes_written"] - before <= 3 * 4 * trained  # weights, two moments, and gradients that wait


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_from_a_gradient(tmp_path: Path, reentrant: bool) -> None:
    """Of a tensor that is no scalar, several times."""
    plain = adapted()
    with managed(tmp_path, adapted()) as engine:
        models: list[Any] = [engine.module, plain]
        for step in range(3):
            for model in models:
                x = rows(step).requires_grad_()
                for block in model:
                    x = checkpoint(block, x, use_reentrant=reentrant)
                x.backward(gradient=torch.full_like(x, 0.25))  # type: ignore[no-untyped-call]
        for param, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert (param.grad is None) == (want.grad is None)
            assert want.grad is None or torch.equal(param.grad, want.grad)  # type: ignore[arg-type]


@both_devices
def test_adapters_are_merged_into_frozen_weights(tmp_path: Path, place: tuple[str, str, str]) -> None:
    """The edit is there at once, in a state_dict, after more training, and after the end."""

    def merge(model: Any) -> None:
        for block in model:
            block.base.weight.data += block.up.weight.detach() @ block.down.weight.detach()
            with torch.no_grad():
                block.up.weight.zero_()

    plain, model = adapted(), adapted()
    train_plain(plain, mean_square, steps=2)
    merge(plain)
    with managed(tmp_path, model, place=place, extra=200_000) as engine:
        train(engine, mean_square, steps=2)
        with torch.no_grad():
            before = engine(rows(9))
            merge(model)
            torch.testing.assert_close(engine(rows(9)), before)
        check_same(([], values(model)), ([], values(plain)))
        engine.backward(mean_square(engine, 5))
        engine.zero_grad()
    check_same(([], values(model)), ([], values(plain)))


def test_quantised_and_half_precision_weights_may_be_frozen(tmp_path: Path) -> None:
    class Quantised(Adapted):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.randint(0, 255, (DIM, DIM), dtype=torch.uint8), requires_grad=False)
            self.scale = nn.Parameter(torch.rand(DIM, dtype=torch.float16), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x @ ((self.codes.float() - 127) / 255 * self.scale.float()))

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(Quantised(), Quantised())

    def fn(model: Any, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(rows(step)).pow(2).mean()
        return loss

    same_as_pytorch(tmp_path, make, fn)


def test_freezing_on_the_way(tmp_path: Path) -> None:
    """Frozen after `initialize`, a parameter rests; thawed, it goes on."""
    plain = layers()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    with managed(tmp_path, layers()) as engine:
        for step in range(5):
            for model in (engine.module, plain):
                model[1].requires_grad_(step not in (1, 2))  # type: ignore[index, union-attr, operator]
                mean_square(model, step).backward()  # type: ignore[no-untyped-call]
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        check_same(([], values(engine.module)), ([], values(plain)))


def test_stepping_a_frozen_model_says_that_it_is_frozen(tmp_path: Path) -> None:
    with (
        swapio.initialize(model=layers().requires_grad_(False), config=config(tmp_path))[0] as engine,
        pytest.raises(swapio.UsageError, match=r"requires_grad|frozen|requires a gradient"),
    ):
        engine.step()
