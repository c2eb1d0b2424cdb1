"""Checkpoints that are whole or not there: kills, full drives, damage, tags."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import swapio
from tests.mounts import ROOT, mounted

from .work import Snapshot, engine_of, flip, make, same, settings, snapshot, train


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> list[Snapshot]:
    """After one step, and after two."""
    with engine_of(tmp_path_factory.mktemp("references"), params="none", state="none") as engine:
        found = []
        for step in range(2):
            train(engine, step, step + 1)
            found.append(snapshot(engine))
        return found


@pytest.mark.parametrize("tag", ["", "best"], ids=["another tag", "the same tag"])
def test_killed_at_any_moment(tmp_path: Path, references: list[Snapshot], tag: str, caplog: pytest.LogCaptureFixture) -> None:
    """SIGKILL before each open, rename, removal and sync of a save: the one before is there, or the new one, and both are whole."""
    code = f"from tests.checkpoint.work import *; die_at_each_moment({str(tmp_path)!r}, {str(tmp_path)!r}, {tag!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=100)
    moments = sorted((p for p in tmp_path.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    steps = []
    with engine_of(tmp_path, seed=5, params="none", state="none") as engine:
        for directory in moments:
            caplog.clear()
            path, _ = engine.load_checkpoint(directory)
            steps.append(engine.global_steps)
            same(snapshot(engine), references[engine.global_steps - 1])
            assert path == str(directory / (tag or f"global_step{steps[-1]}"))
            left = [p.name for p in directory.iterdir() if ".tmp-" in p.name]
            assert all(name in caplog.text for name in left) and bool(left) == ("did not end" in caplog.text)
        assert len(steps) > 12 and steps == sorted(steps) and set(steps) == {1, 2}
        assert engine.save_checkpoint(moments[5], tag=tag or None)  # over what was left
        assert "did not end" in caplog.text


def test_a_full_drive(tmp_path: Path) -> None:
    done = mounted(tmp_path, "tmpfs", [sys.executable, "-c", "from tests.checkpoint.work import *; fill('{here}')"], size="2m")
    assert done.returncode == 0, done.stderr


def test_one_flipped_bit(tmp_path: Path) -> None:
    """The error names the tensor, and the engine stays as it is; the other checkpoint loads."""
    with engine_of(tmp_path) as engine:
        for step in range(2):
            train(engine, step, step + 1)
            engine.save_checkpoint(tmp_path / "saved")
        train(engine, 2, 3)
        before = snapshot(engine)
        folder = tmp_path / "saved" / "global_step2"
        names, offset = {".metadata": (".metadata", 500), "manifest.json": ("manifest.json", 90)}, 0
        for name, nbytes, _ in json.loads((folder / "manifest.json").read_text())["files"]["__0_0.distcp"]:
            names |= {f"{name} {place}": ("__0_0.distcp", offset + place) for place in (0, nbytes - 1)}
            offset += nbytes
        assert len(names) > 60 and offset == (folder / "__0_0.distcp").stat().st_size
        for name in ("random.0 0", "engine 0", *list(names)[:2], *list(names)[6::9], *list(names)[-2:]):
            flip(folder / names[name][0], names[name][1])
            with pytest.raises(swapio.StorageError, match=rf"'{re.escape(name.split()[0])}' failed: it is "):
                engine.load_checkpoint(tmp_path / "saved")
            flip(folder / names[name][0], names[name][1])
        same(snapshot(engine), before)
        assert engine.global_steps == 3
        flip(folder / "__0_0.distcp", 0)
        engine.load_checkpoint(tmp_path / "saved", "global_step1")
        train(engine, 1, 3)
        same(snapshot(engine), before)


@pytest.mark.parametrize(
    ("params", "state", "budget"), [("nvme", "nvme", "2MiB"), ("nvme", "nvme", "3MiB"), ("nvme", "cpu", "auto"), ("none", "nvme", "auto")]
)
@pytest.mark.parametrize("init", [False, True])
def test_one_flipped_bit_in_a_fresh_engine(tmp_path: Path, params: str, state: str, budget: str, init: bool) -> None:
    """What is checked as it is read has replaced a part of the state already: all of it is as before, and training goes on from there."""
    small: Any = {} if budget == "auto" else {"swapio": {"device": "cpu", "host_memory": budget, "checksums": False}}

    def fresh() -> Any:
        config = settings(tmp_path, params=params, state=state, dtype="bf16", **small)
        with swapio.zero.Init(config_dict_or_path=config) if init else contextlib.nullcontext():
            model = make(3, width=257, freeze=False)
        return swapio.initialize(model=model, config=config)[0]

    with fresh() as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "saved", tag="a")
        train(engine, 2, 3)
        saved = snapshot(engine)
    with fresh() as engine:
        train(engine, 0, 1)
        expected = snapshot(engine)
    offset, at = 0, []
    parts = json.loads((tmp_path / "saved" / "a" / "manifest.json").read_text())["files"]["__0_0.distcp"]
    for name, nbytes, _ in parts:
        at.append((name, offset + nbytes - 1))
        offset += nbytes
    with fresh() as engine:
        before = snapshot(engine)
        reserved = engine.manager.storage.reserved_nbytes
        for name, place in (*at[:3], *at[7::8], *at[-2:]):
            flip(tmp_path / "saved" / "a" / "__0_0.distcp", place)
            with pytest.raises(swapio.StorageError, match=rf"'{re.escape(name)}' failed: it is "):
                engine.load_checkpoint(tmp_path / "saved")
            flip(tmp_path / "saved" / "a" / "__0_0.distcp", place)
            assert engine.manager.storage.reserved_nbytes == reserved
        same(snapshot(engine), before)
        train(engine, 0, 1)
        same(snapshot(engine), expected)
    with fresh() as engine:
        read = rchar()
        engine.load_checkpoint(tmp_path / "saved")
        if budget == "2MiB":
            assert rchar() - read < 1.3 * offset  # once, and a little of what it replaces
        assert engine.manager.storage.reserved_nbytes <= reserved  # less where it began with bytes that were constructed elsewhere
        train(engine, 2, 3)
        same(snapshot(engine), saved)


def rchar() -> int:
    """Bytes that this process has read from files, the page cache included."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_files_that_are_short_missing_or_nonsense(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(tmp_path, tag="a")
        data, manifest = tmp_path / "a" / "__0_0.distcp", tmp_path / "a" / "manifest.json"
        content = data.read_bytes()
        data.write_bytes(content[:-1])
        with pytest.raises(swapio.StorageError, match="another size"):
            engine.load_checkpoint(tmp_path)
        data.unlink()
        with pytest.raises(swapio.StorageError, match="it is missing"):
            engine.load_checkpoint(tmp_path)
        data.write_bytes(content)
        good = manifest.read_text()
        for bad in (good[:-5], "[]", good.replace("files", "filEs"), good.replace('"format": 2', '"format": 3')):
            manifest.write_text(bad)
            with pytest.raises((swapio.StorageError, swapio.UsageError), match=r"manifest\.json"):
                engine.load_checkpoint(tmp_path)
        manifest.write_text(good)
        assert engine.load_checkpoint(tmp_path)[0] == str(tmp_path / "a")


