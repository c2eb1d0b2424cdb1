"""Engines that come and go: many, several at once, half made, interrupted, forgotten, in other processes."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import multiprocessing
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import swapio
from swapio.io import MemoryStorage
from swapio.testing import FaultyStorage
from tests.engine.models import batch, check_same, config, make, smallest_budget, train, train_plain, values

from .compare import PLACES, both_devices, layers, managed, mean_square, plain_adamw, rows


def left(path: Path) -> list[str]:
    """Files, open files under `path`, and threads of the package."""
    files = [str(p) for p in path.rglob("*") if p.is_file()]
    opened = [str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink() and str(path) in str(p.readlink())]
    return files + opened + [t.name for t in threading.enumerate() if t.name.startswith("swapio")]


@pytest.mark.parametrize("end", ["closed", "deleted"])
def test_twenty_engines_one_after_the_other(tmp_path: Path, end: str, request: pytest.FixtureRequest) -> None:
    process = psutil.Process()
    made: list[weakref.ref[Any]] = []
    resident = []
    gc.collect()
    gc.freeze()  # collections need not look at what was there before
    request.addfinalizer(gc.unfreeze)
    for _ in range(20):
        model = make(layers=2)
        made += [weakref.ref(thing) for thing in (model, *model.parameters())]
        engine = swapio.initialize(model=model, config=config(tmp_path))[0]
        train(engine, steps=1)
        if end == "closed":
            engine.close()
        del engine, model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        resident.append(process.memory_info().rss)
        assert not left(tmp_path)
    assert not [each for each in made if each() is not None]
    assert resident[-1] - resident[5] < 4 << 20, "a quarter of what these engines held"


@both_devices
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "none"])
def test_closing_does_not_depend_on_the_optimizer(tmp_path: Path, optimizer: str, place: tuple[str, str, str]) -> None:
    settings = config(tmp_path, params=place[0], state=place[1], device=place[2], optimizer={"type": optimizer, "params": {"lr": 0.1}})
    if optimizer == "none":
        del settings["optimizer"]
    model = layers()
    engine = swapio.initialize(model=model, config=settings)[0]
    engine.backward(mean_square(engine, 0))
    engine.close()
    assert not left(tmp_path)
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())


def half_frozen() -> nn.Sequential:
    """Two trained units and a frozen one, with a buffer; numbers that bfloat16 rounds to even, and in both ways."""
    model = layers()
    model[2].requires_grad_(False).register_buffer("scale", torch.rand(3))
    with torch.no_grad():
        for layer in (model[0][0], model[2][0]):  # type: ignore[index]
            bits = layer.weight.view(torch.int32)
            bits[:, ::2] = bits[:, ::2] & -0x10000 | 0x8000
            layer.weight[0, :4] = torch.tensor([0.0, -0.0, float("inf"), -3.4028234663852886e38])
    return model


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_failures_at_each_stage_of_initialize(tmp_path: Path, dtype: str) -> None:
    """The n-th call of the storage fails, for every n: that error alone comes out, and nothing stays behind."""
    settings = config(tmp_path, dtype=dtype)
    budget = smallest_budget(half_frozen(), settings)
    for number in range(100):
        model = half_frozen()
        storage = FaultyStorage(MemoryStorage())
        calls = iter(range(100))
        storage.fail = lambda action, name, calls=calls, number=number: errno.EIO * (next(calls) == number)  # type: ignore[misc]
        with swapio.SwapManager(storage=storage, host_memory=budget, timeout_s=20) as manager:
            try:
                engine = swapio.initialize(model=model, config=settings, manager=manager)[0]
            except swapio.StorageError as error:
                assert error.errno == errno.EIO
                assert not isinstance(error.__cause__, swapio.SwapioError)
                assert manager.keys() == []
                assert manager.stats()["host_memory_used"] == 0
                assert all(type(p) is nn.Parameter for p in model.parameters())
                check_same(([], values(model)), ([], values(half_frozen())))
                continue
            engine.abandon()
            break
    assert number >= 4, "nothing was made to fail"
    gc.collect()
    assert not left(tmp_path)


def fail(*_: Any) -> Any:
    raise KeyError("a scheduler of the user")


def test_a_failing_scheduler_undoes_initialize(tmp_path: Path) -> None:
    model = layers()
    with pytest.raises(KeyError, match="a scheduler of the user"):
        swapio.initialize(model=model, config=config(tmp_path), lr_scheduler=fail)
    assert not left(tmp_path)
    with swapio.initialize(model=model, config=config(tmp_path))[0] as engine:
        check_same(train(engine, mean_square, steps=2), train_plain(layers(), mean_square, steps=2))


def test_a_failed_initialize_gives_the_fp32_weights_back(tmp_path: Path) -> None:
    model = half_frozen()
    buffer = model[2].scale
    with pytest.raises(KeyError, match="a scheduler of the user"):
        swapio.initialize(model=model, config=config(tmp_path, dtype="bf16"), lr_scheduler=fail)
    check_same(([], values(model)), ([], values(half_frozen())))
    assert model[2].scale is buffer


def test_initialize_again_after_the_end(tmp_path: Path) -> None:
    """The same model goes on, with new optimizer state."""
    model, plain = layers(), layers()
    for place in PLACES:
        with managed(tmp_path, model, place=place, extra=100_000) as engine:
            check_same(train(engine, mean_square, steps=2), train_plain(plain, mean_square, steps=2))


def test_a_student_and_a_frozen_teacher(tmp_path: Path) -> None:
    """Each in an engine, in one directory, the teacher without an optimizer; the student outlives it."""

    def distance(student: Any, teacher: Any, step: int) -> torch.Tensor:
        with torch.no_grad():
            want = teacher(rows(step))
        loss: torch.Tensor = (student(rows(step)) - want).pow(2).mean()
        return loss

    plain, plain_teacher = layers(), layers(seed=1)
    optimizer = plain_adamw(plain)
    settings = config(tmp_path)
    del settings["optimizer"]
    teacher = swapio.initialize(model=layers(seed=1).requires_grad_(False).eval(), config=settings)[0]
    with managed(tmp_path, layers()) as engine:
        with teacher:
            for step in range(3):
                engine.backward(distance(engine, teacher, step))
                engine.step()
                distance(plain, plain_teacher, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            assert teacher.stats()["gradient_bytes"] == 0
        check_same(([], values(engine.module)), ([], values(plain)))
        train(engine, mean_square, steps=1)
    assert not left(tmp_path)


def test_two_engines_in_one_loss(tmp_path: Path) -> None:
    plain = [layers(), layers(seed=1)]
    optimizers = [plain_adamw(model) for model in plain]
    with managed(tmp_path, layers()) as one, managed(tmp_path, layers(seed=1)) as other:
        for step in range(3):
            one.backward(mean_square(one, step) * mean_square(other, step))
            (mean_square(plain[0], step) * mean_square(plain[1], step)).backward()  # type: ignore[no-untyped-call]
            one.step()
            other.step()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        check_same(([], values(one.module)), ([], values(plain[0])))
        check_same(([], values(other.module)), ([], values(plain[1])))


def test_two_engines_in_two_threads(tmp_path: Path) -> None:
    models = [layers(), layers(seed=1)]
    results: dict[int, Any] = {}

    def run(number: int) -> None:
        with managed(tmp_path / str(number), models[number]) as engine:
            results[number] = train(engine, mean_square, steps=10)

    for number in range(2):
        (tmp_path / str(number)).mkdir()
    threads = [threading.Thread(target=run, args=(number,), name=f"test {number}") for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for number in range(2):
        check_same(results[number], train_plain(layers(seed=number), mean_square, steps=10))


class Fails(torch.autograd.Function):
    """Raises in its backward."""

    error: BaseException = ValueError("an error of the user")

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise Fails.error


@both_devices
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("forward", ValueError("mine")),
        ("backward", ValueError("mine")),
        ("recomputation", ValueError("mine")),
        ("forward", KeyboardInterrupt("mine")),
        ("backward", KeyboardInterrupt("mine")),
        ("recomputation", KeyboardInterrupt("mine")),
    ],
)
def test_training_goes_on_after_an_exception(
    tmp_path: Path, where: str, error: BaseException, place: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def hook(module: nn.Module, args: tuple[torch.Tensor]) -> Any:
        nonlocal calls
        calls += 1
        if where == "backward":
            return Fails.apply(args[0] * 2)  # type: ignore[no-untyped-call]
        if where == "forward" or calls == 2:
            raise error
        return args

    def fn(model: Any, step: int) -> torch.Tensor:
        x = rows(step)
        for layer in model:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return x.pow(2).mean()

    monkeypatch.setattr(Fails, "error", error)
    plain = layers()
    before = train_plain(plain, fn, steps=2)
    with managed(tmp_path, layers(), place=place) as engine:
        check_same(train(engine, fn, steps=2), before)
        handle = engine.module[1].register_forward_pre_hook(hook)  # type: ignore[index, union-attr, operator]
        with pytest.raises(type(error), match="mine"):
            engine.backward(fn(engine.module, 7) if where == "recomputation" else mean_square(engine, 7))
        handle.remove()
        engine.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        check_same(([], values(engine.module)), ([], before[1]))
        fresh = layers()
        fresh.load_state_dict(plain.state_dict())
        engine.backward(fn(engine.module, 8))
        fn(fresh, 8).backward()  # type: ignore[no-untyped-call]
        for param, want in zip(engine.module.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(param.grad, want.grad)  # type: ignore[arg-type]


def test_a_refused_call_does_not_cost_the_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(64, 64, sparse=True), nn.Linear(64, 64))
    engine = swapio.initialize(model=model, config=config(tmp_path))[0]
    with pytest.raises(swapio.UsageError, match="sparse=False"):
        engine.backward(engine(torch.arange(4)).sum())
    engine.close()
    assert all(type(p) is nn.Parameter for p in model.parameters())


@both_devices
def test_conversions_that_change_nothing(tmp_path: Path, place: tuple[str, str, str]) -> None:
    with managed(tmp_path, layers(), place=place) as engine:
        engine.module.float().to("cpu")
        engine.to(torch.float32)
        engine.module.requires_grad_(True).train().share_memory()
        check_same(train(engine, mean_square), train_plain(layers(), mean_square))


@pytest.mark.parametrize("place", [PLACES[0], PLACES[2], PLACES[4]], ids="-".join)
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double, nn.Module.bfloat16])
def test_a_converted_model_is_refused_before_it_is_stepped(
    tmp_path: Path, convert: Callable[[nn.Module], nn.Module], place: tuple[str, str, str]
) -> None:
    with managed(tmp_path, layers(), place=place) as engine:
        train(engine, mean_square, steps=1)
        with pytest.raises(swapio.UsageError, match=r"'0\.0\.weight' became .* Convert or resize the model before"):
            convert(engine.module)
            train(engine, mean_square, steps=1)
        engine.abandon()


class Items(Dataset[torch.Tensor | str]):
    """Two items, made with a model if there is one; or what its engine says to that."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor | str:
        if self.model is None:
            return rows(index)
        try:
            with torch.no_grad():
                out: torch.Tensor = self.model(rows(index))
        except swapio.ForkError as error:
            return str(error)
        return out


