"""`swapio.utils`: what the engine knows of a parameter, whole, read and set; by one process and by several ranks."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import swapio
from swapio import utils
from swapio.optim import round_bf16

from . import gathering, launch
from .test_gathering import MODULE, alike


def check_step(seen: dict[str, list[torch.Tensor]], dtype: str) -> None:
    """The step is AdamW's on the master, with the gradient and the moments that were read."""
    for i, master in enumerate(seen["master before"]):
        plain = master.clone().requires_grad_()
        plain.grad = seen["grad 2"][i].clone()
        optimizer = torch.optim.AdamW([plain], lr=1e-2, weight_decay=0.1)
        step = torch.tensor(1.0)
        optimizer.state[plain] = {
            "step": step,
            "exp_avg": seen["exp_avg before"][i].clone(),
            "exp_avg_sq": seen["exp_avg_sq before"][i].clone(),
        }
        optimizer.step()
        assert torch.allclose(plain.detach(), seen["master after"][i], rtol=1e-5, atol=1e-6)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(optimizer.state[plain][key], seen[f"{key} after"][i], rtol=1e-5, atol=1e-9)
        shown = round_bf16(seen["master after"][i]) if dtype == "bf16" else seen["master after"][i]
        assert torch.equal(shown, seen["weight"][i])
        assert not torch.equal(seen["grad 1"][i], seen["grad 2"][i])


def check_set(results: list[gathering.Values], dtype: str, local: bool) -> None:
    seen, (weight,), given, _ = results
    for key, got, want in zip(gathering.KEYS, seen, given, strict=True):
        want = want * 2 if local else want
        exact = key != "grad" or dtype == "fp32"
        assert torch.equal(got, want) if exact else torch.allclose(got, want, rtol=1e-2), key
    assert torch.equal(weight, round_bf16(seen[0]) if dtype == "bf16" else seen[0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("place", ["none", "nvme"])
def test_one_process_reads_what_is_stepped(tmp_path: Path, dtype: str, place: str) -> None:
    seen = gathering.read(0, str(tmp_path), 3, dtype, place)
    check_step(seen, dtype)
    assert [int(n) for n in seen["numel"]] == [m.numel() for m in seen["master after"]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("local", [False, True])
def test_one_process_sets(tmp_path: Path, dtype: str, local: bool) -> None:
    check_set(gathering.assign(0, str(tmp_path), 3, dtype, local), dtype, local)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ranks_read_the_same_in_all_stages(tmp_path: Path, dtype: str) -> None:
    places = ("nvme", "cpu", "none", "nvme")
    results = launch.run("many", 2, [("read", (stage, dtype, places[stage])) for stage in range(4)], str(tmp_path), module=MODULE)
    for rank, stage in itertools.product(range(2), range(4)):
        seen = results[rank][stage]
        check_step(seen, dtype)
        for key, want in results[0][stage].items():
            assert alike(seen[key], want) or key == "numel", (rank, stage, key)
        for key in ("grad 1", "master before", "exp_avg before"):
            assert alike(seen[key], results[0][0][key]), (rank, stage, key)
    for stage in range(4):
        numel = [sum(int(n) for n in pair) for pair in zip(*(results[rank][stage]["numel"] for rank in range(2)), strict=True)]
        assert numel == [m.numel() for m in results[0][stage]["master after"]]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_ranks_set_the_same_in_all_stages(tmp_path: Path, dtype: str) -> None:
    cases = [(stage, dtype, local) for stage in range(4) for local in (False, True)]
    results = launch.run("many", 2, [("assign", case) for case in cases], str(tmp_path), module=MODULE)
    for rank in range(2):
        for number, (_, _, local) in enumerate(cases):
            check_set(results[rank][number], dtype, local)
            assert alike(results[rank][number][3], results[0][number][3])
            if dtype == "fp32":  # 16-bit gradients are rounded where they are summed in 16 bits
                assert alike(results[rank][number][3], results[0][number % 2][3])


def test_what_cannot_be_read_or_set(tmp_path: Path) -> None:
    plain = nn.Linear(2, 2).weight
    assert utils.safe_get_full_fp32_param(plain) is None
    assert utils.safe_get_full_grad(plain) is None
    assert utils.safe_get_full_optimizer_state(plain, "exp_avg") is None
    with pytest.raises(swapio.UsageError, match="trained by no engine"):
        utils.safe_set_full_grad(plain, torch.zeros(2, 2))
    with gathering.engine_of(str(tmp_path), 3, 0) as engine:
        weight = engine.module.head.weight
        with pytest.raises(swapio.UsageError, match="'variance' is no state of adamw; it has 'exp_avg', 'exp_avg_sq'"):
            utils.safe_get_full_optimizer_state(weight, "variance")
        with pytest.raises(swapio.UsageError, match=r"'head.weight' has the shape \(128, 64\)"):
            utils.safe_set_full_fp32_param(weight, torch.zeros(3))
        with pytest.raises(swapio.UsageError, match=r"owns 8192 elements of 'head.weight'"):
            utils.safe_set_local_fp32_param(weight, torch.zeros(3))


def test_a_written_weight_is_its_master(tmp_path: Path) -> None:
    with gathering.engine_of(str(tmp_path), 3, 0) as engine:
        gathering.train(engine, 0)
        weight = engine.module.head.weight
        before = utils.safe_get_full_fp32_param(weight)
        assert before is not None and not torch.equal(before, weight.float())
        weight.data.mul_(2)
        got = utils.safe_get_full_fp32_param(weight)
        assert got is not None and torch.equal(got, weight.float())


def test_a_set_gradient_can_be_dropped(tmp_path: Path) -> None:
    with gathering.engine_of(str(tmp_path), 3, 0) as engine:
        weight = engine.module.head.weight
        utils.safe_set_full_grad(weight, torch.ones(weight.shape))
        assert utils.safe_get_full_grad(weight) is not None
        engine.zero_grad()
        assert utils.safe_get_full_grad(weight) is None


def test_a_repeating_loader_begins_again() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    sampler: torch.utils.data.DistributedSampler[object] = torch.utils.data.DistributedSampler(data, 2, 0)
    loader = utils.RepeatingLoader(torch.utils.data.DataLoader(data, sampler=sampler))
    assert len(list(itertools.islice(loader, 5))) == 5
    assert sampler.epoch == 2
    with pytest.raises(StopIteration):
        next(utils.RepeatingLoader([]))


def test_log_dist_is_for_some_ranks(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "swapio"):
        for ranks in ([1], [0, 2], [-1], None):
            utils.log_dist(f"for {ranks}", ranks=ranks)
    assert [r.message for r in caplog.records] == ["[rank 0] for [0, 2]", "[rank 0] for [-1]", "[rank 0] for None"]
