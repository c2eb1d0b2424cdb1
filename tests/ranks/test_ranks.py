"""Several ranks: the numbers of one process, whatever is partitioned and wherever it rests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from . import launch, work

PAIRS = list(itertools.product(("none", "cpu", "nvme"), repeat=2))


def case(stage: int, pair: tuple[str, ...], *, accumulate: int = 1, clip: float = 0.0, dtype: str = "fp32") -> dict[str, Any]:
    return {"stage": stage, "params": pair[0], "state": pair[1], "dtype": dtype, "accumulate": accumulate, "clip": clip}


def same(a: work.Result, b: work.Result, *, losses: bool = True) -> None:
    assert not losses or a[0] == b[0]
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_stages_and_offloads_agree(tmp_path: Path, world: int) -> None:
    """Bit for bit between stages and offloads at one number of ranks; with plain PyTorch within the rounding of another order of sums.

    Stages 0 and 1 sum micro-batches before ranks, 2 and 3 as they come: with more than one of each, those two orders differ in rounding.
    """
    cases = []
    for number, (accumulate, clip) in enumerate(itertools.product((1, 3), (0.0, 0.5))):
        for stage in range(4):
            pair = PAIRS[(number * 4 + stage * 2 + world) % len(PAIRS)]
            cases.append(case(stage, pair, accumulate=accumulate, clip=clip))
    results = launch.run("train_many", world, str(tmp_path), cases)
    for rank in range(world):
        for start in range(0, len(cases), 4):
            one, two, three, four = results[rank][start : start + 4]
            same(one, two)
            same(three, four)
            if cases[start]["accumulate"] == 1:
                same(one, three)
            same(one, results[0][start], losses=False)
    for i, each in enumerate(cases):
        losses, weights, norm = work.plain(world, each)
        for rank in range(world):
            assert results[rank][i][0] == pytest.approx(losses[rank], rel=1e-4)
            assert results[rank][i][2]["norm"] == pytest.approx(norm, rel=1e-4)
            for got, want in zip(results[rank][i][1], weights, strict=True):
                assert torch.allclose(got, want, atol=2e-3)
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_offload_pairs_give_the_same_bits(tmp_path: Path, stage: int) -> None:
    results = launch.run("train_many", 2, str(tmp_path), [case(stage, pair, dtype="bf16", clip=0.5, accumulate=2) for pair in PAIRS])
    for rank in range(2):
        for result in results[rank][1:]:
            same(results[rank][0], result)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_branches_at_random_for_two_hundred_steps(tmp_path: Path, stage: int) -> None:
    results = launch.run("train_branches", 3, str(tmp_path), stage, 200)
    losses, weights = work.plain_branches(3, 200)
    for rank in range(3):
        assert results[rank][0] == pytest.approx(losses[rank], rel=2e-2)
        for name, want in weights.items():
            assert torch.equal(results[rank][1][name], results[0][1][name])
            assert torch.allclose(results[rank][1][name], want, atol=2e-3), name
    torch.manual_seed(0)
    assert torch.equal(
        results[0][1]["blocks.4.0.weight"], work.Branches().get_parameter("blocks.4.0.weight")
    )  # used by nobody: no decay either


@pytest.mark.slow
def test_stages_agree_on_branches(tmp_path: Path) -> None:
    results = [launch.run("train_branches", 2, str(tmp_path), stage, 20) for stage in range(4)]
    for result in results[1:]:
        for rank in range(2):
            assert result[rank][0] == results[0][rank][0]
            assert all(torch.equal(result[rank][1][k], v) for k, v in results[0][rank][1].items())


@pytest.mark.slow
@pytest.mark.parametrize("when", ["backward", "step"])
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path, when: str) -> None:
    results = launch.run("die", 3, str(tmp_path), when, may_die=True)
    assert results[1] is None
    for rank in (0, 2):
        kind, message, seconds = results[rank]
        assert kind == "RankError"
        assert "another rank died" in message or "has not come" in message or "another rank" in message
        assert seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_smallest_budget_is_kept(tmp_path: Path, stage: int) -> None:
    results = launch.run("smallest_budget", 2, str(tmp_path), stage)
    for needed, _, peak in results:
        assert peak <= needed
    plain, _ = work.plain_branches(2, 5)
    for rank in range(2):
        assert results[rank][1] == pytest.approx(plain[rank], rel=1e-3)


@pytest.mark.slow
def test_dropped_gradients_leave_nothing(tmp_path: Path) -> None:
    losses, _ = work.plain_branches(2, 6)
    for stage in (1, 3):
        results = launch.run("drop_and_go_on", 2, str(tmp_path), stage)
        for rank in range(2):
            assert results[rank] == pytest.approx(losses[rank], rel=1e-3)


@pytest.mark.slow
def test_a_write_to_a_slice_is_an_error(tmp_path: Path) -> None:
    assert launch.run("writes", 2, str(tmp_path), 1) == ["", ""]
    for message in launch.run("writes", 2, str(tmp_path), 3):
        assert "GatheredParameters" in message


@pytest.mark.slow
def test_stages_agree_in_bf16(tmp_path: Path) -> None:
    """At stages 1 and 2 a rank rounded the slices it does not own to even, and owners theirs half up: the first weights differed."""
    results = launch.run("train_many", 2, str(tmp_path), [case(stage, ("cpu", "cpu"), dtype="bf16") for stage in range(4)])
    for rank in range(2):
        for result in results[rank][1:]:
            same(results[rank][0], result)
