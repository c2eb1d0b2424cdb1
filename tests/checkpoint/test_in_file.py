"""Frozen weights stay in the safetensors that they were loaded from."""

from __future__ import annotations

import copy
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import swapio
from swapio.checkpoint import SafetensorsFolder
from swapio.io import MemoryStorage
from swapio.swap import FileMap, Place, file_part
from swapio.testing import FaultyStorage
from swapio.zero import constructed
from tests.engine.models import config, smallest_budget, with_budget

DIM, VOCAB, RANK, NUM_BLOCKS = 96, 61, 4, 3
Losses = list[float]


class Block(nn.Module):
    """A linear layer, and a correction of low rank once there is one."""

    up: nn.Linear
    down: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(self.norm(x))
        if hasattr(self, "up"):
            y = y + self.up(self.down(x))
        return x + y.tanh()


class Model(nn.Module):
    """Tied embeddings, blocks, a buffer, a weight that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.turned = nn.Parameter(torch.randn(5, DIM).t() * 0.1)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x).float().square().mean() + (x @ self.turned * self.scale).float().square().mean()
        return out


def made(dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(1)
    return Model().to(dtype)


def adapted(model: Any, *, dtype: torch.dtype = torch.float32) -> Any:
    """Frozen, with new adapters."""
    torch.manual_seed(2)
    model.requires_grad_(False)
    for block in model.blocks:
        block.down, block.up = nn.Linear(DIM, RANK, bias=False, dtype=dtype), nn.Linear(RANK, DIM, bias=False, dtype=dtype)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stored(tmp_path / "model", made())


def stored(folder: Path, model: nn.Module) -> Path:
    """In three files with an index."""
    folder.mkdir()
    state = {n: t.detach().contiguous() for n, t in model.state_dict().items() if n != "head.weight"}
    files = {n: f"part-{i % 3}.safetensors" for i, n in enumerate(state)}
    for file in set(files.values()):
        save_file({n: t for n, t in state.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def started(path: Path, model: nn.Module, *, extra: int = 0, **kwargs: Any) -> Any:
    """An engine with the smallest budget that works."""
    settings = config(path, **kwargs)
    return swapio.initialize(model=model, config=with_budget(settings, smallest_budget(model, settings) + extra))[0]


def loaded(folder: Path, **kwargs: Any) -> Any:
    return swapio.load_pretrained(Model, folder, keep_frozen_in_file=True, **kwargs)


def train(engine: Any, first: int = 0, last: int = 3) -> Losses:
    losses = []
    for step in range(first, last):
        ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(step))
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def values(model: Any) -> dict[str, torch.Tensor]:
    return {n: t.detach().clone() for n, t in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def resting(engine: Any) -> int:
    """Bytes of weights on the drive."""
    found: int = engine.memory()["weights"]["nvme"]
    return found


def own_nbytes(unit: Any) -> int:
    """What a unit has beside that which is in files, in pages."""
    own: int = unit.record.own_nbytes
    return own


def trained_nbytes(engine: Any) -> int:
    return sum(u.layout.slots[i].span * 4 for u in engine.zero.units for i, p in enumerate(u.params) if p.requires_grad)


def reference(tmp_path: Path) -> tuple[Losses, dict[str, torch.Tensor]]:
    """The same with everything on the drive, as from a model in memory."""
    with started(tmp_path, adapted(made())) as engine:
        return train(engine), values(engine.module)


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("how", ["alone", "config", "within"])
def test_base_is_not_copied(tmp_path: Path, folder: Path, how: str, device: str) -> None:
    """Only adapters, and what is not contiguous, are on the drive; losses and weights are those without the option, to the bit."""
    if how == "within":
        with swapio.zero.Init(config_dict_or_path=config(tmp_path)):
            model = adapted(loaded(folder))
    else:
        model = adapted(loaded(folder, config=config(tmp_path) if how == "config" else None))
    mapped = [n for n, p in model.named_parameters() if not constructed(p) and file_part(p)]
    assert len(mapped) == 1 + 4 * NUM_BLOCKS and "turned" not in mapped
    assert bool(constructed(model.blocks[0].up.weight)) == (how == "within")
    with started(tmp_path, model, device=device) as engine:
        engine.manager.flush().wait()
        turned, page = DIM * 5 * 4, 4096
        assert trained_nbytes(engine) + turned <= resting(engine) <= trained_nbytes(engine) + turned + (NUM_BLOCKS + 1) * page
        moments = sum(r.nbytes for r in engine.zero.records if r not in {u.record for u in engine.zero.units})
        stats = engine.stats()
        assert stats["bytes_on_nvme"] == resting(engine) + moments
        assert stats["bytes_written"] < 2 * resting(engine)
        losses = train(engine)
        engine.manager.flush().wait()
        assert engine.stats()["bytes_read"] > 3 * NUM_BLOCKS * DIM * DIM * 4
        assert resting(engine) == sum(own_nbytes(u) for u in engine.zero.units) < DIM * DIM * 4
        got = values(engine.module)
    want = reference(tmp_path)
    assert losses == want[0]
    same(got, want[1])


def test_bf16_base_and_fp32_adapters(tmp_path: Path) -> None:
    """Of several dtypes in a unit, frozen ones are last."""
    folder = stored(tmp_path / "model", made(torch.bfloat16))

    class Mixed(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids)

    found = []
    for keep in (True, False):
        model = swapio.load_pretrained(Mixed, folder, dtype=torch.bfloat16, keep_frozen_in_file=keep)
        with started(tmp_path, adapted(model)) as engine:
            assert all(bool(u.record.in_file) == (keep and u.names != ["turned"]) for u in engine.zero.units)
            assert [d["dtypes"] for d in engine.describe_units() if d["trained_numel"]] == [
                ["torch.float32", "torch.bfloat16"] if keep else ["torch.bfloat16", "torch.float32"]
            ] * NUM_BLOCKS
            found.append((train(engine), values(engine.module)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


def test_evaluation_and_copies(tmp_path: Path, folder: Path) -> None:
    want = adapted(made())
    ids = torch.arange(9)[None]
    model = adapted(loaded(folder))
    assert torch.equal(model(ids), want(ids)), "as an ordinary model"
    assert all(file_part(p) is None for p in copy.deepcopy(model).parameters())
    with started(tmp_path, model) as engine, torch.no_grad():
        engine.eval()
        assert torch.equal(engine(ids), want(ids))
        copied = copy.deepcopy(engine.module)
        assert torch.equal(copied(ids), want(ids))


def test_ordinary_parameters_at_the_end(tmp_path: Path, folder: Path) -> None:
    model = adapted(loaded(folder))
    params = list(model.parameters())
    with started(tmp_path, model, extra=2**20) as engine:
        train(engine, 0, 1)
        want = values(engine.module)
    assert [type(p) for p in params] == [nn.Parameter] * len(params)
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    assert not any(map(file_part, params))
    same(values(model), want)
    with started(tmp_path, model) as engine:
        train(engine, 1, 2)


def write_before(model: Any) -> None:
    with torch.no_grad():
        model.blocks[1].base.weight[3, 5] = 7


def write_past_pytorch(model: Any) -> None:
    model.blocks[1].base.weight.data.numpy()[3, 5] = 7


@pytest.mark.parametrize("write", [write_before, write_past_pytorch])
def test_written_before_initialize(tmp_path: Path, folder: Path, write: Callable[[Any], None], caplog: pytest.LogCaptureFixture) -> None:
    content = {p: p.read_bytes() for p in folder.iterdir()}
    model = adapted(loaded(folder))
    write(model)
    with started(tmp_path, model) as engine:
        engine.manager.flush().wait()
        assert engine.module.blocks[1].base.weight[3, 5] == 7
        stay = [u.name for u in engine.zero.units if len(u.record.in_file) == 4]
        assert stay == ["blocks.0", "blocks.2"]
        train(engine)
        assert engine.module.blocks[1].base.weight[3, 5] == 7
    assert "written or become None here: 'blocks.1.base.weight'" in caplog.text or write is write_past_pytorch
    assert {p: p.read_bytes() for p in folder.iterdir()} == content


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_written_in_training(tmp_path: Path, folder: Path, device: str) -> None:
    """A unit whose frozen weight was written goes to the drive whole; one whose adapter was written does not."""
    found = []
    model: Any
    for model in (loaded(folder), made()):
        with started(tmp_path, adapted(model), device=device) as engine:
            losses = train(engine, 0, 1)
            before = resting(engine)
            unit = next(u for u in engine.zero.units if u.name == "blocks.1")
            own = own_nbytes(unit)
            with torch.no_grad():
                model.blocks[0].down.weight.mul_(2)
            losses += train(engine, 1, 2)
            engine.manager.flush().wait()
            assert resting(engine) == before
            with torch.no_grad():
                model.blocks[1].base.weight.mul_(2)
            losses += train(engine, 2, 4)
            engine.manager.flush().wait()
            assert not unit.record.in_file
            assert resting(engine) == before + unit.layout.nbytes - own
            found.append((losses, values(engine.module)))
    assert found[0][0] == found[1][0]
    same(found[0][1], found[1][1])


def test_no_room_for_what_was_written(tmp_path: Path, folder: Path) -> None:
    """The weight stays in memory, the file as it was; with room again, all goes on."""
    model = adapted(loaded(folder))
    settings = config(tmp_path)
    storage = FaultyStorage(MemoryStorage())
    with swapio.SwapManager(storage=storage, device="cpu", host_memory=smallest_budget(model, settings) + 2**14) as manager:
        engine = swapio.initialize(model=model, config=settings, manager=manager)[0]
        manager.flush().wait()
        storage.fail = lambda action, name: errno.ENOSPC * (action == "reserve")
        with pytest.raises(swapio.StorageError, match=r"reserve of '.*blocks\.1' failed: No space left"), torch.no_grad():
            model.blocks[1].base.weight.mul_(2)
            model.blocks[0].base.weight.sum()  # now the other goes
            manager.flush().wait()
        storage.fail = None
        manager.flush().wait()
        assert torch.equal(model.blocks[1].base.weight, made().get_parameter("blocks.1.base.weight") * 2)
        engine.close()


def change(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [change, truncate])
@pytest.mark.parametrize("when", ["before", "in training"])
def test_changed_files(tmp_path: Path, folder: Path, harm: Callable[[Path], None], when: str) -> None:
    """An error with the name of a tensor, never a wrong number, never a signal."""

    def harm_all() -> None:
        for path in folder.glob("*.safetensors"):
            harm(path)

    fails: Any = r"read of '(blocks\.\d|embed)\.[a-z.]+' failed: the file was changed while it was in use.*part-\d\.safetensors, offset \d+"
    model = adapted(loaded(folder))
    if when == "before":
        harm_all()
        with pytest.raises(swapio.StorageError, match=fails):
            swapio.initialize(model=model, config=with_budget(config(tmp_path), smallest_budget(adapted(made()), config(tmp_path))))
        return
    with started(tmp_path, model) as engine:
        train(engine, 0, 1)
        harm_all()
        with pytest.raises(swapio.StorageError, match=fails):
            train(engine, 1, 3)


def test_replaced_and_removed_files(tmp_path: Path, folder: Path) -> None:
    """What was opened is read on, so the result may take its place."""
    want = reference(tmp_path)
    with started(tmp_path, adapted(loaded(folder)), extra=2**15) as engine:
        losses = train(engine, 0, 1)
        engine.save_16bit_model(tmp_path / "out")
        for path in folder.glob("*.safetensors"):
            (tmp_path / "out" / "model.safetensors").replace(path)
            break
        losses += train(engine, 1, 2)
        for path in folder.iterdir():
            path.unlink()
        losses += train(engine, 2, 3)
        assert losses == want[0]
        same(values(engine.module), want[1])


@pytest.mark.parametrize("only_trained", [False, True])
@pytest.mark.parametrize("async_save", [False, True])
def test_checkpoints(tmp_path: Path, folder: Path, only_trained: bool, async_save: bool) -> None:
    """Saved as from any other engine; loading one leaves equal weights where they are."""
    want = reference(tmp_path)
    with started(tmp_path, adapted(loaded(folder))) as engine:
        assert train(engine, 0, 2) == want[0][:2]
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=only_trained, async_save=async_save)
        assert train(engine, 2, 3) == want[0][2:]
        engine.wait_for_checkpoint()
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine, 2, 3) == want[0][2:]
    with started(tmp_path, adapted(loaded(folder))) as engine:
        before = resting(engine)
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine, 2, 3) == want[0][2:]
        engine.manager.flush().wait()
        assert resting(engine) == before
        same(values(engine.module), want[1])


def test_checkpoint_with_other_frozen_weights(tmp_path: Path, folder: Path) -> None:
    other = adapted(made())
    with torch.no_grad():
        other.blocks[2].base.bias.add_(1)
    with started(tmp_path, other) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        want = train(engine)
    with started(tmp_path, adapted(loaded(folder))) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine) == want
        assert [u.name for u in engine.zero.units if len(u.record.in_file) == 4] == ["blocks.0", "blocks.1"]


def test_export(tmp_path: Path, folder: Path) -> None:
    with started(tmp_path, adapted(loaded(folder)), extra=2**15) as engine:
        train(engine, 0, 1)
        want = values(engine.module)
        engine.save_16bit_model(tmp_path / "out")
    got = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in got.items():
        assert torch.equal(value, want[name].to(value.dtype)), name


def test_what_is_copied(tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions, several ranks, other homes: as without the option, and said."""
    half = loaded(folder, dtype=torch.bfloat16)
    assert not any(map(file_part, half.parameters()))
    assert "copied from" in caplog.text and "another dtype" in caplog.text
    caplog.clear()
    with swapio.zero.Init(config_dict_or_path=config(tmp_path), dtype=torch.bfloat16):
        half = loaded(folder)
    assert all(constructed(p) and p.dtype is torch.bfloat16 for p in half.parameters())
    with started(tmp_path, adapted(loaded(folder), dtype=torch.float32), dtype="bf16") as engine:
        assert not any(u.record.in_file for u in engine.zero.units)
    assert "frozen, but copied from their files, as they were written or become torch.bfloat16" in caplog.text
    caplog.clear()
    for place in ("cpu", "none"):
        with swapio.initialize(model=adapted(loaded(folder)), config=config(tmp_path, params=place))[0] as engine:
            assert not any(u.record.in_file for u in engine.zero.units)
            found = train(engine)
        assert found == reference(tmp_path)[0]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not any(map(file_part, loaded(folder).parameters()))
    assert "on several ranks" in caplog.text


