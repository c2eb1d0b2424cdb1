from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swapio.config import batch_triple, load_config
from swapio.errors import ConfigError

SIZES = st.integers(1, 12)
NAMES = ("total", "micro", "steps")


@given(SIZES, SIZES, st.integers(1, 8), st.sets(st.sampled_from(NAMES)))
def test_any_subset_of_a_consistent_triple_is_completed(micro: int, steps: int, world: int, hidden: set[str]) -> None:
    whole = (micro * steps * world, micro, steps)
    total, *rest = shown = [None if name in hidden else value for name, value in zip(NAMES, whole, strict=True)]
    got = batch_triple(total, *rest, world_size=world)
    assert got[0] == got[1] * got[2] * world
    for have, want in zip(got, shown, strict=True):
        assert want in (None, have)
    if len(hidden) <= 1:
        assert got == whole
    elif hidden == {"micro", "steps"}:
        assert got == (whole[0], whole[0] // world, 1)
    else:
        assert got == ((micro if rest[0] else 1) * (steps if rest[1] else 1) * world, rest[0] or 1, rest[1] or 1)


@given(st.none() | SIZES, st.none() | SIZES, st.none() | SIZES, st.integers(1, 4))
def test_the_product_holds_or_all_values_are_shown(total: int | None, micro: int | None, steps: int | None, world: int) -> None:
    try:
        got = batch_triple(total, micro, steps, world_size=world, world_size_source="WORLD_SIZE")
    except ConfigError as error:
        possible = total is None or (total % ((micro or 1) * (steps or 1) * world) == 0 and None in (micro, steps))
        assert not possible
        for name, value in (("train_batch_size", total), ("train_micro_batch_size_per_gpu", micro), ("gradient_accumulation_steps", steps)):
            assert (f"{name} (not given)" if value is None else f"{name}={value} (given)") in str(error)
        assert f"world size {world} (WORLD_SIZE)" in str(error)
    else:
        assert got[0] == got[1] * got[2] * world
        assert all(want in (None, have) for have, want in zip(got, (total, micro, steps), strict=True))


def test_a_contradiction_shows_the_product() -> None:
    with pytest.raises(ConfigError, match="world size 2: 2 x 2 x 2 is 8, not 10"):
        batch_triple(10, 2, 2, world_size=2)
    with pytest.raises(ConfigError, match="7 cannot be split evenly"):
        batch_triple(7, 2, None)


def test_several_ranks_share_the_batch() -> None:
    loaded = load_config({"train_batch_size": 24, "gradient_accumulation_steps": 3}, world_size=4, world_size_source="WORLD_SIZE")
    assert (loaded.train_micro_batch_size_per_gpu, loaded.world_size) == (2, 4)
    with pytest.raises(
        ConfigError, match=r"train_batch_size=8 \(given\).*_gpu=1 \(given\).*steps=2 \(given\), world size 3 \(torchrun\): 1 x 2 x 3"
    ):
        load_config(
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
            world_size=3,
            world_size_source="torchrun",
        )
    with pytest.raises(ConfigError, match=r"world_size: 0 \(WORLD_SIZE\) is no number of ranks"):
        load_config({}, world_size=0, world_size_source="WORLD_SIZE")


@pytest.mark.parametrize(
    ("config", "sources"),
    [
        ({}, ("default", "default", "default")),
        ({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": None}, ("default", "default", "default")),
        ({"train_batch_size": 4}, ("given", "inferred from train_batch_size and the world size", "default")),
        (
            {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4},
            ("given", "given", "inferred from train_batch_size, train_micro_batch_size_per_gpu and the world size"),
        ),
        ({"gradient_accumulation_steps": 1}, ("inferred from gradient_accumulation_steps and the world size", "default", "given")),
    ],
)
def test_sources(config: dict[str, int], sources: tuple[str, str, str]) -> None:
    assert tuple(load_config(config).sources.values())[:3] == sources