def loader(items: Items, method: str) -> DataLoader[torch.Tensor | str]:
    context = multiprocessing.get_context(method)
    return DataLoader(items, batch_size=None, num_workers=1, multiprocessing_context=context, timeout=100)


def test_forked_workers(tmp_path: Path) -> None:
    """They live and die beside an engine without touching it; with the model, they are told."""
    with managed(tmp_path, layers()) as engine:
        losses = []
        for epoch in range(2):
            for index, item in enumerate(loader(Items(), "fork")):
                loss = engine(item).pow(2).mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                assert torch.equal(item, rows(index)), epoch
        engine(rows(0))  # now the first layers are away
        assert ["belongs to the parent" in str(item) for item in loader(Items(engine.module), "fork")] == [True, True]
        got = values(engine.module)
    check_same((losses, got), train_plain(layers(), lambda model, step: mean_square(model, step % 2), steps=4))


@pytest.mark.slow
def test_spawned_workers(tmp_path: Path) -> None:
    """A model sent to another process is an ordinary one there."""
    with managed(tmp_path, layers()) as engine:
        train(engine, mean_square, steps=1)
        want = [engine(rows(index)) for index in range(2)]
        for item, expected in zip(loader(Items(engine.module), "spawn"), want, strict=True):
            assert torch.equal(item, expected)


