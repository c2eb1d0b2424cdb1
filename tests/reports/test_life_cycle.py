"""What users do to parameters that offload engines elsewhere break: shapes, reuse, evaluation, replacement, hooks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import swapio
from tests.engine.models import GPT, batch, check_same, config, make, train, train_plain, values

from .compare import DIM, PLACES, both_devices, every_place, layers, managed, mean_square, plain_adamw, rows, same_as_pytorch


@both_devices
def test_train_evaluate_and_generate_fifty_times(tmp_path: Path, place: tuple[str, str, str]) -> None:
    def look(model: Any, step: int) -> tuple[float, torch.Tensor]:
        model.eval()
        with torch.no_grad():
            validation = mean_square(model, 1000).item()
        sequence = rows(step, 1)
        with torch.inference_mode():
            for _ in range(3):
                sequence = torch.cat([sequence, model(sequence)[-1:]])
        model.train()
        return validation, sequence

    plain = layers(count=2)
    optimizer = plain_adamw(plain)
    with managed(tmp_path, layers(count=2), place=place) as engine:
        for step in range(50):
            (got, generated), (want, expected) = look(engine.module, step), look(plain, step)
            assert got == want
            assert torch.equal(generated, expected)
            engine.backward(mean_square(engine, step))
            engine.step()
            mean_square(plain, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        engine.manager.evict(engine.manager.keys()).wait()
        assert engine.stats()["host_memory_used"] == 0, "something is still in flight or in use"
        check_same(([], values(engine.module)), ([], values(plain)))


def test_another_order_each_step_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        x = rows(step)
        for index in torch.randperm(4, generator=torch.Generator().manual_seed(step))[:3].tolist():
            x = model[index](x)
        return x.pow(2).mean()

    with caplog.at_level(logging.INFO, "swapio"), managed(tmp_path, layers(count=4), extra=40_000) as engine:
        caplog.clear()
        got = train(engine, fn, steps=12)
        assert not caplog.records
        assert engine.stats()["misses"] > 0
    check_same(got, train_plain(layers(count=4), fn, steps=12))


class Experts(nn.Module):
    """Four experts, each row to the best of two that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.GELU()) for _ in range(4))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights[:, step % 3 : step % 3 + 2].argmax(-1) + step % 3
        out = torch.zeros_like(x)
        for number in best.unique().tolist():
            taken = (best == number).nonzero()[:, 0]
            out = out.index_add(0, taken, self.experts[number](x[taken]) * weights[taken, number : number + 1])
        return out