def test_everything_fits(tmp_path: Path, folder: Path) -> None:
    """Then the weights rest in memory, and are read once."""
    with swapio.initialize(model=adapted(loaded(folder)), config=config(tmp_path))[0] as engine:
        losses = train(engine)
        assert engine.stats()["bytes_read"] == engine.stats()["bytes_on_nvme"] == 0
    assert losses == reference(tmp_path)[0]


def test_trained_weights_are_copied(tmp_path: Path, folder: Path) -> None:
    """The option is for what is frozen; all else is as ever."""
    with started(tmp_path, loaded(folder)) as engine:
        assert not any(u.record.in_file for u in engine.zero.units)
        got = train(engine)
    with started(tmp_path, made()) as engine:
        assert got == train(engine)


def test_mapped_tensors(tmp_path: Path) -> None:
    """Pages go with the tensor that used them; a write stays in this process; what only shows a part is not it."""
    tensors = {"a": torch.randn(3, 5000), "odd": torch.ones(3, dtype=torch.uint8), "b": torch.randn(7), "none": torch.ones(0)}
    save_file(tensors, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    folder = SafetensorsFolder(tmp_path)
    a, none = folder.map("a"), folder.map("none")
    assert a is not None and none is None
    part = file_part(nn.Parameter(a))
    assert part is not None and (part.name, part.nbytes) == ("a", 60_000) and file_part(a[1:]) is file_part(a[:1]) is None
    a.add_(1)
    assert torch.equal(a, tensors["a"] + 1) and (tmp_path / "model.safetensors").read_bytes() == content
    del a
    again = folder.map("a")
    assert again is not None and torch.equal(again[1], tensors["a"][1]), "fresh pages"
    with pytest.raises(swapio.StorageError, match="opening of 'x' failed: No such file"):
        FileMap(tmp_path / "x")


def test_records_in_files(tmp_path: Path) -> None:
    """What is read, written and reserved of a record that is partly in a file, by the store alone."""
    path = tmp_path / "model.safetensors"
    base = torch.arange(10_000, dtype=torch.int32)
    save_file({"base": base}, path)
    mapped = SafetensorsFolder(path).map("base")
    assert mapped is not None
    part = file_part(mapped)
    assert part is not None
    with swapio.SwapManager(paths=[tmp_path], host_memory="1MiB", device="cpu", checksums=True) as manager:
        reserved = manager.storage.reserved_nbytes
        record = manager.create("r", 8192 + 40_000, in_file=[(8192, part)])
        assert manager.stats()["bytes_on_nvme"] == 8192 == manager.storage.reserved_nbytes - reserved

        def check(first: int, want: torch.Tensor, own: int) -> None:
            manager.evict(["r"]).wait()
            assert record.own_nbytes == own == manager.storage.reserved_nbytes - reserved - (-own % 4096)
            assert manager.prefetch(["r"]).wait() == 1
            with manager.pin(record, Place.HOST, self) as lease:
                assert lease.raw[:8192].tolist() == [first] * 8192
                assert torch.equal(lease.raw[8192:].view(torch.int32), want)

        self = object()
        check(0, base, 8192)
        with manager.pin(record, Place.HOST, self) as lease:
            lease.raw[:8192] = 3
            lease.mark_dirty(span=slice(0, 8192))
        check(3, base, 8192)
        with manager.pin(record, Place.HOST, self) as lease:
            lease.raw[8192:].view(torch.int32)[7] = -1
            lease.mark_dirty(span=slice(8192 + 28, 8192 + 32))
        base[7] = -1
        check(3, base, 48_192)
        manager.delete("r")
        assert manager.storage.reserved_nbytes == reserved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft(tmp_path: Path) -> None:
    """A model of `transformers` with adapters of `peft`."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": 99,
    }
    llama = LlamaConfig(**sizes)
    torch.manual_seed(0)
    LlamaForCausalLM(llama).save_pretrained(tmp_path / "model", max_shard_size="100KB")
    llama.architectures = ["LlamaForCausalLM"]
    found = []
    for keep in (True, False):
        base = swapio.load_pretrained(llama, tmp_path / "model", keep_frozen_in_file=keep)
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
        with started(tmp_path, model) as engine:
            losses = []
            for step in range(3):
                ids = torch.randint(0, 99, (2, 12), generator=torch.Generator().manual_seed(step))
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            found.append((losses, resting(engine), trained_nbytes(engine), values(engine.module)))
    assert found[0][0] == found[1][0]
    same(found[0][3], found[1][3])
    assert found[0][1] < found[0][2] + 3 * 4096 < found[1][1]
