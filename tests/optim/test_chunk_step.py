import itertools
import random
from typing import Any

import pytest
import torch

from swapio.optim import ChunkLayout, ChunkStepper, ChunkViews, OptimizerSpec, StepRange, chunk_layout, from_torch, round_bf16

NUMEL = 5 * 2048 + 7 * 64
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True, "maximize": True}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01, "decoupled_weight_decay": True}),
]
FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


def _masters(layout: ChunkLayout, split: bool) -> ChunkLayout:
    return layout if split else layout.whole


class Reference:
    """The plain loop: one fp32 master per range, `torch.optim` with `fused=True` where there is that, weights rounded from the masters."""

    def __init__(self, make: type[torch.optim.Optimizer], options: dict[str, Any], master: torch.Tensor, *, seed: int) -> None:
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(0, NUMEL + 1, 64), 13))
        spans = list(itertools.pairwise(cuts))
        self.spans = spans[:5] + spans[6:]  # a gap; the ends are left out too, nearly always
        self.parameters = [torch.nn.Parameter(master[a:b].clone()) for a, b in self.spans]
        self.group_of = [rng.randrange(3) for _ in self.spans]
        groups = [{"params": [p for p, g in zip(self.parameters, self.group_of, strict=True) if g == i]} for i in range(3)]
        for group, decay in zip(groups, (0.0, 0.1, 0.3), strict=True):
            group["weight_decay"] = decay  # type: ignore[assignment]
        implementation: dict[str, Any] = {"fused": True} if make in FUSED else {"foreach": False}
        self.optimizer = make(groups, **implementation, **options)
        self.spec: OptimizerSpec = from_torch(self.optimizer)[0]
        self.steps = [0] * len(self.spans)
        self.unused = [rng.sample(range(len(self.spans)), 2) for _ in range(5)]

    def step(self, index: int, grads: torch.Tensor) -> list[StepRange]:
        """One step in which two of the parameters are unused; returns the ranges of the others."""
        ranges = []
        self.optimizer.param_groups[0]["lr"] *= 0.5
        for i, (parameter, (start, stop)) in enumerate(zip(self.parameters, self.spans, strict=True)):
            parameter.grad = None
            if i not in self.unused[index]:
                self.steps[i] += 1
                parameter.grad = grads[start:stop].clone()
                ranges.append(StepRange(start, stop, self.optimizer.param_groups[self.group_of[i]], self.steps[i]))
        # One parameter at a time: SGD tells a first step from the others by the whole list.
        kept = [p.grad for p in self.parameters]
        for i, parameter in enumerate(self.parameters):
            for other in self.parameters:
                other.grad = None
            if kept[i] is not None:
                parameter.grad = kept[i]
                self.optimizer.step()
        return ranges


def chunks_of(spec: OptimizerSpec, dtype: torch.dtype, chunk_numel: int, *, split: bool = True) -> list[tuple[int, ChunkViews]]:
    starts = range(0, NUMEL, chunk_numel)
    layouts = [(start, _masters(chunk_layout(spec, min(chunk_numel, NUMEL - start), dtype), split)) for start in starts]
    return [(start, layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))) for start, layout in layouts]


def cut(ranges: list[StepRange], start: int, stop: int) -> list[StepRange]:
    return [
        r._replace(start=max(r.start, start) - start, stop=min(r.stop, stop) - start) for r in ranges if r.start < stop and r.stop > start
    ]


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return round_bf16(master) if dtype == BF16 else master.to(dtype)