@both_devices
def test_experts_without_rows(tmp_path: Path, place: tuple[str, str, str]) -> None:
    def make_experts() -> Experts:
        torch.manual_seed(0)
        return Experts()

    def fn(model: Any, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(rows(step), step).pow(2).mean()
        return loss

    same_as_pytorch(tmp_path, make_experts, fn, steps=5, place=place)
    with managed(tmp_path, make_experts(), place=place) as engine:
        model: Any = engine.module
        engine.backward(fn(model, 0))
        assert model.experts[3][0].weight.grad is None, "as in PyTorch: no use, no gradient"


@pytest.mark.parametrize("recipe", ["AveragedModel", "by hand"])
def test_an_average_of_the_weights(tmp_path: Path, recipe: str) -> None:
    def average(model: nn.Module) -> tuple[Any, Any]:
        if recipe == "AveragedModel":
            averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
            return averaged.module, lambda: averaged.update_parameters(model)
        kept = {name: param.detach().clone() for name, param in model.named_parameters()}

        def update() -> None:
            for name, param in model.named_parameters():
                kept[name].lerp_(param.detach(), 0.1)

        return kept, update

    results = []
    for is_plain in (False, True):
        with managed(tmp_path, layers(), optimizer_step="at_step") as engine:  # no update is put off until the average reads
            model = layers() if is_plain else engine.module
            optimizer: Any = plain_adamw(model) if is_plain else engine.optimizer
            kept, update = average(model)
            for step in range(3):
                mean_square(model, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                engine.manager.flush().wait()
                written = engine.stats()["bytes_written"]
                update()
                engine.manager.flush().wait()
                assert engine.stats()["bytes_written"] == written, "an average only reads"
        results.append([t.clone() for t in (kept.values() if isinstance(kept, dict) else kept.state_dict().values())])
    check_same(([], results[0]), ([], results[1]))


@every_place
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_pytorchs(tmp_path: Path, place: tuple[str, str, str], dtype: torch.dtype) -> None:
    plain = layers().to(dtype)
    mean_square(plain, 0).backward()  # type: ignore[no-untyped-call]
    with managed(tmp_path, layers().to(dtype), place=place) as engine:
        engine.backward(mean_square(engine.module, 0))
        for param, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            assert want.grad is not None
            assert param.grad.dtype is dtype
            assert torch.equal(param.grad, want.grad)


def test_gradients_written_by_the_user_are_stepped(tmp_path: Path) -> None:
    def change(model: Any) -> None:
        model[0][0].weight.grad.mul_(0.5)
        model[0][0].bias.grad = torch.ones(DIM)
        model[1][0].weight.grad[3] = 0.0
        model[1][0].bias.grad = None
        model[2][0].weight.grad += 1

    plain = layers()
    optimizer = plain_adamw(plain)
    with managed(tmp_path, layers(), place=PLACES[4]) as engine:
        for step in range(3):
            for model in (engine.module, plain):
                mean_square(model, step).backward()  # type: ignore[no-untyped-call]
                change(model)
            engine.step()
            optimizer.step()
            optimizer.zero_grad()
        check_same(([], values(engine.module)), ([], values(plain)))


def test_a_gradient_that_is_kept_stays_what_it_was(tmp_path: Path) -> None:
    with managed(tmp_path, layers(), extra=100_000) as engine:
        engine.backward(mean_square(engine.module, 0))
        kept = [p.grad for p in engine.module.parameters()]
        before = [g.clone() for g in kept if g is not None]
        engine.step()
        train(engine, mean_square, steps=2)
        check_same(([], [g for g in kept if g is not None]), ([], before))


def test_hooks_of_the_user(tmp_path: Path) -> None:
    """On parameters, before and after `initialize`, and on modules."""

    def add_hooks(model: Any, seen: list[float]) -> None:
        model[0][0].weight.register_hook(lambda grad: grad * 2)
        model[1][0].bias.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.norm().item()))
        model[1].register_full_backward_hook(lambda module, into, out: seen.append(out[0].norm().item()))
        model[2].register_forward_hook(lambda module, args, out: out * 1.5)

    runs = []
    for hooked in ("before", "after", "plain"):
        seen: list[float] = []
        model = layers()
        if hooked != "after":
            add_hooks(model, seen)
        if hooked == "plain":
            runs.append((train_plain(model, mean_square, steps=3), seen))
            continue
        settings = config(tmp_path)
        with swapio.initialize(model=model, config=settings)[0] as engine:
            if hooked == "after":
                add_hooks(model, seen)
            runs.append((train(engine, mean_square, steps=3), seen))
    for got, seen in runs[:2]:
        check_same(got, runs[2][0])
        assert seen == runs[2][1]


@both_devices
@pytest.mark.parametrize("how", ["plain", "reentrant", "not reentrant"])
def test_one_module_on_two_inputs(tmp_path: Path, how: str, place: tuple[str, str, str]) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        def tower(x: torch.Tensor) -> torch.Tensor:
            for layer in model:
                x = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
            return x

        left, right = tower(rows(step).requires_grad_()), tower(rows(step + 100).requires_grad_())
        return (left - right).pow(2).mean() + F.cosine_similarity(left, right).mean()

    same_as_pytorch(tmp_path, layers, fn, place=place)


