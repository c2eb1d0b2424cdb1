"""A run that was saved and loaded goes on as if nothing had happened, wherever its tensors rest."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import swapio
from swapio.checkpoint import inspect
from swapio.optim import round_bf16
from tests.engine.models import smallest_budget
from tests.ranks import launch

from .work import Net, Snapshot, engine_of, load_and_train, make, rest, same, settings, snapshot, train, train_shared

PLACES = ("none", "cpu", "nvme")


@pytest.mark.parametrize(("dtype", "timing"), [("fp32", "in_backward"), ("bf16", "in_forward"), ("fp16", "at_step")])
@pytest.mark.parametrize("pair", list(itertools.product(PLACES, repeat=2)), ids="-".join)
def test_the_same_bits(tmp_path: Path, pair: tuple[str, str], dtype: str, timing: str) -> None:
    with engine_of(tmp_path, params=pair[0], state=pair[1], dtype=dtype, timing=timing) as engine:
        train(engine, 0, 3)
        engine.module.note = "old"
        assert engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": [1]})
        saved = snapshot(engine)
        want = train(engine, 3, 6), snapshot(engine), rest(engine)
    assert dtype != "fp16" or want[2][2] > 0  # a step was skipped
    other = PLACES[(PLACES.index(pair[0]) + 1) % 3], PLACES[(PLACES.index(pair[1]) + 1) % 3]
    for params, state in (pair, other):
        with engine_of(tmp_path, seed=5, params=params, state=state, dtype=dtype, timing=timing) as engine:
            train(engine, 0, 1)
            path, client_state = engine.load_checkpoint(tmp_path / "saved")
            assert (path, client_state) == (str(tmp_path / "saved" / "global_step3"), {"epoch": [1]})
            same(snapshot(engine), saved)
            assert train(engine, 3, 6) == want[0]
            same(snapshot(engine), want[1])
            assert rest(engine) == want[2]


def alike(a: Snapshot, b: Snapshot, rank: int) -> None:
    """The same, but for the buffer that each rank fills from its own batches; rank 0's is saved."""
    same(*({k: v for k, v in each.items() if rank == 0 or k != "weight seen"} for each in (a, b)))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype", "num_ranks"), [(1, "fp32", 3), (3, "bf16", 3), (3, "fp32", 2), (1, "bf16", 2)])
def test_numbers_of_ranks_and_stages(tmp_path: Path, stage: int, dtype: str, num_ranks: int) -> None:
    """What two ranks saved: the same state on one and on others, in new processes; at the same number of ranks the same run too."""
    module, path, directory = "tests.checkpoint.work", str(tmp_path), str(tmp_path / "saved")
    saved = launch.run("train_and_save", 2, path, directory, stage, dtype, module=module)
    alike(saved[1][0], saved[0][0], 1)
    cases = [(0, "none", "none", dtype), (1, "cpu", "nvme", dtype), (2, "nvme", "cpu", dtype), (3, "nvme", "nvme", dtype)]
    several = launch.run("load_and_train", num_ranks, path, directory, cases, module=module)
    for results in (*several, load_and_train(0, path, directory, cases[2:])):
        for loaded, _, _ in results:
            alike(loaded, saved[0][0], 0)
    if num_ranks == 2:
        for rank, each in itertools.product(range(2), range(4)):
            if dtype == "fp32" or cases[each][0] == stage:  # 16-bit gradients are rounded where they are summed in 16 bits
                assert several[rank][each][1] == saved[rank][1]
                alike(several[rank][each][2], saved[rank][2], rank)