def test_saved_and_loaded_and_saved_again(tmp_path: Path) -> None:
    with engine_of(tmp_path, dtype="bf16") as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path, tag="a")
        train(engine, 2, 3)
        engine.load_checkpoint(tmp_path, "a")
        engine.save_checkpoint(tmp_path, tag="b")
    assert (tmp_path / "a" / "__0_0.distcp").read_bytes() == (tmp_path / "b" / "__0_0.distcp").read_bytes()


def test_old_ones_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """But for what is not ours, not whole, not as it was saved, or named by `latest`."""
    with engine_of(tmp_path, params="none", state="none") as engine:
        directory = tmp_path / "saved"
        for tag in ("latest one", "a", "b", "with a note", "short", "renamed"):
            engine.save_checkpoint(directory, tag=tag, save_latest=tag == "latest one")
        (directory / "with a note" / "note").touch()
        (directory / "short" / "__0_0.distcp").unlink()
        (directory / "renamed").rename(directory / "best")
        (directory / "mine").mkdir()
        (directory / "mine" / "manifest.json").write_text("{}")
        for tag in ("d", "e"):
            engine.save_checkpoint(directory, tag=tag, save_latest=False, keep_last=2)
        kept = {"latest one", "latest", "with a note", "short", "best", "mine", "d", "e"}
        assert {p.name for p in directory.iterdir()} == kept
        assert all(f"{directory / name} is old, but stays" in caplog.text for name in ("with a note", "short", "best", "mine"))
        with pytest.raises(swapio.UsageError, match="keep_last=0 would keep no checkpoint"):
            engine.save_checkpoint(directory, keep_last=0)
        engine.save_checkpoint(directory, tag="f", keep_last=1)
        assert {p.name for p in directory.iterdir()} == (kept | {"f"}) - {"latest one", "d", "e"}


