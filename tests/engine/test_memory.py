"""`engine.memory()`: bytes by kind and tier."""

from __future__ import annotations

from pathlib import Path

import pytest

import swapio

from .models import config, make, plain_loss, smallest_budget, with_budget


@pytest.mark.parametrize(
    ("where", "dtype", "weights", "state"), [("cpu", "fp32", 4, 8), ("cpu", "bf16", 2, 12), ("nvme", "fp32", 4, 8), ("nvme", "bf16", 2, 10)]
)
def test_bytes_per_parameter(tmp_path: Path, where: str, dtype: str, weights: int, state: int) -> None:
    model = make()
    model.register_buffer("some", model.wte.weight.new_zeros(10))
    numel = sum(p.numel() for p in model.parameters())
    settings = config(tmp_path, params=where, state=where, dtype=dtype, optimizer_step="at_step")
    with swapio.initialize(model=model, config=with_budget(settings, smallest_budget(model, settings)))[0] as engine:
        assert not any(engine.memory()["gradients"].values())
        engine.backward(plain_loss(model, 0))
        gradients = engine.memory()["gradients"]
        engine.step()
        held = engine.memory()
    rest = "nvme" if where == "nvme" else "host"
    for nbytes, each in (
        (held["weights"][rest], weights),
        (held["optimizer"][rest], state),
        (gradients["host"] + gradients["nvme"], weights),
    ):
        assert each <= nbytes / numel < 1.3 * each
    assert not any(held["gradients"].values()) and not any(held["gathered"].values())
    assert (held["weights"]["nvme"] > 0) == (where == "nvme")
    assert held["buffers"] == {"nvme": 0, "host": 10 * weights, "device": 0}


def test_on_a_device(tmp_path: Path) -> None:
    model = make()
    with swapio.initialize(model=model, config=config(tmp_path, params="none", state="cpu", device="simulated"))[0] as engine:
        engine.backward(plain_loss(model, 0))
        engine.step()
        held = engine.memory()
    assert held["weights"]["device"] >= 4 * sum(p.numel() for p in model.parameters())
    assert held["optimizer"]["host"] >= 2 * held["weights"]["device"]
    assert held["optimizer"]["device"] == held["optimizer"]["nvme"] == held["weights"]["nvme"] == 0
