"""What is left on a drive, and what is never touched."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swapio.errors import StorageError
from swapio.io import FILE_BACKENDS, DirectStorage, FileStorage, Scratch, remove_orphans
from swapio.spec import PAGE_NBYTES

DEAD = "4194305-1-0"  # above the largest process number of Linux


def test_files_are_ours_alone(tmp_path: Path) -> None:
    with DirectStorage(tmp_path, named=True) as storage:
        assert storage.path == str(storage.file)
        assert {p.name for p in storage.file.parent.iterdir()} == {"swap", "lock"}
        for path in storage.file.parent.iterdir():
            assert path.stat().st_mode & 0o777 == 0o600
        assert storage.file.parent.stat().st_mode & 0o777 == 0o700
        assert storage.file.parent.parent.stat().st_mode & 0o777 == 0o700
    assert not list(tmp_path.iterdir())


def test_a_link_in_place_of_our_folder_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    (target / DEAD).mkdir(parents=True)
    path = tmp_path / "drive"
    path.mkdir()
    (path / f"swapio-{os.getuid()}").symlink_to(target)
    assert remove_orphans(path) == []
    for open_one in (Scratch, lambda p: DirectStorage(p, named=True)):
        with pytest.raises(StorageError, match="no folder of this user"):
            open_one(path)
    assert len(list(target.iterdir())) == 1


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    root = tmp_path / f"swapio-{os.getuid()}"
    (root / DEAD).mkdir(parents=True)
    root.chmod(0o777)
    assert remove_orphans(tmp_path) == []
    with pytest.raises(StorageError, match="this user alone"):
        Scratch(tmp_path)


def test_only_plain_files_in_folders_named_by_us_are_removed(tmp_path: Path) -> None:
    root = tmp_path / f"swapio-{os.getuid()}"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").write_text("keep")
    for name in (DEAD, "stranger", "1-2", f"{DEAD}x"):
        (root / name).mkdir(parents=True)
        (root / name / "swap").write_text("x")
    root.chmod(0o700)
    (root / "4194306-1-0").symlink_to(precious)
    (root / DEAD / "link").symlink_to(precious / "data")
    os.unlink(root / DEAD / "link")
    assert remove_orphans(tmp_path) == [root / DEAD]
    assert {p.name for p in root.iterdir()} == {"stranger", "1-2", f"{DEAD}x", "4194306-1-0"}
    assert (precious / "data").read_text() == "keep"


def test_the_lock_tells_of_owners_that_cannot_be_seen(tmp_path: Path) -> None:
    """A process of another container has a number that means nothing here; its files were removed under it."""
    folder = tmp_path / f"swapio-{os.getuid()}" / DEAD
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert remove_orphans(tmp_path) == []
    assert remove_orphans(tmp_path) == [folder]


@pytest.mark.parametrize("backend", FILE_BACKENDS)
def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path, backend: str) -> None:
    root = tmp_path / f"swapio-{os.getuid()}"
    script = (
        "import sys, time; from swapio.io import FILE_BACKENDS; kind = FILE_BACKENDS[sys.argv[2]]\n"
        "a = kind(sys.argv[1], named=True); b = kind(sys.argv[1])\n"
        "a.reserve(1 << 20, name='x'); b.reserve(1 << 20, name='x')\n"
        "print('ready', flush=True); time.sleep(600)"
    )
    kind: type[FileStorage] = FILE_BACKENDS[backend]
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path), backend], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with kind(tmp_path) as storage:
            storage.reserve(PAGE_NBYTES, name="mine")
            assert len(list(root.iterdir())) == 1, "the files of a living process were removed"
        child.send_signal(signal.SIGKILL)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("keep")
    (root / "stranger").mkdir()
    assert len(list(root.iterdir())) == 2
    kind(tmp_path).close()
    assert [p.name for p in root.iterdir()] == ["stranger"]
    assert foreign.read_text() == "keep"


def test_starting_and_ending_at_once(tmp_path: Path) -> None:
    """The last one to end removes the root, under the feet of one that starts."""
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            for _ in range(200):
                Scratch(tmp_path).remove()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, name=f"churn-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not list(tmp_path.iterdir())