@pytest.mark.slow
def test_the_run_goes_on_at_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved at 2 ranks, sizes that no number of ranks divides: three steps more at 1, 3 and 4 are those at 2, but for the order of sums."""
    module, path, directory = "tests.checkpoint.work", str(tmp_path), str(tmp_path / "saved")
    places = [(3, "nvme", "nvme"), (1, "cpu", "nvme")]
    want_norm, want = launch.run("train_shared", 2, path, directory, 2, places[:1], True, module=module)[0][0]
    found = [train_shared(0, path, directory, 1, places)]
    for num_ranks in (3, 4):
        found += launch.run("train_shared", num_ranks, path, directory, num_ranks, places, module=module)
    for norm, state in itertools.chain.from_iterable(found):
        assert norm == pytest.approx(want_norm, rel=1e-5)
        assert state.keys() == want.keys()
        for name in (k for k in want if k.startswith(("master", "exp_avg"))):
            assert torch.allclose(state[name], want[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.slow
def test_all_ranks_are_told_when_one_fails(tmp_path: Path) -> None:
    told = launch.run("fail_on_one_rank", 2, str(tmp_path), str(tmp_path / "saved"), module="tests.checkpoint.work")
    for rank, (tags, write, damage) in enumerate(told):
        assert f"different tags, this one 'tag{rank}'" in tags
        assert "a weight of" in write and "GatheredParameters" in write
        assert "read of 'module." in damage and "__1_0.distcp" in damage and "not what was written" in damage
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["global_step1", "latest"]


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "fp16")], ids="-".join)
def test_weights_of_another_dtype(tmp_path: Path, dtypes: tuple[str, str]) -> None:
    """Masters and moments are the same bits; the weights are what the masters round to."""
    with engine_of(tmp_path, dtype=dtypes[0]) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved")
        saved = snapshot(engine)
    with engine_of(tmp_path, seed=5, dtype=dtypes[1]) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        loaded = snapshot(engine)
    kept = {k for k in saved if not k.startswith("weight ")}
    same({k: loaded[k] for k in kept}, {k: saved[k] for k in kept})
    rounded = {"bf16": round_bf16, "fp16": torch.Tensor.half, "fp32": torch.Tensor.float}[dtypes[1]]
    for name in (k.removeprefix("master ") for k in kept if k.startswith("master ")):
        assert torch.equal(loaded[f"weight {name}"], rounded(saved[f"master {name}"]))


def wide(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1031, 1031), nn.Linear(1031, 3))


def test_the_smallest_budget_is_enough(tmp_path: Path) -> None:
    """A parameter of more elements than a chunk; the arena counts all that the engine holds."""
    config = settings(tmp_path, params="nvme", state="nvme")
    config["swapio"]["host_memory"] = budget = smallest_budget(wide(0), config)
    del config["scheduler"]
    found = []
    for seed in range(2):
        with swapio.initialize(model=wide(seed), config=config)[0] as engine:
            engine.backward(engine(torch.full((1, 1031), 0.1)).sum())
            engine.step()
            engine.load_checkpoint(tmp_path / "saved") if seed else engine.save_checkpoint(tmp_path / "saved")
            assert engine.stats()["host_memory_peak"] <= budget
            found.append(snapshot(engine))
    same(*found)


def test_what_the_user_wrote_is_saved_and_views_show_what_is_loaded(tmp_path: Path) -> None:
    with engine_of(tmp_path, dtype="bf16") as engine:
        train(engine, 0, 1)
        with torch.no_grad():
            engine.module.first.bias.fill_(0.3)
        engine.module.first.weight.data = torch.full((97, 31), 0.7, dtype=torch.bfloat16)  # it is away
        view = engine.module.still.weight.detach()
        engine.save_checkpoint(tmp_path / "saved", tag=5)
        written = snapshot(engine)
        assert (written["master first.bias"] == torch.tensor(0.3).bfloat16()).all()
        assert (written["weight first.weight"] == torch.tensor(0.7).bfloat16()).all()
        train(engine, 1, 2)
        kept = view.clone()
        with torch.no_grad():
            engine.module.still.weight.zero_()
        assert engine.load_checkpoint(tmp_path / "saved", 5)[0] == str(tmp_path / "saved" / "5")
        same(snapshot(engine), written)
        assert torch.equal(view, kept)


def test_gradients_are_not_saved_and_are_dropped_by_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with engine_of(tmp_path) as engine:
        engine.backward(engine(torch.ones(4, 31)))
        engine.save_checkpoint(tmp_path / "saved")
        assert "between backward and step" in caplog.text
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.module.first.weight.grad is None
        assert engine.stats()["gradient_bytes"] == 0


def test_pytorch_reads_it(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved")
        seen = snapshot(engine)
    folder = tmp_path / "saved" / "global_step1"
    metadata: Any = FileSystemReader(folder).read_metadata()
    assert metadata.state_dict_metadata["module.turned"].size == (53, 7)
    dcp_to_torch_save(folder, tmp_path / "one.pt")
    whole = torch.load(tmp_path / "one.pt", weights_only=False)
    names = [n for n, p in make().named_parameters() if p.numel()]
    same({n: whole[f"module.{n}"] for n in names}, {n: seen[f"weight {n}"] for n in names})
    assert torch.equal(whole["optimizer.exp_avg.pixels"], seen["exp_avg pixels"])


# --- what does not fit ---


def saved_by(path: Path, model: nn.Module | None = None, **kwargs: Any) -> Path:
    with engine_of(path, model=model, **kwargs) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(path / "saved")
    return path / "saved"


def refused(engine: Any, directory: Path, match: str, **kwargs: Any) -> None:
    """The load is refused, and leaves everything as it was."""
    before, lr = snapshot(engine), engine.get_lr()
    with pytest.raises(swapio.UsageError, match=match):
        engine.load_checkpoint(directory, **kwargs)
    same(snapshot(engine), before)
    assert (engine.get_lr(), engine.global_steps) == (lr, 1)
    train(engine, 1, 2)


class More(nn.Module):
    """Another model around the same loss."""

    def __init__(self, model: nn.Module, **more: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(model.__dict__)
        for name, module in more.items():
            self.add_module(name, module)

    forward = type(make()).forward


def test_names_that_do_not_match(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved_by(tmp_path, More(make(), old=nn.Linear(2, 3)))
    with engine_of(tmp_path, model=More(make(5), new=nn.Linear(2, 3))) as engine:
        train(engine, 0, 1)
        refused(engine, directory, r"not in the checkpoint: 'new\.bias', 'new\.weight'; not in the model: 'old\.bias', 'old\.weight'")
    with engine_of(tmp_path, model=More(make(5), new=nn.Linear(2, 3))) as engine:
        new = engine.module.new.weight.detach().clone()
        engine.load_checkpoint(directory, load_module_strict=False)
        assert "'new.bias'" in caplog.text and engine.global_steps == 2
        assert torch.equal(engine.module.new.weight, new)


def test_another_shape_optimizer_or_scheduler(tmp_path: Path) -> None:
    directory = saved_by(tmp_path)
    with engine_of(tmp_path, model=make(width=89)) as engine:
        train(engine, 0, 1)
        refused(engine, directory, r"'module\.\S+' has the shape \(89")
        refused_kwargs: dict[str, Any] = {"load_module_strict": False}
        with pytest.raises(swapio.UsageError, match="has the shape"):
            engine.load_checkpoint(directory, **refused_kwargs)
    sgd = {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}
    with engine_of(tmp_path, optimizer=sgd, scheduler={"type": "WarmupLR", "params": {}}) as engine:
        with pytest.raises(swapio.UsageError, match=r"has the optimizer state exp_avg, exp_avg_sq; .* here keeps momentum_buffer"):
            engine.load_checkpoint(directory)
        with pytest.raises(swapio.UsageError, match="has WarmupDecayLR, and here is WarmupLR"):
            engine.load_checkpoint(directory, load_optimizer_states=False)
        assert engine.global_steps == 0
        engine.load_checkpoint(directory, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert engine.global_steps == 2
    with swapio.initialize(model=make(5), config={"swapio": {"device": "cpu"}})[0] as engine:
        engine.load_checkpoint(directory)  # to evaluate
        engine.save_checkpoint(tmp_path / "bare")
    with engine_of(tmp_path) as engine, pytest.raises(swapio.UsageError, match="saved without an optimizer"):
        engine.load_checkpoint(tmp_path / "bare")


def test_the_module_alone(tmp_path: Path) -> None:
    directory = saved_by(tmp_path)
    with engine_of(tmp_path) as engine:
        train(engine, 0, 2)
        want = snapshot(engine)
    with engine_of(tmp_path, seed=5) as engine:
        train(engine, 0, 1)
        before = snapshot(engine)
        engine.load_checkpoint(directory, load_module_only=True)
        loaded = snapshot(engine)
        assert engine.global_steps == 1
        for name, value in loaded.items():
            assert torch.equal(value, before[name] if "exp_avg" in name else want[name]), name


def test_frozen_when_saved_and_trained_now(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved_by(tmp_path)
    with engine_of(tmp_path, model=make(5, freeze=False)) as engine:
        train(engine, 0, 1)
        assert snapshot(engine)["exp_avg still.weight"].any()
        engine.load_checkpoint(directory)
        assert "begins anew: 'still.bias', 'still.weight'" in caplog.text
        loaded = snapshot(engine)
        assert not loaded["exp_avg still.weight"].any()
        assert torch.equal(loaded["master still.weight"], make().still.weight)
        counts = {n: c for u, cs in engine._stepper.num_updates.items() for n, c in zip(u.names, cs, strict=True)}
        assert (counts["still.weight"], counts["first.weight"]) == (0, 2)
        train(engine, 2, 3)
        engine.save_checkpoint(directory)
    with engine_of(tmp_path) as engine:
        engine.load_checkpoint(directory)
        assert "not used: 'still.bias', 'still.weight'" in caplog.text


def test_without_frozen_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
        assert "module.still.weight" not in FileSystemReader(tmp_path / "saved" / "global_step0").read_metadata().state_dict_metadata
    with engine_of(tmp_path, seed=5) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert "as they are: 'still.bias', 'still.weight'" in caplog.text
        assert torch.equal(engine.module.still.weight, make(5).still.weight)
        assert torch.equal(engine.module.first.weight, make().first.weight)


# --- what a run is made of ---


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype(tmp_path: Path, default: torch.dtype) -> None:
    """Masters and moments of a checkpoint that was saved under another default were rounded to bfloat16."""
    with engine_of(tmp_path, dtype="bf16", state="nvme") as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, tag="a")
        torch.set_default_dtype(default)
        try:
            engine.save_checkpoint(tmp_path, tag="b")
            train(engine, 2, 3)
            engine.load_checkpoint(tmp_path, "a")
            want = snapshot(engine)
            engine.save_checkpoint(tmp_path, tag="c")
        finally:
            torch.set_default_dtype(torch.float32)
        same(snapshot(engine), want)
    a, b, c = ((tmp_path / tag / "__0_0.distcp").read_bytes() for tag in "abc")
    assert a == b == c


def test_accumulation_begins_anew(tmp_path: Path) -> None:
    """Gradients so far are not saved, so a step after a load waits for all of its micro-batches, however many those are."""
    with engine_of(tmp_path, gradient_accumulation_steps=2) as engine:
        train(engine, 0, 6)
        engine.save_checkpoint(tmp_path)
        train(engine, 6, 7)
        engine.save_checkpoint(tmp_path, tag="within")
        engine.load_checkpoint(tmp_path, "within")
        engine.save_checkpoint(tmp_path, tag="again", save_latest=False)
        want = train(engine, 6, 8), snapshot(engine)
    assert (tmp_path / "within" / "__0_0.distcp").read_bytes() == (tmp_path / "again" / "__0_0.distcp").read_bytes()
    with engine_of(tmp_path, seed=5, gradient_accumulation_steps=2) as engine:
        engine.load_checkpoint(tmp_path)
        assert train(engine, 6, 7) == want[0][:1] and engine.global_steps == 3
        train(engine, 7, 8)
        same(snapshot(engine), want[1])
    with engine_of(tmp_path, gradient_accumulation_steps=4) as engine:
        engine.load_checkpoint(tmp_path, "global_step3")
        train(engine, 0, 3)
        assert engine.global_steps == 3
        train(engine, 3, 4)
        assert engine.global_steps == 4


def test_other_param_groups(tmp_path: Path) -> None:
    """As many groups, with other members: a rate or a decay would go to the wrong parameters."""

    def engine_with(seed: int, turned: bool) -> Any:
        model = make(seed)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for n, p in trained.items() if not n.endswith("bias")], "weight_decay": 0.1},
            {"params": [p for n, p in trained.items() if n.endswith("bias")], "weight_decay": 0.0, "lr": 1e-3},
        ]
        optimizer = torch.optim.AdamW(groups[::-1] if turned else groups)
        config = {k: v for k, v in settings(tmp_path).items() if k not in ("optimizer", "scheduler")}
        return swapio.initialize(model=model, optimizer=optimizer, config=config)[0]

    with engine_with(0, turned=False) as engine:
        engine.optimizer.param_groups[0]["param_names"] = ["of the one before"]  # where PyTorch keeps those it was given
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved")
    with engine_with(5, turned=False) as engine:
        engine.optimizer.param_groups[0]["param_names"] = ["of this run"]
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.optimizer.param_groups[0]["param_names"] == ["of this run"]
    with engine_with(5, turned=True) as engine:
        train(engine, 0, 1)
        refused(engine, tmp_path / "saved", r"other param groups have 'blocks\.0\.0\.bias', .* give the same groups, or pass load_opt")


class Own:
    """Something of the user's."""