def test_training_data_of_initialize(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings["train_batch_size"] = 4
    engine, _, data, _ = swapio.initialize(model=layers(), config=settings, training_data=TensorDataset(rows(0, 8)))
    with engine:
        assert [x.shape for (x,) in data] == [(4, 64), (4, 64)]


def test_copies_of_a_model_need_no_engine(tmp_path: Path) -> None:
    model = make(layers=2, tied=True)
    with managed(tmp_path, model) as engine:
        train(engine, steps=2)
        engine.backward(engine(*batch(9)))
        want, copies = values(model), [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for copied in copies:
        check_same(([], values(copied)), ([], want))
        assert copied.head.weight is copied.wte.weight
        assert all(type(p) is nn.Parameter and p.grad is None for p in copied.parameters())
        copied(*batch(0)).backward()


@pytest.mark.parametrize("copier", [copy.deepcopy, pickle.dumps])
def test_copying_an_engine_says_what_can_be_copied(tmp_path: Path, copier: Callable[[Any], Any]) -> None:
    with managed(tmp_path, layers()) as engine, pytest.raises(swapio.UsageError, match=r"\.module"):
        copier(engine)


@pytest.mark.slow
def test_a_program_that_fails_without_closing_ends(tmp_path: Path) -> None:
    """With its own error only, and nothing is left."""
    script = (
        "import sys; from pathlib import Path; import swapio; from tests.reports.compare import *\n"
        "engine = swapio.initialize(model=layers(), config=config(Path(sys.argv[1])))[0]\n"
        "engine.backward(mean_square(engine, 0))\n"
        "raise KeyError('the program')\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=root, timeout=100)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "KeyError: 'the program'"
    assert done.stderr.count("Error") == 1
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]
