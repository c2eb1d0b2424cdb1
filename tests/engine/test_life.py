"""What users do to a model besides training it: writes, views, evaluation, copies, exceptions, the end."""

from __future__ import annotations

import copy
import functools
import gc
import io
import random
import signal
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import swapio
from swapio.zero import find_units
from swapio.zero._away import AwayParameter, placeholder

from . import models
from .models import batch, check_same, config, make, smallest_budget, train, train_plain, with_budget


@pytest.fixture(params=["cpu", "simulated"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[swapio.Engine]:
    """A small GPT with everything on NVMe and two units' worth of memory beyond the minimum."""
    settings = config(tmp_path, device=request.param)
    budget = smallest_budget(make(), settings) + 2 * models.largest_unit(make())
    with swapio.initialize(model=make(), config=with_budget(settings, budget))[0] as engine:
        yield engine


def reference(write: Any, steps: int = 3) -> tuple[list[float], list[torch.Tensor]]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    losses = []
    for step in range(steps):
        loss = models.plain_loss(model, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        write(model)
    return losses, models.values(model)


def _mul(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].fc1.weight.mul_(0.5)


def _data_add(model: Any) -> None:
    model.blocks[1].fc1.weight.data.add_(0.25)


def _numpy(model: Any) -> None:
    model.blocks[0].qkv.bias.detach().numpy()[3:7] = 0.125


def _setitem(model: Any) -> None:
    with torch.no_grad():
        model.wte.weight[5] = 0.0


def _replace_data(model: Any) -> None:
    model.blocks[2].out.weight.data = torch.full((models.DIM, models.DIM), 0.01)


def _copy(model: Any) -> None:
    with torch.no_grad():
        model.head.weight.copy_(torch.ones_like(model.head.weight) * 0.02)
        nn.init.zeros_(model.ln.bias)


def _load(model: Any) -> None:
    model.load_state_dict({k: v * 0.75 for k, v in model.state_dict().items()})


@pytest.mark.parametrize("write", [_mul, _data_add, _numpy, _setitem, _replace_data, _copy, _load])
def test_writes_are_not_lost(engine: swapio.Engine, write: Any) -> None:
    losses = []
    for step in range(3):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        write(engine.module)
    check_same((losses, models.values(engine.module)), reference(write))


def test_write_inside_forward_is_not_lost(engine: swapio.Engine) -> None:
    def clamp(module: nn.Module, args: Any) -> None:
        module.fc1.weight.data.clamp_(-0.01, 0.01)  # type: ignore[union-attr]

    engine.module.blocks[1].register_forward_pre_hook(clamp)  # type: ignore[index, union-attr, operator]
    plain = make()
    plain.blocks[1].register_forward_pre_hook(clamp)
    check_same(train(engine), train_plain(plain))


def test_bf16_write_makes_the_weight_the_master(tmp_path: Path) -> None:
    """Zeros written over weights whose masters have negative low halves once made NaN masters."""
    settings = config(tmp_path, dtype="bf16")
    with swapio.initialize(model=make(), config=with_budget(settings, smallest_budget(make(), settings)))[0] as engine:
        train(engine, steps=2)
        with torch.no_grad():
            for param in engine.module.parameters():
                param.zero_()
        train(engine, steps=1)
        for name, value in engine.module.state_dict().items():
            assert torch.isfinite(value).all(), name
            assert value.abs().max() <= 0.011, name


def test_view_held_across_steps_stays_the_weight(engine: swapio.Engine) -> None:
    weight = engine.module.blocks[1].fc1.weight  # type: ignore[index, union-attr]
    view = weight.data.t()
    before = view.clone()
    got = train(engine, steps=3)
    check_same(got, train_plain(make(), steps=3))
    assert not torch.equal(view, before)
    assert torch.equal(view, weight.detach().t())


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_a_write_while_a_view_is_held_is_stepped(tmp_path: Path, device: str) -> None:
    """With room for a host copy beside the device's, the optimizer on the host once stepped the bytes from before the write."""
    losses = []
    with swapio.initialize(model=make(), config=config(tmp_path, device=device))[0] as engine:
        model: Any = engine.module
        view = model.blocks[1].fc1.weight.data
        for step in range(3):
            loss = engine(*batch(step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            view.mul_(0.5)
        check_same((losses, models.values(model)), reference(_mul))


def test_data_replaced_while_a_view_is_held_is_stepped(engine: swapio.Engine) -> None:
    """The step once updated the old data, and the new one took its place afterwards, without the update."""

    def replace(model: Any) -> torch.Tensor:
        weight = model.blocks[1].fc1.weight
        view: torch.Tensor = weight.data
        weight.data = torch.full_like(view, 0.01)
        return view

    got = []
    for model in (engine.module, make()):
        optimizer = (
            engine.optimizer if model is engine.module else torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, fused=True)
        )
        assert optimizer is not None
        losses, views = [], []
        for step in range(3):
            loss = models.plain_loss(model, step)
            loss.backward()
            views.append(replace(model))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        got.append((losses, models.values(model)))
    check_same(*got)


def test_views_beyond_the_budget_are_named(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with swapio.initialize(model=make(), config=with_budget(settings, smallest_budget(make(), settings)))[0] as engine:
        train(engine, steps=1)
        with pytest.raises(swapio.BudgetError, match=r"cannot go: .*(in use|view is held)"):
            views = [p.data for p in engine.module.parameters()]
            train(engine, steps=2)
            del views


def test_metadata_needs_no_fetch(engine: swapio.Engine) -> None:
    engine.zero.detach_idle()
    engine.manager.flush().wait()
    events: list[str] = []
    engine.manager.mover.on_event = lambda kind, key: events.append(kind)
    for param, plain in zip(engine.module.parameters(), make().parameters(), strict=True):
        assert type(param) is AwayParameter
        assert (param.shape, param.dtype, param.numel(), param.requires_grad, param.is_leaf) == (
            plain.shape, plain.dtype, plain.numel(), True, True,
        )  # fmt: skip
    assert not events
    assert all(not u.attached for u in engine.zero.units)


def test_evaluation_in_between(engine: swapio.Engine) -> None:
    losses = []
    for step in range(3):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.eval()
        with torch.no_grad():
            engine(*batch(100))
        with torch.inference_mode():
            engine.module(*batch(101))
        engine.train()
        with torch.no_grad():
            engine(*batch(102))
    check_same((losses, models.values(engine.module)), train_plain(make(), steps=3))


def test_gradients_are_seen_and_taken(engine: swapio.Engine) -> None:
    plain = make()
    models.plain_loss(plain, 0).backward()  # type: ignore[no-untyped-call]
    engine.backward(engine(*batch(0)))
    for param, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None
        assert want.grad is not None
        assert torch.equal(param.grad, want.grad)
    engine.zero_grad()
    assert all(p.grad is None for p in engine.module.parameters())
    engine.step()
    for param, want in zip(engine.module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, want), "a parameter without a gradient was stepped"


def test_autograd_grad_and_double_backward(engine: swapio.Engine) -> None:
    plain = make()
    want = torch.autograd.grad(models.plain_loss(plain, 0), list(plain.parameters()))
    got = torch.autograd.grad(engine(*batch(0)), list(engine.module.parameters()))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    loss = engine(*batch(0))
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    for param, grad in zip(engine.module.parameters(), want, strict=True):
        assert torch.equal(param.grad, grad + grad)  # type: ignore[arg-type]


def test_backward_after_a_step_raises_as_in_pytorch(engine: swapio.Engine) -> None:
    first = engine(*batch(0))
    engine.backward(engine(*batch(1)))
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.backward(first)


def test_activation_changed_in_place_raises(engine: swapio.Engine) -> None:
    model: Any = engine.module
    hidden = model.blocks[0](model.embed(batch(0)[0]))
    out = model.ln(hidden).sum()
    with torch.no_grad():
        hidden.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_copies_are_plain(engine: swapio.Engine) -> None:
    train(engine, steps=1)
    want = models.values(engine.module)
    clone = copy.deepcopy(engine.module)
    stream = io.BytesIO()
    torch.save(engine.module.state_dict(), stream)
    stream.seek(0)
    loaded = torch.load(stream)
    assert all(type(p) is nn.Parameter for p in clone.parameters())
    for a, b, c in zip(want, models.values(clone), loaded.values(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_exceptions_leave_nothing_behind(engine: swapio.Engine) -> None:
    class Stop(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    handle = engine.module.blocks[1].fc1.register_forward_pre_hook(stop)  # type: ignore[index, union-attr, operator]
    with pytest.raises(Stop):
        engine(*batch(0))
    handle.remove()
    assert engine.zero.depth == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert all(u.pins == 0 for u in engine.zero.units)
    check_same(train(engine), train_plain(make()))


def test_converting_a_managed_model_is_refused(engine: swapio.Engine) -> None:
    engine.module.blocks[0].fc1.weight.data = torch.zeros(2, 2)  # type: ignore[index, union-attr]
    with pytest.raises(swapio.UsageError, match=r"blocks\.0\.fc1\.weight"):
        engine.step()
        engine(*batch(0))
    engine._failed = True


def test_nonfinite_gradient_skips_the_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = config(tmp_path, dtype="bf16")
    with swapio.initialize(model=make(), config=settings)[0] as engine:
        train(engine, steps=2)
        before = models.values(engine.module)
        loss = engine(*batch(0)) * float("inf")
        engine.backward(loss)
        engine.step()
        assert (engine.was_step_applied(), engine.skipped_steps, engine.global_steps) == (False, 1, 3)
        assert "not finite" in caplog.text
        for a, b in zip(before, models.values(engine.module), strict=True):
            assert torch.equal(a, b)
        train(engine, steps=1)


def test_close_gives_ordinary_parameters_back(tmp_path: Path) -> None:
    model = make()
    engine = swapio.initialize(model=model, config=config(tmp_path))[0]
    train(engine, steps=2)
    engine.close()
    engine.close()
    want = train_plain(make(), steps=2)[1]
    assert all(type(p) is nn.Parameter for p in model.parameters())
    for a, b in zip(models.values(model), want, strict=True):
        assert torch.equal(a, b)
    models.plain_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(swapio.ClosedError):
        engine(*batch(0))


def test_close_below_the_models_size_says_what_to_do(tmp_path: Path) -> None:
    model = make()
    engine = swapio.initialize(model=model, config=config(tmp_path))[0]
    engine._restore_nbytes = 1 << 60
    engine.close()
    assert model.head.weight.shape == (models.VOCAB, models.DIM)
    with pytest.raises(swapio.ClosedError, match="state_dict"):
        model(*batch(0))


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    def threads() -> set[str]:
        return {t.name for t in threading.enumerate() if t.name.startswith("swapio")}

    def fds() -> set[str]:
        return {str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.exists() and str(tmp_path) in str(p.readlink())}

    assert not threads()
    engine = swapio.initialize(model=make(), config=config(tmp_path))[0]
    train(engine, steps=1)
    assert threads()
    assert fds()
    engine.close()
    assert not threads()
    assert not fds()
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_a_deleted_engine_ends_its_threads(tmp_path: Path) -> None:
    model = make()
    engine = swapio.initialize(model=model, config=config(tmp_path))[0]
    manager = engine.manager
    del engine
    gc.collect()
    assert manager.closed
    with pytest.raises(swapio.ClosedError):
        model(*batch(0))


def test_budget_one_byte_short_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path)
    smallest = smallest_budget(make(), settings)
    model = make()
    with pytest.raises(swapio.BudgetError, match=str(smallest)):
        swapio.initialize(model=model, config=with_budget(settings, smallest - 1))
    assert all(type(p) is nn.Parameter for p in model.parameters())
    with swapio.initialize(model=model, config=with_budget(settings, smallest))[0] as engine:
        check_same(train(engine), train_plain(make()))


def test_refusals(tmp_path: Path) -> None:
    settings = config(tmp_path)
    with pytest.raises(swapio.ConfigError, match="DataParallel"):
        swapio.initialize(model=nn.DataParallel(make()), config=settings)
    with pytest.raises(swapio.ConfigError, match="AdamW"):
        model = make()
        swapio.initialize(model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=settings)
    with pytest.raises(swapio.ConfigError, match="not in the model"):
        swapio.initialize(model=make(), optimizer=torch.optim.AdamW(make().parameters()), config=settings)
    with pytest.raises(swapio.ConfigError, match="float32, bfloat16 and float16"):
        swapio.initialize(model=make().double(), config=settings)
    with swapio.initialize(model=(model := make()), config=settings)[0], pytest.raises(swapio.ConfigError, match="plain"):
        swapio.initialize(model=model, config=settings)


def test_the_optimizer_given_is_the_engines(tmp_path: Path) -> None:
    model = make()
    given = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    settings = config(tmp_path)
    del settings["optimizer"]
    engine, optimizer, _, _ = swapio.initialize(model=model, optimizer=given, config=settings)
    with engine:
        losses = []
        for step in range(5):
            loss = engine(*batch(step))
            loss.backward()
            (given if step % 2 else optimizer).step()
            optimizer.zero_grad()
            losses.append(loss.item())
        check_same((losses, models.values(model)), train_plain(make()))
        for either in (optimizer, given):  # with the one given it was once silent, and the group never trained
            with pytest.raises(swapio.UsageError, match="param groups are fixed"):
                either.add_param_group({"params": []})


@pytest.mark.parametrize("layer", [nn.Linear(4, 4), nn.Conv1d(4, 4, 1), nn.LayerNorm(4)])
def test_an_input_of_another_dtype_is_named(tmp_path: Path, layer: nn.Module) -> None:
    x = torch.randn(4, 4)
    with swapio.initialize(model=layer, config=config(tmp_path, dtype="bf16"))[0] as engine:
        engine(x.bfloat16())
        with pytest.raises(swapio.UsageError, match=r"an input is torch\.float32, but the weights are torch\.bfloat16: convert it"):
            engine(x)
        with pytest.raises(RuntimeError, match=r"shapes|channels|normalized"):
            engine(torch.randn(3, 3, dtype=torch.bfloat16))


def test_placeholders_keep_no_memory() -> None:
    away = placeholder(torch.float32, torch.device("cpu"), (1000, 1000))
    assert away.untyped_storage().nbytes() == 4
    assert torch.isnan(away).all()


def test_an_interrupt_never_leaves_placeholders_for_weights(tmp_path: Path) -> None:
    """It once could: half a detach made NaN the user's data, and an open section left the mode that skips the fetch."""
    settings = config(tmp_path)
    model = make()
    x = batch(0)
    old = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    pause = random.Random(5)
    try:
        with swapio.initialize(model=model, config=with_budget(settings, smallest_budget(make(), settings)))[0] as engine:
            with torch.no_grad():
                want = engine(*x).item()
            interrupts = 0
            for _ in range(60):
                try:
                    signal.setitimer(signal.ITIMER_REAL, pause.uniform(1e-4, 8e-3))
                    try:
                        engine.backward(engine(*x))
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except KeyboardInterrupt:
                    interrupts += 1
                engine.zero_grad()
                assert torch.is_grad_enabled()
                assert torch._C._is_torch_function_enabled()
            assert interrupts
            with torch.no_grad():
                assert engine(*x).item() == want
            check_same(train(engine, steps=2), train_plain(make(), steps=2))
    finally:
        signal.signal(signal.SIGALRM, old)


def test_zero_grad_drops_what_an_interrupt_left(tmp_path: Path) -> None:
    """An interrupt between autograd and the hook left a gradient in the parameter, and the next one was added to it."""
    with swapio.initialize(model=make(), config=config(tmp_path))[0] as engine:
        weight = engine.module.get_parameter("blocks.1.fc1.weight")
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.grad.__set__(weight, torch.ones(weight.shape))  # type: ignore[attr-defined]
        engine.zero_grad()
        check_same(train(engine, steps=2), train_plain(make(), steps=2))


def test_copies_are_free_of_the_engine(tmp_path: Path) -> None:
    engine = swapio.initialize(model=make(), config=config(tmp_path))[0]
    clone = copy.deepcopy(engine.module)
    stream = io.BytesIO()
    torch.save(engine.module, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    want = engine(*batch(0)).item()
    engine.abandon()
    assert clone(*batch(0)).item() == want
    assert loaded(*batch(0)).item() == want
    assert set(clone.state_dict()) == set(loaded.state_dict())


def test_what_would_be_silently_wrong_is_an_error(tmp_path: Path) -> None:
    tied = make()
    tied.blocks[0].fc1.weight.data = tied.blocks[1].fc1.weight.data  # type: ignore[union-attr]
    with pytest.raises(swapio.ConfigError, match="share memory"):
        swapio.initialize(model=tied, config=config(tmp_path))
    model = make()
    model.ln.requires_grad_(False)
    settings = config(tmp_path)
    del settings["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters())
    with swapio.initialize(model=model, optimizer=optimizer, config=settings)[0] as engine:
        with pytest.raises(swapio.UsageError, match="create_graph"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, of a reference cycle
            engine(*batch(0)).backward(create_graph=True)
        engine.zero_grad()
        model.ln.requires_grad_(True)
        engine.backward(engine(*batch(0)))
        with pytest.raises(swapio.UsageError, match=r"'ln\.weight' was frozen"):
            engine.step()
    with (
        swapio.initialize(model=make(), config={"swapio": {"device": "cpu"}})[0] as engine,
        pytest.raises(swapio.UsageError, match="no opt"),
    ):
        engine.step()


def test_engines_share_a_manager_and_leave_nothing_in_it(tmp_path: Path) -> None:
    with swapio.SwapManager([tmp_path], host_memory="16MiB", timeout_s=20) as manager:
        settings = config(tmp_path)
        first = swapio.initialize(model=make(), config=settings, manager=manager)[0]
        second = swapio.initialize(model=make(), config=settings, manager=manager)[0]
        check_same(train(first, steps=2), train(second, steps=2))
        first.close()
        second.abandon()
        gc.collect()
        assert manager.keys() == []
        assert manager.stats()["host_memory_used"] == 0


def test_closing_holds_the_weights_once(tmp_path: Path) -> None:
    """The store and the copies given back once lay in memory together, whole."""
    settings = config(tmp_path)
    model = make(layers=6)
    engine = swapio.initialize(model=model, config=with_budget(settings, smallest_budget(make(layers=6), settings)))[0]
    train(engine, steps=1)
    given_back, most = 0, 0
    restore = type(engine.zero.units[0]).restore

    def watched(unit: Any, value: Any) -> None:
        nonlocal given_back, most
        restore(unit, value)
        given_back += unit.layout.nbytes
        most = max(most, given_back + engine.manager.arena.mapped_nbytes)

    for unit in engine.zero.units:
        unit.restore = functools.partial(watched, unit)  # type: ignore[method-assign]
    engine.close()
    assert given_back <= most <= given_back + 2 * models.largest_unit(model)


@pytest.mark.parametrize("patterns", [(), ("blocks.0",)])
def test_finding_units_leaves_no_cycle(patterns: tuple[str, ...], request: pytest.FixtureRequest) -> None:
    """A model that was dropped once waited for the garbage collector."""
    gc.disable()
    request.addfinalizer(gc.enable)
    model = make(layers=1)
    alive = weakref.ref(model)
    find_units(model, patterns)
    del model
    assert alive() is None
