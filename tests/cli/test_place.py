from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from swapio.cli import _place
from swapio.cli._place import pick_directory, places
from swapio.errors import ConfigError


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """What `tmp_path` and its folders seem to be mounted as; fill it in."""
    found = {"/": "ext4"}
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [SimpleNamespace(mountpoint=m, fstype=t) for m, t in found.items()])
    return found


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs", "nfs4", "fuse.sshfs", "9p", "cifs"])
def test_memory_and_network_are_no_local_drives(mounts: dict[str, str], tmp_path: Path, kind: str) -> None:
    mounts[str(tmp_path.resolve())] = kind
    assert places([tmp_path]) == []


def test_the_first_directory_of_a_drive_stands_for_it(mounts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    found = places([tmp_path / "missing", tmp_path / "a", tmp_path])
    assert [p.path for p in found] == [(tmp_path / "a").resolve()]
    assert found[0].filesystem == "ext4"
    assert found[0].free_nbytes > 0


def test_a_file_is_no_place(mounts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert places([tmp_path / "file"]) == []


def test_an_unwritable_directory_is_no_place(mounts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # permissions do not stop root
    assert places([tmp_path]) == []


def test_drives_that_do_not_spin_come_first_then_the_most_room(
    monkeypatch: pytest.MonkeyPatch, mounts: dict[str, str], tmp_path: Path
) -> None:
    rooms = {"small": (1, 10 << 30, False), "large": (2, 90 << 30, False), "disk": (3, 999 << 30, True)}
    for name in rooms:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(_place, "_device", lambda path: rooms[path.name][0])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=rooms[path.name][1]))
    monkeypatch.setattr(_place, "_spins", lambda device: device == 3)
    candidates = [tmp_path / name for name in rooms]
    assert [p.path.name for p in places(candidates)] == ["large", "small", "disk"]
    place, why = pick_directory(1 << 30, candidates)
    assert place.path.name == "large"
    assert "3 local drives" in why
    assert pick_directory(100 << 30, candidates)[0].path.name == "disk"
    with pytest.raises(ConfigError, match=r"999\.0 GiB, in .*disk; free some space"):
        pick_directory(1 << 40, candidates)


def test_no_drive_at_all_is_said(mounts: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no local drive is writable"):
        pick_directory(1, [tmp_path / "missing"])
