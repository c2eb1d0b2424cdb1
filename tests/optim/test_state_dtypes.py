"""Optimizer state as bfloat16 and in 8 bits: what is stored is what is read, and no cut changes a bit."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swapio.errors import ConfigError
from swapio.optim import (
    ChunkLayout,
    ChunkStepper,
    ChunkViews,
    OptimizerSpec,
    StateDtype,
    StepRange,
    chunk_layout,
    from_torch,
    with_state_dtype,
)
from swapio.optim._state import SCALE_NUMEL, Dither, load_, store_

KEY = "swapio.optimizer_state_dtype"


def _masters(layout: ChunkLayout, split: bool) -> ChunkLayout:
    return layout if split else layout.whole


def spec_of(dtype: StateDtype, make: Any = torch.optim.AdamW, **options: Any) -> OptimizerSpec:
    return with_state_dtype(from_torch(make([torch.zeros(1)], lr=0.01, **options))[0], dtype, key=KEY)


def coded(values: torch.Tensor, *, square: bool, dither: Dither | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.empty(values.numel(), dtype=torch.uint8), torch.empty(values.numel() // SCALE_NUMEL)
    store_(values.clone(), codes, scales, square=square, dither=dither, scratch=torch.empty_like(values))
    return codes, scales


def decoded(codes: torch.Tensor, scales: torch.Tensor, *, square: bool) -> torch.Tensor:
    values = torch.empty(codes.numel())
    load_(codes, scales, values, square=square)
    return values


def random_values(seed: int, numel: int, low: int, high: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))
    powers = torch.randint(low, high + 1, (numel // SCALE_NUMEL, 1), generator=generator).float()
    return (values.view(-1, SCALE_NUMEL) * torch.exp2(powers)).view(-1)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dithered", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1 << 32), low=st.integers(-60, 20), spread=st.sampled_from([0.0, 0.5, 3.0]))
def test_storing_what_was_loaded_changes_nothing(seed: int, low: int, spread: float, square: bool, dithered: bool) -> None:
    values = random_values(seed, 64 * SCALE_NUMEL, low, low + 20, spread)
    values[seed % 64 * SCALE_NUMEL :][:SCALE_NUMEL] = 0
    values = values.square() if square else values
    codes, scales = coded(values, square=square, dither=Dither(seed % 4096 * 64, 1, seed % 97) if dithered else None)
    loaded = decoded(codes, scales, square=square)
    again, scales_again = coded(loaded, square=square)
    assert torch.equal(scales_again, scales)
    live = (scales != 0)[:, None].expand(-1, SCALE_NUMEL).reshape(-1)
    assert torch.equal(again[live], codes[live])
    assert torch.equal(decoded(again, scales_again, square=square), loaded)
    step = scales[:, None].expand(-1, SCALE_NUMEL).reshape(-1)
    error = (loaded.sqrt() - values.sqrt() if square else loaded - values).abs()
    assert (error[live] <= step[live] * (1.01 if dithered else 0.51)).all()
    assert not loaded[~live].any()


@pytest.mark.parametrize(("levels", "square"), [(127, False), (255, True)])
def test_every_scale_comes_back(levels: int, square: bool) -> None:
    """Of the 2**20 significands that a scale can have, each 64th; the whole would take a minute."""
    for exponent in (-40, 0, 13):
        scales = torch.arange(1 << 23, 1 << 24, 8 * 64 + 8, dtype=torch.float32) * 2.0 ** (exponent - 23)
        codes = torch.zeros(scales.numel(), SCALE_NUMEL, dtype=torch.uint8)
        codes[:, 7] = levels
        loaded = decoded(codes.view(-1), scales, square=square)
        again, scales_again = coded(loaded, square=square)
        assert torch.equal(scales_again, scales)
        assert torch.equal(again, codes.view(-1))


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_mean_is_exact(dtype: StateDtype, square: bool) -> None:
    values = torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.1
    values[::SCALE_NUMEL] = 2.0
    scale = (2.0**0.5 / 255.5 if square else 2.0 / 127) if dtype == "int8" else values * 2.0**-7
    total, times = torch.zeros_like(values), 1000
    for step in range(times):
        dither = Dither(0, 1, step)
        if dtype == "int8":
            rounded = decoded(*coded(values, square=square, dither=dither), square=square)
        else:
            stored = torch.empty(4096, dtype=torch.bfloat16)
            store_(values.clone(), stored, None, square=square, dither=dither, scratch=torch.empty(0))
            rounded = stored.float()
        total += rounded.sqrt() if dtype == "int8" and square else rounded
    error = (total / times - (values.sqrt() if dtype == "int8" and square else values)) / scale
    assert error.abs().max() < 0.5 / times**0.5 * 6
    assert error.mean().abs() < 0.002


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_a_second_moment_decays(dtype: StateDtype) -> None:
    """By a thousandth in a step, for half of a block, while the other half keeps its scale. To nearest, all would stay at 1."""
    spec = spec_of(dtype)
    layout = chunk_layout(spec, 1 << 12, torch.float32)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    values = torch.ones(1 << 12)
    views.store_field("exp_avg_sq", values, start=0)
    stepper, weights, grads = ChunkStepper(spec), torch.zeros(1 << 12), torch.ones(1 << 12)
    grads[::2] = 0
    for step in range(1, 1001):
        stepper.step(weights, grads, views, [StepRange(0, 1 << 12, spec.groups[0], step)])
    views.read_field("exp_avg_sq", values, start=0)
    assert values[1::2].mean().item() == pytest.approx(1, rel=0.002)
    assert values[::2].mean().item() == pytest.approx(0.999**1000, rel=0.01)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_zero_bytes_are_zeros_and_stay_so(dtype: StateDtype) -> None:
    spec = spec_of(dtype)
    layout = chunk_layout(spec, 1000, torch.float32)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    values = torch.full((1000,), 7.0)
    ChunkStepper(spec).step(values, torch.zeros(1000), views, [StepRange(0, 1000, spec.groups[0], 1)])
    for name in spec.fields:
        views.read_field(name, values, start=0)
        assert not values.any()
    if dtype == "int8":
        assert not any(scales.any() for scales in views.scales.values())


def test_bytes() -> None:
    numel = 1 << 20
    assert chunk_layout(spec_of("fp32"), numel, torch.bfloat16).nbytes == 10 * numel
    assert chunk_layout(spec_of("bf16"), numel, torch.bfloat16).nbytes == 6 * numel
    assert chunk_layout(spec_of("int8"), numel, torch.bfloat16).nbytes == 4 * numel + 2 * numel // 64


NUMEL = 9 * 2048 + 3 * 256


def run(spec: OptimizerSpec, chunk_numel: int, block_numel: int, *, dtype: torch.dtype, split: bool = True) -> list[torch.Tensor]:
    """Masters and state after some steps of three parameters in two groups, one of them not always used."""
    generator = torch.Generator().manual_seed(3)
    weights = torch.empty(NUMEL, dtype=dtype)
    master = torch.randn(NUMEL, generator=generator)
    chunks: list[tuple[int, ChunkViews]] = []
    for start in range(0, NUMEL, chunk_numel):
        layout = _masters(chunk_layout(spec, min(chunk_numel, NUMEL - start), dtype), split)
        chunks.append((start, layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))))
        chunks[-1][1].store_master(master[start : start + chunk_numel], weights[start : start + chunk_numel], start=0)
    stepper = ChunkStepper(spec, block_numel=block_numel)
    cuts = [0, 1280, 5 * 2048 + 256, NUMEL]
    groups = [spec.groups[0], dict(spec.groups[0]) | {"lr": 0.1}, spec.groups[0]]
    counts = [0, 0, 0]
    for step in range(6):
        grads = torch.randn(NUMEL, generator=generator).mul_(torch.rand(NUMEL, generator=generator) ** 4).to(dtype)
        used = [i for i in range(3) if i != step % 5]
        for i in used:
            counts[i] += 1
        for start, views in chunks:
            part = slice(start, min(start + chunk_numel, NUMEL))
            ranges = [
                StepRange(max(cuts[i], part.start) - start, min(cuts[i + 1], part.stop) - start, groups[i], counts[i])
                for i in used
                if cuts[i] < part.stop and cuts[i + 1] > part.start
            ]
            stepper.step(weights[part], grads[part], views, ranges, grad_factor=0.5, place=start)
    result = [torch.empty(NUMEL) for _ in range(1 + len(spec.fields))]
    for start, views in chunks:
        part = slice(start, min(start + chunk_numel, NUMEL))
        views.read_master(result[0][part], weights[part], start=0)
        for name, values in zip(spec.fields, result[1:], strict=True):
            views.read_field(name, values[part], start=0)
    return [weights, *result]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("state", "make", "options"),
    [
        ("fp32", torch.optim.AdamW, {}),
        ("bf16", torch.optim.AdamW, {"amsgrad": True}),
        ("bf16", torch.optim.Adagrad, {}),
        ("int8", torch.optim.AdamW, {}),
        ("int8", torch.optim.SGD, {"momentum": 0.9}),
        ("int8", torch.optim.RMSprop, {"momentum": 0.9}),
    ],
)
def test_cuts_change_no_bit(dtype: torch.dtype, state: StateDtype, make: Any, options: dict[str, Any]) -> None:
    spec = spec_of(state, make, **options)
    want = run(spec, NUMEL + 2048, 1 << 18, dtype=dtype)
    threads = torch.get_num_threads()
    for chunk_numel, block_numel, split in ((2048, 256, True), (4096, 1280, False), (3 * 2048, 2048, True)):
        torch.set_num_threads(1 if chunk_numel == 4096 else threads)
        try:
            got = run(spec, chunk_numel, block_numel, dtype=dtype, split=split)
        finally:
            torch.set_num_threads(threads)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_close_to_fp32(dtype: StateDtype) -> None:
    want = run(spec_of("fp32"), 4096, 2048, dtype=torch.float32)
    got = run(spec_of(dtype), 4096, 2048, dtype=torch.float32)
    moved = (want[1] - torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))).abs().mean()
    assert 0 < (got[1] - want[1]).abs().mean() < moved * {"bf16": 0.002, "int8": 0.2}[dtype]
    for a, b in zip(got[2:], want[2:], strict=True):
        assert (a - b).abs().mean() < b.abs().mean() * {"bf16": 0.005, "int8": 0.05}[dtype]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("numel", [1, 255, 256, 257, 2048, 3001])
def test_fields_are_read_and_stored_in_parts(dtype: StateDtype, numel: int) -> None:
    spec = spec_of(dtype)
    layout = chunk_layout(spec, numel, torch.float32)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    values = random_values(1, -(-numel // SCALE_NUMEL) * SCALE_NUMEL, -20, 0, 1.0)[:numel].square()
    whole, parts = torch.empty(numel), torch.empty(numel)
    for name in spec.fields:
        views.store_field(name, values, start=0)
        views.read_field(name, whole, start=0)
        for start in range(0, numel, 512):
            views.store_field(name, values[start : start + 512], start=start)
            views.read_field(name, parts[start : start + 512], start=start)
        assert torch.equal(parts, whole)
        assert torch.equal(whole, values) or dtype != "fp32"


def test_misuse() -> None:
    spec = spec_of("int8")
    layout = chunk_layout(spec, 1024, torch.float32)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    with pytest.raises(ValueError, match="blocks of 256 elements; one starts before 64"):
        views.read_field("exp_avg", torch.empty(64), start=64)
    with pytest.raises(ValueError, match="multiples of 256"):
        ChunkStepper(spec).step(torch.ones(1024), torch.ones(1024), views, [StepRange(64, 128, spec.groups[0], 1)])
    with pytest.raises(ValueError, match="multiple of 256"):
        ChunkStepper(spec, block_numel=64)


@pytest.mark.parametrize(
    ("dtype", "make", "options", "says"),
    [
        ("int8", torch.optim.Adam, {"amsgrad": True}, r"'max_exp_avg_sq' of Adam: .*; use \"bf16\", or leave amsgrad off"),
        ("int8", torch.optim.Adagrad, {}, r"'sum' of Adagrad: .*; use \"bf16\", or AdamW"),
        ("int8", torch.optim.Adamax, {}, "'exp_inf' of Adamax"),
        ("int8", torch.optim.Adadelta, {}, "'acc_delta' of Adadelta"),
        ("bf16", torch.optim.RMSprop, {"centered": True}, r"'grad_avg' of RMSprop: .*; use \"fp32\", or leave centered off"),
    ],
)
def test_what_does_not_bear_it_is_refused(dtype: StateDtype, make: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{KEY}: \"{dtype}\" is not supported for {says}") as caught:
        spec_of(dtype, make, **options)
    assert (caught.value.key, caught.value.value) == (KEY, dtype)


def test_random_numbers_are_spread_evenly() -> None:
    values = torch.zeros(3 * 16384 + 5)
    Dither(12345, 2, 7).add_(values, torch.arange(16384.0).repeat(2))
    assert torch.equal(values[:16384].sort().values, torch.arange(16384.0))
    starts = {Dither(0, field, step)._start for field, step in itertools.product(range(2), range(1000))}
    assert len(starts) > 1800
