"""A trained model as safetensors, and what is said of a checkpoint."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from rich.console import Console
from safetensors.torch import load_file, load_model
from torch import nn
from typer.testing import CliRunner

import swapio
from swapio.checkpoint import Entry, SafetensorsFolder, SafetensorsWriter, export
from swapio.cli._app import app
from swapio.cli._checkpoint import LateProgress
from tests.ranks import launch

from .work import Tied, engine_of, flip, make, same, settings, snapshot, train


def outputs(model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(3)
    with torch.no_grad():
        result: torch.Tensor = model.to(dtype).eval()(torch.ones(4, 31, dtype=dtype))
    return result


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_plain_safetensors_load_it(tmp_path: Path, dtype: str) -> None:
    """Live and from a checkpoint, by one and by several files: the same bytes, and the same outputs."""
    with engine_of(tmp_path, model=Tied(), dtype=dtype) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved")
        assert engine.save_16bit_model(tmp_path / "live")
        engine.save_16bit_model(tmp_path / "live32", dtype="fp32")
        state = {n: t.clone() for n, t in engine.module.state_dict().items() if isinstance(t, torch.Tensor)}
        masters = {n.removeprefix("master "): t for n, t in snapshot(engine).items() if n.startswith("master ")}
        torch_dtype = engine.get_data_types()[0]
        want = outputs(engine.module, torch_dtype)
    assert export(tmp_path / "saved", tmp_path / "one") > 0
    export(tmp_path / "saved", tmp_path / "many", max_shard_nbytes=20_000)
    export(tmp_path / "saved" / "global_step2", tmp_path / "one32", dtype="fp32")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (tmp_path / "live" / "model.safetensors").read_bytes()
    assert (tmp_path / "one32" / "model.safetensors").read_bytes() == (tmp_path / "live32" / "model.safetensors").read_bytes()
    found = load_file(tmp_path / "one" / "model.safetensors")
    same(found, {n: t for n, t in state.items() if n != "head.weight"})
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 3
    same({n: load_file(tmp_path / "many" / file)[n] for n, file in index.items()}, found)
    fresh = Tied(seed=9).to(torch_dtype)
    load_model(fresh, tmp_path / "one" / "model.safetensors", strict=True)
    assert torch.equal(outputs(fresh, torch_dtype), want)
    same({n: t for n, t in load_file(tmp_path / "one32" / "model.safetensors").items() if n in masters}, masters)
    whole = swapio.get_fp32_state_dict(tmp_path / "saved")
    same({n: whole[n] for n in masters}, masters)
    fresh.load_state_dict(whole, strict=True)
    assert whole["calls"].dtype is torch.int64 and whole["head.weight"] is whole["first.weight"]


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    """Checksums were compared in a pass before; and optimizer state, as large twice, is not needed."""
    with engine_of(tmp_path, model=make(width=400), dtype="bf16") as engine:
        engine.save_checkpoint(tmp_path / "saved", tag="a")
    parts = json.loads((tmp_path / "saved" / "a" / "manifest.json").read_text())["files"]["__0_0.distcp"]
    wanted = sum(nbytes for name, nbytes, _ in parts if not name.startswith("optimizer."))
    others = sum((tmp_path / "saved" / "a" / name).stat().st_size for name in (".metadata", "manifest.json"))

    def read_nbytes() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # rchar: by any read, from the drive or not

    export(tmp_path / "saved", tmp_path / "out")  # so that everything is imported
    for run in (lambda: export(tmp_path / "saved", tmp_path / "out"), lambda: swapio.get_fp32_state_dict(tmp_path / "saved")):
        before = read_nbytes()
        run()
        assert wanted <= read_nbytes() - before < wanted + 4 * others + 50_000
    assert others < wanted / 20


def test_what_is_damaged_does_not_appear(tmp_path: Path) -> None:
    """The error names the tensor, the export before stays; damage of what is not needed does not matter."""
    with engine_of(tmp_path, model=Tied(), dtype="bf16") as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "saved", tag="a")
    export(tmp_path / "saved", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    folder, offset = tmp_path / "saved" / "a", 0
    for name, nbytes, _ in json.loads((folder / "manifest.json").read_text())["files"]["__0_0.distcp"]:
        flip(folder / "__0_0.distcp", offset + nbytes - 1)
        if name.startswith("module.") or name == "engine":
            for out in ("out", "new"):
                with pytest.raises(swapio.StorageError, match=rf"read of '{re.escape(name)}' failed: it is not what was written") as caught:
                    export(tmp_path / "saved", tmp_path / out)
                assert "__0_0.distcp" in str(caught.value)
            with pytest.raises(swapio.StorageError, match=re.escape(name)):
                swapio.get_fp32_state_dict(tmp_path / "saved")
        elif name.startswith("optimizer."):
            not_needed = offset
        flip(folder / "__0_0.distcp", offset + nbytes - 1)
        offset += nbytes
    assert not (tmp_path / "new").exists() or not list((tmp_path / "new").iterdir())
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    flip(folder / "__0_0.distcp", not_needed)
    assert export(tmp_path / "saved", tmp_path / "new")


def test_texts_appear_with_the_weights(tmp_path: Path) -> None:
    """`config.json` was written after them, in place."""

    def writer(text: str, max_shard_nbytes: int) -> SafetensorsWriter:
        entries = [Entry(name, torch.float32, (2,)) for name in "ab"]
        return SafetensorsWriter(tmp_path, entries, ties={}, texts={"config.json": text}, max_shard_nbytes=max_shard_nbytes)

    first = writer("first", 100)
    first.create()
    first.sync()
    assert not any((tmp_path / name).exists() for name in ("config.json", "model.safetensors"))
    first.publish()
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    second = writer("second", 8)
    second.create()
    assert (tmp_path / "config.json").read_text() == "first"
    second.abandon()
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    second.create()
    second.publish()
    assert (tmp_path / "config.json").read_text() == "second"
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors.index.json"} | {
        f"model-0000{n}-of-00002.safetensors" for n in (1, 2)
    }


def test_what_was_exported_before_goes(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        engine.save_16bit_model(tmp_path / "out", max_shard_size=20_000)
        (tmp_path / "out" / "tokenizer.json").touch()
        assert len(list((tmp_path / "out").iterdir())) > 4
        engine.save_16bit_model(tmp_path / "out", "pytorch_model.bin")
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.safetensors", "tokenizer.json"]


def test_the_trained_ones_alone(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "saved", exclude_frozen_parameters=True)
        engine.save_16bit_model(tmp_path / "live", exclude_frozen_parameters=True)
    with pytest.raises(swapio.UsageError, match=r"does not have 'still\.weight', and 1 more \(it was saved with exclude_frozen"):
        export(tmp_path / "saved", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tmp_path / "saved", tmp_path / "out", trainable_only=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {n for n, p in make().named_parameters() if p.requires_grad}
    same(load_file(tmp_path / "live" / "model.safetensors"), found)


@pytest.mark.slow
def test_each_rank_writes_what_it_has(tmp_path: Path) -> None:
    launch.run("train_and_export", 2, str(tmp_path), str(tmp_path / "out"), module="tests.checkpoint.work")
    export(tmp_path / "out", tmp_path / "again")
    live, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    same(live, again)
    assert live["turned"].any() and live["pixels"].shape == (2, 3, 5, 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_transformers_load_it(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config

    config: Any = {
        "gpt2": GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=101, n_positions=16),
        "bert": BertConfig(num_hidden_layers=2, num_attention_heads=2, hidden_size=32, vocab_size=101, intermediate_size=64),
    }[name]
    cls: Any = {"gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM}[name]
    torch.manual_seed(0)
    ids = torch.arange(12).view(2, 6)
    engine_settings = {k: v for k, v in settings(tmp_path, params="none", state="none").items() if k != "scheduler"}
    with swapio.initialize(model=cls.from_config(config), config=engine_settings)[0] as engine:
        engine.backward(engine(ids, labels=ids).loss)
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_16bit_model(tmp_path / "live", max_shard_size=50_000)
        with torch.no_grad():
            want = engine.module.eval()(ids).logits.clone()
    result = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "model.safetensors" in result.output
    for folder in ("live", "out"):
        model, report = cls.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(report[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
        assert torch.equal(model.eval()(ids).logits, want)


def test_the_format(tmp_path: Path) -> None:
    """What we write the library reads, and the other way round."""
    tensors = {str(d): torch.arange(6).view(2, 3).to(d) for d in (torch.bool, torch.uint8, torch.int64, torch.float64, torch.bfloat16)} | {
        "scalar": torch.tensor(2.5),
        "nothing": torch.empty(0, 3),
    }
    entries = [Entry(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]
    with pytest.raises(swapio.UsageError, match="max_shard_size: 0 bytes"):
        SafetensorsWriter(tmp_path, entries, ties={}, max_shard_nbytes=0)
    writer = SafetensorsWriter(tmp_path, entries, ties={"other": "scalar"}, max_shard_nbytes=1000)
    writer.create()
    for name, tensor in tensors.items():
        for start in range(tensor.numel()):
            writer.write(name, tensor.reshape(-1)[start : start + 1], start)
    writer.sync()
    writer.publish()
    file: Any = tmp_path / "model.safetensors"
    same(load_file(file), tensors)
    with safetensors.safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "other": "scalar"}
    folder = SafetensorsFolder(tmp_path)
    for name, tensor in tensors.items():
        assert folder.entries[name].dtype is tensor.dtype and torch.equal(folder.read(name), tensor)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(swapio.StorageError, match="the file is too short"):
        SafetensorsFolder(tmp_path)
    with pytest.raises(swapio.UsageError, match="complex128, which safetensors has not"):
        SafetensorsWriter(tmp_path, [Entry("a", torch.complex128, (1,))], ties={}, max_shard_nbytes=1)
    with pytest.raises(swapio.ConfigError, match="'fp8' is no dtype of exported weights"):
        export(tmp_path, tmp_path, dtype="fp8")


def test_inspect(tmp_path: Path) -> None:
    def said(*arguments: str, exit_code: int = 0) -> str:
        result = CliRunner().invoke(app, ["inspect", str(tmp_path / "saved"), *arguments])
        assert result.exit_code == exit_code, result.output
        return result.output

    with engine_of(tmp_path, dtype="bf16") as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved", client_state={"epoch": 1})
        engine.save_checkpoint(tmp_path / "saved", tag="other", save_latest=False)
    (tmp_path / "saved" / "x.tmp-1").mkdir()
    text = said()
    for part in (
        "2 (8 samples), saved by 1 rank", "tensors of bfloat16", "1 elements in 1 tensors of int64", "exp_avg, exp_avg_sq",
        "WarmupDecayLR", "epoch", "global_step2 (latest), other", "x.tmp-1: left by a save", "--verify reads every byte",
    ):  # fmt: skip
        assert part in text
    assert "every byte is as it was written" in said("--verify")
    found = json.loads(said("--json", "--tag", "other"))
    assert (found["tag"], found["step"], found["world_size"], found["damage"]) == ("other", 2, 1, [])
    assert found["model"]["bfloat16"]["numel"] == sum(p.numel() for p in make().parameters()) + 97
    flip(tmp_path / "saved" / "global_step2" / "__0_0.distcp", -1)
    assert "--verify" in said()
    assert re.search(r"damaged +read of '(module|optimizer)\.\S+' failed: it is not", said("--verify", exit_code=1))
    (tmp_path / "saved" / "global_step2" / ".metadata").unlink()
    text = said(exit_code=1)
    assert "unreadable" in text and "'.metadata' failed: it is missing" in text


def test_a_bar_after_two_seconds() -> None:
    now = [0.0]
    out = io.StringIO()
    with LateProgress("exporting", Console(file=out, force_terminal=True), clock=lambda: now[0]) as progress:
        progress(1, 10)
        assert not out.getvalue()
        now[0] = 2.0
        progress(5, 10)
        progress._bar.refresh()
    assert "exporting" in out.getvalue() and "5/10 bytes" in out.getvalue()


def test_nothing_is_trained(tmp_path: Path) -> None:
    """An empty file was written."""
    with swapio.initialize(model=make().requires_grad_(False), config={"swapio": {"device": "cpu"}})[0] as engine:
        engine.save_checkpoint(tmp_path / "saved")
        with pytest.raises(swapio.UsageError, match="no parameter is trained"):
            engine.save_16bit_model(tmp_path / "live", exclude_frozen_parameters=True)
    with pytest.raises(swapio.UsageError, match="no parameter is trained"):
        export(tmp_path / "saved", tmp_path / "out", trainable_only=True)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    (tmp_path / "other" / "model.safetensors").mkdir(parents=True)
    with engine_of(tmp_path) as engine:
        for out, said in (("out", "write of 'out' failed: File exists"), ("other", "write of 'other' failed: Is a directory")):
            with pytest.raises(swapio.StorageError, match=said):
                engine.save_16bit_model(tmp_path / out)
        assert [p.name for p in (tmp_path / "other").iterdir()] == ["model.safetensors"]
        train(engine, 0, 1)