def test_client_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(tmp_path) as engine:
        wrong: Any
        for wrong, said in (
            ({"f": lambda: 1}, "'client_state' has something that cannot be pickled: .*lambda"),
            ([1, 2], "client_state: a list is no dict"),
        ):
            with pytest.raises(swapio.UsageError, match=said):
                engine.save_checkpoint(tmp_path / "saved", client_state=wrong)
            assert list((tmp_path / "saved").glob("*")) == []
        engine.save_checkpoint(tmp_path / "saved", client_state={"own": Own()})
        state: Any = engine.load_checkpoint(tmp_path / "saved")[1]
        assert type(state["own"]) is Own
        train(engine, 0, 1)
        # what does not have the user's classes reads the rest
        monkeypatch.delattr(f"{__name__}.Own")
        assert swapio.get_fp32_state_dict(tmp_path / "saved").keys() >= {"first.weight"}
        assert inspect(tmp_path / "saved")["client_state"] == ["own"]
        refused(
            engine,
            tmp_path / "saved",
            r"'client_state' in \S+global_step0 has objects that cannot be made here: .*Own.* define their class",
        )


class Refusing(torch.optim.lr_scheduler.LambdaLR):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise ValueError("another version")


class Refuses(Net):
    def set_extra_state(self, state: str) -> None:
        super().set_extra_state(state)
        if state == "old":
            raise ValueError("another version")


