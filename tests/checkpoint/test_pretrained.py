"""Weights from safetensors to the drive without the memory for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import swapio
from swapio.checkpoint import SafetensorsFolder
from swapio.zero import constructed

from .work import Net, Tied, engine_of, make, same, settings, snapshot, train


def stored(folder: Path, model: nn.Module, *, several: bool = False) -> Path:
    """The state dict of a model, tied names under the first."""
    folder.mkdir()
    keep = {id(t): n for n, t in reversed([*model.named_parameters(), *model.named_buffers()])}
    named = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, torch.Tensor)}
    state = {n: t.detach().contiguous() for n, t in named.items() if keep[id(t)] == n}
    if not several:
        save_file(state, folder / "model.safetensors")
        return folder
    files = {n: f"part-{i % 3}.safetensors" for i, n in enumerate(state)}
    for file in set(files.values()):
        save_file({n: t for n, t in state.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def filled() -> Tied:
    model = Tied(seed=1)
    for buffer in model.buffers():
        buffer.add_(3)
    return model


@pytest.mark.parametrize("several", [False, True])
def test_made_on_the_drive(tmp_path: Path, several: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same training as with the weights in memory; each tensor is read once, and none is initialized."""
    folder = stored(tmp_path / "model", filled(), several=several)
    reads: list[str] = []
    read = SafetensorsFolder.read

    def noted(self: SafetensorsFolder, name: str) -> torch.Tensor:
        reads.append(name)
        return read(self, name)

    monkeypatch.setattr(SafetensorsFolder, "read", noted)
    monkeypatch.setattr(nn.init, "kaiming_uniform_", lambda p, **_: p if p.is_meta else pytest.fail("initialized"))
    config = settings(tmp_path / "drive")
    (tmp_path / "drive").mkdir()
    model: Any = swapio.load_pretrained(Tied, folder, config)
    assert sorted(reads) == sorted(SafetensorsFolder(folder).entries)
    monkeypatch.undo()
    assert all(constructed(p) for p in model.parameters() if p.numel())
    assert model.head.weight is model.first.weight and not model.still.weight.requires_grad
    found = []
    for each in (model, filled()):
        torch.manual_seed(7)
        with swapio.initialize(model=each, config=config)[0] as engine:
            found.append((snapshot(engine), train(engine, 0, 3), snapshot(engine)))
    same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    same(found[0][2], found[1][2])