def test_the_oldest_is_the_one_saved_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied folder counted as new, and a clock that was set back would have the newest removed."""
    with engine_of(tmp_path / "swap", params="none", state="none") as engine:
        for tag in "zab":
            engine.save_checkpoint(tmp_path, tag=tag, save_latest=False)
        (tmp_path / "z" / "manifest.json").touch()
        assert swapio.checkpoint.tags(tmp_path) == ["z", "a", "b"]
        monkeypatch.setattr("time.time_ns", lambda: 1)
        engine.save_checkpoint(tmp_path, tag="c", save_latest=False, keep_last=2)
        assert swapio.checkpoint.tags(tmp_path) == ["b", "c"]
        engine.load_checkpoint(tmp_path, "b")


def test_tags(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with engine_of(tmp_path) as engine:
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, None)
        assert "has no file 'latest'" in caplog.text and "checkpoints there: none" in caplog.text
        for tag in ("a", "b"):
            train(engine, 0, 1)
            engine.save_checkpoint(tmp_path, tag=tag)
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, save_latest=False)
        with pytest.raises(swapio.UsageError, match="has no checkpoint 'c'; it has 'a', 'b', 'global_step3'"):
            engine.load_checkpoint(tmp_path, "c")
        for wanted, step in ((None, 2), ("a", 1), ("global_step3", 3)):
            engine.load_checkpoint(tmp_path, wanted)
            assert engine.global_steps == step
        (tmp_path / "latest").write_bytes(b"\xff")
        with pytest.raises(swapio.UsageError, match="has no checkpoint '\ufffd'; it has 'a', 'b'"):
            engine.load_checkpoint(tmp_path)
        (tmp_path / "latest").write_text("d")
        with pytest.raises(swapio.UsageError, match="has no checkpoint 'd'"):
            engine.load_checkpoint(tmp_path)
        for bad in ("", "a/b", "..", "latest", "a.tmp-1", "日" * 67, "\ud800"):
            with pytest.raises(swapio.UsageError, match="cannot be the name of a folder"):
                engine.save_checkpoint(tmp_path, tag=bad)
        with pytest.raises(swapio.UsageError, match=r"tag=' a\\n' begins or ends with white space, .* use 'a'"):
            engine.save_checkpoint(tmp_path, tag=" a\n")  # which a load without a tag did not find
        for good in ("日" * 66, "a b", "*", "[x] é"):
            engine.save_checkpoint(tmp_path / "ü", tag=good)
            assert engine.load_checkpoint(tmp_path / "ü")[0] == str(tmp_path / "ü" / good)


@pytest.mark.parametrize("kind", ["folder", "file", "dangling"])
def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path, kind: str) -> None:
    """A folder of the user's, under the name of the tag, was deleted."""
    if kind == "folder":
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "precious").touch()
    else:
        (tmp_path / "data").touch() if kind == "file" else (tmp_path / "data").symlink_to("nowhere")
    with engine_of(tmp_path, params="none", state="none") as engine:
        with pytest.raises(swapio.UsageError, match=r"data is there and is no checkpoint: .* use another tag"):
            engine.save_checkpoint(tmp_path, tag="data")
        assert [p.name for p in tmp_path.rglob("*")] == (["data", "precious"] if kind == "folder" else ["data"])
        train(engine, 0, 1)


def test_links_and_empty_folders_are_replaced(tmp_path: Path) -> None:
    with engine_of(tmp_path, params="none", state="none") as engine:
        engine.save_checkpoint(tmp_path / "other", tag="a")
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "a").symlink_to(tmp_path / "other" / "a")
        (tmp_path / "saved" / "c").mkdir()
        train(engine, 0, 1)
        for tag in ("a", "c"):
            engine.save_checkpoint(tmp_path / "saved", tag=tag)
            engine.load_checkpoint(tmp_path / "saved")
            assert engine.global_steps == 1
        assert not (tmp_path / "saved" / "a").is_symlink()
        shutil.rmtree(tmp_path / "saved" / "a")
        (tmp_path / "saved" / "a").symlink_to(tmp_path / "other" / "a")
        engine.save_checkpoint(tmp_path / "saved", tag="d", keep_last=1)
        assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["d", "latest"]
        engine.load_checkpoint(tmp_path / "other", "a")  # what a link was to
        assert engine.global_steps == 0


@pytest.mark.parametrize("what", ["global_step1.tmp-", "manifest.json", "latest.tmp-"])
def test_no_room_for_what_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Every fault of the drive is a `StorageError`, and leaves the checkpoint before."""
    with engine_of(tmp_path, params="none", state="none") as engine:
        engine.save_checkpoint(tmp_path / "saved")
        train(engine, 0, 1)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_open, real_mkdir = Path.open, Path.mkdir

        def refuse(real: Any) -> Any:
            def call(self: Path, *args: Any, **kwargs: Any) -> Any:
                result = real(self, *args, **kwargs) if not self.name.startswith(what) else None
                if result is None and self.name.startswith(what):
                    raise full
                return result

            return call

        monkeypatch.setattr(Path, "open", refuse(real_open))
        monkeypatch.setattr(Path, "mkdir", refuse(real_mkdir))
        with pytest.raises(swapio.StorageError, match=r"No space left on device \[ENOSPC\]"):
            engine.save_checkpoint(tmp_path / "saved")
        monkeypatch.undo()
        assert not [p.name for p in (tmp_path / "saved").iterdir() if ".tmp-" in p.name]
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.global_steps == 0
        train(engine, 1, 2)