@pytest.mark.parametrize("what", ["scheduler", "extra state"])
def test_settings_that_are_refused(tmp_path: Path, what: str) -> None:
    """The scheduler stayed half-way, and extra state was refused when the weights were loaded already."""
    torch.manual_seed(0)
    scheduler: Any = (lambda o: Refusing(o, lambda s: 1 / (s + 1))) if what == "scheduler" else None
    config = {k: v for k, v in settings(tmp_path).items() if k != "scheduler"}
    with swapio.initialize(model=Refuses() if what == "extra state" else make(), config=config, lr_scheduler=scheduler)[0] as engine:
        net: Any = engine.module
        train(engine, 0, 1)
        net.note = "old"
        engine.save_checkpoint(tmp_path / "saved")
        net.note = "new"
        train(engine, 1, 3)

        def state() -> Any:
            return net.note, engine.get_lr(), engine.global_steps, engine.lr_scheduler and engine.lr_scheduler.state_dict()

        before = snapshot(engine), state()
        with pytest.raises(ValueError, match="another version"):
            engine.load_checkpoint(tmp_path / "saved")
        same(snapshot(engine), before[0])
        assert state() == before[1]
        train(engine, 3, 4)


def test_an_expanded_buffer(tmp_path: Path) -> None:
    """PyTorch does not write to one, so a load failed when a part was loaded."""
    found = []
    for seed in range(2):
        model = make(seed)
        model.register_buffer("wide", torch.full((1, 4), float(seed)).expand(3, 4))
        with engine_of(tmp_path, model=model) as engine:
            engine.load_checkpoint(tmp_path) if seed else engine.save_checkpoint(tmp_path)
            found.append(snapshot(engine))
    same(*found)


def test_what_is_replaced_is_not_read(tmp_path: Path) -> None:
    """All state came from the drive before it was overwritten."""
    small = {"host_memory": "4MiB", "device": "cpu"}
    with engine_of(tmp_path, model=make(width=400, freeze=False), dtype="bf16", state="nvme", swapio=small) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved")
        before = snapshot(engine)
        train(engine, 2, 3)
        engine.zero.stepper.apply_all_due()
        read = engine.stats()["bytes_read"]
        engine.load_checkpoint(tmp_path / "saved")
        numel = sum(p.numel() for p in engine.module.parameters())
        assert engine.stats()["bytes_read"] - read < 6 * numel  # of 12 each; some may come ahead of the next step
        same(snapshot(engine), before)