@pytest.mark.parametrize(("stored_as", "nbytes"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_lower_halves_that_are_zeros_are_not_written(tmp_path: Path, stored_as: torch.dtype, nbytes: int) -> None:
    """Observed: 4 bytes per parameter were written for bfloat16 weights of a model that is made in fp32."""
    (tmp_path / "drive").mkdir()
    values = {n: p.detach().to(stored_as) for n, p in make(4, width=400, freeze=False).named_parameters()}
    save_file({n: v.contiguous() for n, v in values.items()}, tmp_path / "model.safetensors")
    config = settings(tmp_path / "drive", dtype="bf16", state="nvme", swapio={"host_memory": "4MiB", "device": "cpu"})
    model: Any = swapio.load_pretrained(lambda: make(5, width=400, freeze=False), tmp_path, config, strict=False)
    with swapio.initialize(model=model, config=config)[0] as engine:
        numel = sum(p.numel() for p in model.parameters())
        assert nbytes * numel <= engine.stats()["bytes_written"] < 1.2 * nbytes * numel
        for name, param in model.named_parameters():
            master: Any = swapio.utils.safe_get_full_fp32_param(param)
            assert torch.equal(master, values[name].float())
        train(engine, 0, 2)


def made(kind: str, path: Path) -> tuple[nn.Module, Callable[[], None]]:
    """A model with other values, and what ends it."""
    if kind == "in memory":
        return make(5), lambda: None
    if kind == "on the drive":
        with swapio.zero.Init(config_dict_or_path=settings(path)):
            return make(5), lambda: None
    engine = engine_of(path, seed=5)
    return engine.module, engine.close


@pytest.mark.parametrize("kind", ["in memory", "on the drive", "in an engine"])
def test_into_a_model(tmp_path: Path, kind: str) -> None:
    folder = stored(tmp_path / "model", make(1))
    model, end = made(kind, tmp_path)
    params = dict(model.named_parameters())
    assert swapio.load_pretrained(model, folder) is model
    assert all(model.get_parameter(n) is p for n, p in params.items())
    want = make(1)
    for name, param in want.named_parameters():
        assert torch.equal(model.get_parameter(name), param), name
    end()


def test_within_init(tmp_path: Path) -> None:
    folder = stored(tmp_path / "model", make(1))
    with swapio.zero.Init(config_dict_or_path=settings(tmp_path), dtype=torch.bfloat16):
        model: Any = swapio.load_pretrained(Net, folder)
    assert constructed(model.first.weight) and model.first.weight.dtype is torch.bfloat16 and model.seen.dtype is torch.bfloat16
    assert torch.equal(model.first.weight, make(1).first.weight.bfloat16())
    half: Any = swapio.load_pretrained(Net, folder, dtype=torch.float16)  # in memory
    assert half.first.weight.dtype is torch.float16 and type(half.first.weight) is nn.Parameter


def test_what_does_not_fit(tmp_path: Path) -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.new = nn.Linear(2, 3)
            del self.still

    folder = stored(tmp_path / "model", make(1))
    fits: Any = r"Not in the files: 'new\.bias', 'new\.weight'; not in the model: 'still\.bias', 'still\.weight'\. strict=False"
    with pytest.raises(swapio.UsageError, match=fits):
        swapio.load_pretrained(Other, folder)
    with pytest.raises(swapio.UsageError, match=r"has no values for 'new\.bias', 'new\.weight', and the model has none either"):
        swapio.load_pretrained(Other, folder, strict=False)
    torch.manual_seed(0)
    other = Other()
    kept = other.new.weight.clone()
    swapio.load_pretrained(other, folder, strict=False)
    assert torch.equal(other.first.weight, make(1).first.weight) and torch.equal(other.new.weight, kept)
    with pytest.raises(swapio.UsageError, match=r"has the shape \(89.*\), and \(97.*\) in"):
        swapio.load_pretrained(make(5, width=89), folder)
    with torch.device("meta"):
        bare = Net()
    with pytest.raises(swapio.UsageError, match="has no values for 'passing'"):
        swapio.load_pretrained(bare, folder)
    nothing: Any
    for nothing, said in ((3, "no model can be made from a int without"), (lambda: 3, "gave a int, which is no module")):
        with pytest.raises(swapio.ConfigError, match=said):
            swapio.load_pretrained(nothing, folder)
    with pytest.raises(swapio.UsageError, match=r"has no model\.safetensors and no index .* there: none"):
        swapio.load_pretrained(Net, tmp_path)
    quantized = {n: t.to(torch.int8) for n, t in load_file(folder / "model.safetensors").items()}
    save_file(quantized, folder / "model.safetensors")
    with pytest.raises(swapio.UsageError, match=r"is torch\.float32, and torch\.int8 in .*: it may be quantized"):
        swapio.load_pretrained(Net, folder)
    for nonsense in (b"12345678nonsense", b"\2\0\0\0\0\0\0\0[1]"):
        (folder / "model.safetensors").write_bytes(nonsense)
        with pytest.raises(swapio.StorageError, match="no file of safetensors"):
            swapio.load_pretrained(Net, folder)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    for text in ("{", "[]", '{"weight_map": 3}'):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(swapio.StorageError, match=r"'model\.safetensors\.index\.json' failed: it is no index of safetensors"):
            swapio.load_pretrained(Net, folder)


def test_an_index_of_another_export(tmp_path: Path) -> None:
    """As `transformers`: one file counts before it."""
    folder = stored(tmp_path / "model", make(1))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"first.weight": "gone.safetensors"}}))
    model: Any = swapio.load_pretrained(Net, folder)
    assert torch.equal(model.first.weight, make(1).first.weight)


@pytest.mark.slow
def test_transformers(tmp_path: Path) -> None:
    """From a config; a folder of the bare model inside; equal outputs."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16)
    whole = GPT2LMHeadModel(config).eval()
    whole.save_pretrained(tmp_path / "whole", max_shard_size="50KB")
    whole.transformer.save_pretrained(tmp_path / "bare")
    ids = torch.arange(6)[None]
    ours = {"swapio": {"device": "cpu"}, "zero_optimization": settings(tmp_path)["zero_optimization"]}
    config.architectures = ["GPT2LMHeadModel"]
    for folder in ("whole", "bare"):
        model = swapio.load_pretrained(config, tmp_path / folder, ours)
        with torch.no_grad():
            assert torch.equal(model.eval()(ids).logits, whole(ids).logits)
    with pytest.raises(swapio.UsageError, match=r"not in the model: 'transformer\."):
        swapio.load_pretrained(lambda: GPT2Model(config), tmp_path / "whole")