@pytest.mark.parametrize(("make", "options"), OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "split", "grad_dtype", "scale", "factor"),
    [
        (FP32, True, FP32, None, None),
        (FP32, True, FP32, 768.0, 0.3),
        (BF16, True, BF16, None, None),
        (BF16, True, FP32, None, None),
        (BF16, False, BF16, None, None),
        (BF16, False, FP32, None, None),
        (BF16, False, BF16, 768.0, 0.3),
        (HALF, True, HALF, None, None),
        (HALF, True, FP32, None, None),
        (HALF, True, HALF, 768.0, 0.3),
        (HALF, True, FP32, 768.0, None),
    ],
)
@pytest.mark.parametrize(("chunk_numel", "block_numel"), [(NUMEL, 1 << 18), (2048, 64), (4096, 1344)])
def test_same_bits_as_the_plain_loop(
    make: type[torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    split: bool,
    grad_dtype: torch.dtype,
    scale: float | None,
    factor: float | None,
    chunk_numel: int,
    block_numel: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(NUMEL, generator=generator)
    reference = Reference(make, options, master, seed=chunk_numel)
    weights = torch.empty(NUMEL, dtype=dtype)
    chunks = chunks_of(reference.spec, dtype, chunk_numel, split=split)
    for start, views in chunks:
        part = slice(start, start + chunk_numel)
        views.store_master(master[part], weights[part], start=0)
    assert torch.equal(weights, rounded(master, dtype))
    initial = weights.clone()
    stepper = ChunkStepper(reference.spec, block_numel=block_numel)
    for index in range(5):
        grads = torch.randn(NUMEL, generator=generator).mul_(scale or 1.0).to(grad_dtype)
        given = grads.clone()
        ranges = reference.step(index, grads.float().mul(factor or 1.0).div(scale or 1.0))
        for start, views in chunks:
            part = slice(start, min(start + chunk_numel, NUMEL))
            pieces = cut(ranges, part.start, part.stop)
            stepper.step(weights[part], grads[part], views, pieces, grad_scale=scale, grad_factor=factor)
        assert torch.equal(grads, given)

    result = torch.empty(NUMEL)
    for start, views in chunks:
        part = slice(start, start + chunk_numel)
        views.read_master(result[part], weights[part], start=0)
    fields = {name: torch.cat([views.fields[name] for _, views in chunks]) for name in reference.spec.fields}
    outside = torch.ones(NUMEL, dtype=torch.bool)
    for (start, stop), parameter in zip(reference.spans, reference.parameters, strict=True):
        outside[start:stop] = False
        expected = parameter.detach()
        assert torch.equal(result[start:stop], expected)
        assert torch.equal(weights[start:stop], rounded(expected, dtype))
        for name, field in fields.items():
            assert torch.equal(field[start:stop], reference.optimizer.state[parameter][name])
    assert outside.any()
    assert torch.equal(weights[outside], initial[outside])
    assert torch.equal(result[outside], master[outside])
    assert not any(field[outside].any() for field in fields.values())


@pytest.mark.parametrize(("dtype", "split"), [(FP32, True), (BF16, True), (BF16, False), (HALF, True)])
@pytest.mark.parametrize("factor", [None, 0.3])
def test_gradients_in_parts(dtype: torch.dtype, split: bool, factor: float | None) -> None:
    """The same bits as of one tensor with zeros where no part is, wherever sub-blocks are cut; parts are never written."""
    spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
    layout = _masters(chunk_layout(spec, 1024, dtype), split)
    generator = torch.Generator().manual_seed(3)
    parts = [(n, torch.randn(m, generator=generator).to(dtype)) for n, m in ((64, 100), (192, 64), (256, 1), (640, 384))]
    whole = torch.zeros(1024, dtype=dtype)
    for begin, values in parts:
        whole[begin : begin + values.numel()] = values
    given = [values.clone() for _, values in parts]
    start = torch.randn(1024, generator=generator)
    found = []
    for grads in (whole, parts):
        raw, weights = torch.zeros(layout.nbytes, dtype=torch.uint8), torch.empty(1024, dtype=dtype)
        layout.views(raw).store_master(start, weights, start=0)
        stepper = ChunkStepper(spec, block_numel=128)
        stepper.squares = 0.0
        for number in (1, 2):
            ranges = [StepRange(64, 320, spec.groups[0], number), StepRange(640, 1024, spec.groups[0], number)]
            stepper.step(weights, grads, layout.views(raw), ranges, grad_factor=factor)
        found.append((raw, weights, stepper.squares))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][2] == pytest.approx(found[1][2])  # fp32 weights are summed at once where gradients are one tensor
    assert all(torch.equal(values, before) for (_, values), before in zip(parts, given, strict=True))


@pytest.mark.parametrize(("dtype", "split"), [(FP32, True), (BF16, True), (BF16, False), (HALF, True)])
def test_what_is_outside_keeps_garbage_to_the_bit(dtype: torch.dtype, split: bool) -> None:
    spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
    layout = _masters(chunk_layout(spec, 2048, dtype), split)
    buffer = torch.randint(0, 256, (layout.nbytes,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    raw = torch.full((2048 * dtype.itemsize,), 0xFF, dtype=torch.uint8)  # NaN
    weights, views = raw.view(dtype), layout.views(buffer)
    raw_before, buffer_before = raw.clone(), buffer.clone()
    for tensor in (weights, *views.fields.values(), *([] if views.master is None else [views.master])):
        tensor[640:704] = 0
    ChunkStepper(spec).step(weights, torch.ones(2048, dtype=dtype), views, [StepRange(640, 704, spec.groups[0], 1)])
    inside = torch.zeros(2048, dtype=torch.bool)
    inside[640:704] = True
    assert not weights[inside].isnan().any()
    assert torch.equal(weights[~inside].view(torch.uint8), raw_before.view(dtype)[~inside].view(torch.uint8))
    garbage = layout.views(buffer_before)
    parts = [(views.fields[name], garbage.fields[name]) for name in spec.fields]
    for head, before in ((views.lo, garbage.lo), (views.master, garbage.master)):
        if head is not None and before is not None:
            parts.append((head, before))
    for part, before in parts:
        assert torch.equal(part[~inside].view(torch.uint8), before[~inside].view(torch.uint8))


@pytest.mark.parametrize(("dtype", "split"), [(FP32, True), (BF16, True), (BF16, False), (HALF, True)])
@pytest.mark.parametrize("numel", [0, 1, 63, 1009])
def test_small_chunks_and_tails(dtype: torch.dtype, split: bool, numel: int) -> None:
    spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
    layout = _masters(chunk_layout(spec, numel, dtype), split)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    weights = torch.empty(numel, dtype=dtype)
    views.store_master(torch.ones(numel), weights, start=0)
    ChunkStepper(spec, block_numel=64).step(weights, torch.ones(numel, dtype=dtype), views, [StepRange(0, numel, spec.groups[0], 1)])
    parameter = torch.nn.Parameter(torch.ones(numel))
    parameter.grad = torch.ones(numel)
    torch.optim.AdamW([parameter], fused=True).step()
    assert torch.equal(weights, rounded(parameter.detach(), dtype))


@pytest.mark.parametrize("dtype", [FP32, BF16, HALF])
def test_scale_and_factor_act_on_a_copy_of_the_gradient(dtype: torch.dtype) -> None:
    spec, _ = from_torch(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    views = chunk_layout(spec, 128, dtype).views(torch.zeros(4096, dtype=torch.uint8))
    weights, grads = torch.zeros(128, dtype=dtype), torch.full((128,), 6.0, dtype=dtype)
    ChunkStepper(spec).step(weights, grads, views, [StepRange(0, 128, spec.groups[0], 1)], grad_scale=4.0, grad_factor=0.5)
    assert (weights == -0.75).all()
    assert (grads == 6.0).all()


def test_float16_weights_overflow_and_underflow_as_in_pytorch() -> None:
    spec, _ = from_torch(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    layout = chunk_layout(spec, 64, HALF)
    views = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
    start = torch.zeros(64)
    start[:6] = torch.tensor([65504.0, -65504.0, 65504.0, 6e-8, 1e-5, 3e-8])
    grads = torch.zeros(64)
    grads[:6] = torch.tensor([-16.0, 15.5, -15.0, 3e-8, 2e-5, 2e-8])
    weights, stepper = torch.empty(64, dtype=HALF), ChunkStepper(spec)
    views.store_master(start, weights, start=0)
    stepper.step(weights, grads, views, [StepRange(0, 64, spec.groups[0], 1)])
    master = start - grads
    assert weights[:3].tolist() == [torch.inf, -65504.0, 65504.0]  # 65520 is the first that rounds to infinity
    assert 0 < weights[3] < torch.finfo(HALF).tiny
    assert -torch.finfo(HALF).tiny < weights[4] < 0
    assert weights[5] == 0 < master[5]
    assert torch.equal(weights, master.half())
    assert views.master is not None
    assert torch.equal(views.master, master)
    stepper.step(weights, -grads, views, [StepRange(0, 64, spec.groups[0], 2)])
    assert weights.isfinite().all()  # the masters were finite all along


def test_misuse_changes_nothing() -> None:
    spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
    views = chunk_layout(spec, 2048, torch.float32).views(torch.zeros(16384, dtype=torch.uint8))
    weights, grads, group = torch.ones(2048), torch.ones(2048), spec.groups[0]
    stepper = ChunkStepper(spec)
    good = StepRange(0, 128, group, 1)
    for bad in ((64, 192), (130, 192), (128, 200), (192, 128), (128, 2112)):
        with pytest.raises(ValueError, match="must start at 128 or later"):
            stepper.step(weights, grads, views, [good, StepRange(*bad, group, 1)])
    with pytest.raises(ValueError, match="without lower halves"):
        stepper.step(weights.bfloat16(), grads.bfloat16(), views, [good])
    with pytest.raises(ValueError, match="1024 gradients"):
        stepper.step(weights, grads[:1024], views, [good])
    with pytest.raises(ValueError, match="without masters"):
        stepper.step(weights.half(), grads, views, [good])
    half = chunk_layout(spec, 2048, HALF).views(torch.zeros(24576, dtype=torch.uint8))
    with pytest.raises(ValueError, match="with masters"):
        stepper.step(weights, grads, half, [good])
    with pytest.raises(ValueError, match=r"gradients of torch\.float16"):
        stepper.step(weights.half(), grads.bfloat16(), half, [good])
    with pytest.raises(ValueError, match="float64"):
        stepper.step(weights.double(), grads, views, [good])
    with pytest.raises(ValueError, match=r"gradients of torch\.float32"):
        stepper.step(weights, grads.bfloat16(), views, [good])
    with pytest.raises(ValueError, match="multiple of 64"):
        ChunkStepper(spec, block_numel=100)
    assert (weights == 1).all()


def test_no_graph_is_recorded() -> None:
    spec, _ = from_torch(torch.optim.AdamW([torch.zeros(1)]))
    views = chunk_layout(spec, 64, torch.float32).views(torch.zeros(8192, dtype=torch.uint8))
    weights = torch.ones(64, requires_grad=True)
    ChunkStepper(spec).step(weights, torch.ones(64), views, [StepRange(0, 64, spec.groups[0], 1)])
    assert weights.is_leaf
    assert (weights != 1).all()