def test_two_losses_of_one_graph(tmp_path: Path) -> None:
    def losses(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model[0](rows(0))
        return model[1](hidden).pow(2).mean(), model[2](hidden).pow(2).mean()

    plain = layers()
    first, second = losses(plain)
    first.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    second.backward()  # type: ignore[no-untyped-call]
    with managed(tmp_path, layers()) as engine:
        first, second = losses(engine.module)
        engine.backward(first, retain_graph=True)
        engine.backward(second)
        for param, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.grad, want.grad)  # type: ignore[arg-type]


def test_a_reference_model_beside(tmp_path: Path) -> None:
    """A copy made before is an ordinary model and needs no engine."""

    def fn(model: Any, step: int) -> torch.Tensor:
        with torch.no_grad():
            want = reference(rows(step))
        return F.kl_div(model(rows(step)).log_softmax(-1), want.softmax(-1), reduction="batchmean")

    reference = layers(seed=1)
    same_as_pytorch(tmp_path, layers, fn)


def test_other_models_are_left_alone(tmp_path: Path) -> None:
    """Made while an engine is open, within its forward, and trained in between."""

    def fn(model: Any, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(rows(step)).pow(2).mean()
        metric = layers(seed=2)
        mean_square(metric, step).backward()  # type: ignore[no-untyped-call]
        plain_adamw(metric).step()
        assert all(type(p) is nn.Parameter and p.grad is not None for p in metric.parameters())
        return loss + metric(rows(step)).detach().mean()

    def build(module: nn.Module, args: Any) -> None:
        assert all(type(p) is nn.Parameter for p in nn.Linear(3, 3).parameters())

    def hooked() -> nn.Module:
        model = layers()
        model[1].register_forward_pre_hook(build)
        return model

    same_as_pytorch(tmp_path, hooked, fn)


@both_devices
def test_sub_modules_and_methods_by_themselves(tmp_path: Path, place: tuple[str, str, str]) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        ids, targets = batch(step)
        hidden = model.blocks[0](model.embed(ids))
        inner = model.blocks[1].fc2(F.gelu(model.blocks[1].fc1(hidden)))
        return model.loss(inner + F.linear(hidden, model.blocks[1].out.weight, model.blocks[1].out.bias), targets)

    def two() -> GPT:
        return make(layers=2)

    with managed(tmp_path, two(), place=place, extra=250_000) as engine:
        check_same(train(engine, fn, steps=2), train_plain(two(), fn, steps=2))


@pytest.mark.parametrize("how", ["module", "adapter", "assign"])
def test_replaced_parameters_are_noticed(tmp_path: Path, how: str) -> None:
    """Otherwise the new weights get gradients that no optimizer looks at."""
    with managed(tmp_path, make()) as engine:
        model: Any = engine.module
        if how == "module":
            model.head = nn.Linear(DIM, 128, bias=False)
        else:
            model.head = nn.Sequential(model.head, nn.Linear(128, 128))
        with pytest.raises(swapio.UsageError, match="head"):
            train(engine, steps=2)


def test_a_load_that_would_replace_parameters_is_refused(tmp_path: Path) -> None:
    with managed(tmp_path, make()) as engine:
        with pytest.raises(swapio.UsageError, match="assign=True"):
            engine.module.load_state_dict(engine.module.state_dict(), assign=True)
        check_same(train(engine), train_plain(make()))


def test_a_state_dict_that_does_not_fit_is_refused_as_ever(tmp_path: Path) -> None:
    with managed(tmp_path, make()) as engine:
        state = engine.module.state_dict()
        wrong = state | {"head.weight": torch.zeros(3, DIM)}
        with pytest.raises(RuntimeError, match=r"head\.weight.*\[3, 64\].*\[128, 64\]"):
            engine.module.load_state_dict(wrong)
        del wrong["head.weight"]
        assert engine.module.load_state_dict(wrong, strict=False).missing_keys == ["head.weight"]
        check_same(train(engine), train_plain(make()))


def test_a_state_dict_that_failed_half_way_changes_nothing(tmp_path: Path) -> None:
    """A write to a detached weight is otherwise lost."""

    def fail(*_: Any) -> None:
        raise KeyError("a hook of the user")

    with managed(tmp_path, make()) as engine:
        model: Any = engine.module
        handle = model.blocks[1].register_state_dict_post_hook(fail)
        with pytest.raises(KeyError, match="a hook of the user"):
            model.state_dict()
        handle.remove()
        model.head.weight.detach().fill_(3.0)
        assert torch.equal(model.head.weight, torch.full((128, DIM), 3.0))


def test_initialisers_work_on_whole_weights(tmp_path: Path) -> None:
    def start(model: Any) -> None:
        torch.manual_seed(5)
        with torch.no_grad():
            for name, param in model.named_parameters():
                nn.init.orthogonal_(param) if param.dim() > 1 else nn.init.zeros_(param)
                assert param.shape == shapes[name]
            model.wte.weight[0].zero_()
            model.wpe.weight.data.normal_(0, 0.02)

    shapes = {name: param.shape for name, param in make().named_parameters()}
    plain = make()
    start(plain)
    with managed(tmp_path, make()) as engine:
        start(engine.module)
        check_same(train(engine), train_plain(plain))


def test_shapes_and_counts_are_true(tmp_path: Path) -> None:
    plain = make()
    with managed(tmp_path, make()) as engine:
        model: Any = engine.module
        for each in (model, engine):
            for param, want in zip(each.parameters(), plain.parameters(), strict=True):
                assert (param.shape, param.numel(), param.dtype) == (want.shape, want.numel(), want.dtype)
        assert repr(model) == repr(plain)
        wrapped = nn.Sequential(model.head, nn.Linear(128, 2))  # as adapters do
        assert [tuple(p.shape) for p in wrapped.parameters()] == [(128, DIM), (2, 128), (2,)]


class Odd(nn.Module):
    """Parameters of every awkward shape."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.turned = nn.Parameter(torch.randn(DIM, 32).t())
        self.listed = nn.ParameterList([torch.randn(DIM), torch.randn(1, 1, DIM)])
        self.lstm = nn.LSTM(DIM, DIM, 2, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x * self.scale + self.listed[0] * self.listed[1][0]) @ self.turned.t() + self.empty.sum()
        return self.normed(self.lstm(F.pad(x, (0, 32))[None])[0])


@both_devices
def test_awkward_parameters(tmp_path: Path, place: tuple[str, str, str]) -> None:
    def make_odd() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(Odd()), nn.Sequential(Odd()))

    def fn(model: Any, step: int) -> torch.Tensor:
        loss: torch.Tensor = model[1](model[0](rows(step))[0]).pow(2).mean()
        return loss

    same_as_pytorch(tmp_path, make_odd, fn, place=place)


def test_functional_transforms(tmp_path: Path) -> None:
    def fn(model: Any, step: int) -> torch.Tensor:
        x = rows(step)
        scaled = {name: param * 1.5 for name, param in model.named_parameters()}
        called = torch.func.functional_call(model, scaled, (x,))
        return called.pow(2).mean() + torch.func.vmap(model)(x).pow(2).mean()

    same_as_pytorch(tmp_path, layers, fn, extra=100_000)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # PyTorch's own, while it compiles
@pytest.mark.parametrize(("when", "backend"), [("before", "aot_eager"), ("after", "eager")])
def test_compiled_blocks(tmp_path: Path, when: str, backend: str) -> None:
    """Each block compiled, before the model is taken over or after."""
    torch._dynamo.reset()
    model = make(layers=2)
    model.blocks[0].requires_grad_(False)
    if when == "before":
        for block in model.blocks:
            block.compile(backend=backend)
    with managed(tmp_path, model) as engine:
        if when == "after":
            for block in model.blocks:
                block.compile(backend=backend)
        got = train(engine, steps=2)
    plain = make(layers=2)
    plain.blocks[0].requires_grad_(False)
    check_same(got, train_plain(plain, steps=2))
