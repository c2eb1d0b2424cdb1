"""Every backend on filesystems that a test can mount."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.mounts import MOUNTS, mounted


@pytest.mark.slow
@pytest.mark.parametrize("kind", MOUNTS)
def test_the_conformance_suite(tmp_path: Path, kind: str) -> None:
    """All backends but those the filesystem refuses; reserving 2 GiB on the small ones is left out."""
    backends = "Mmap or Aiofiles" + (" or Direct or Striped" if kind != "ramfs" else "")
    tests = ["tests/io/test_backends.py", "-k", f"({backends}) and Test and not two_gib", "--basetemp={here}/pytest"]
    done = mounted(tmp_path, kind, [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def script(tmp_path: Path, kind: str, body: str, *, size: str = "512m", then: str = "true") -> str:
    start = "import errno, os; from swapio.io import *; from swapio.errors import *; here = '{here}'\n"
    done = mounted(tmp_path, kind, [sys.executable, "-c", start + body], size=size, then=then)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_o_direct_files_are_mapped(tmp_path: Path) -> None:
    said = script(
        tmp_path, "ramfs",
        "storage = open_storage([here]); print(storage.choice)\n"
        "extent = storage.reserve(1 << 20, name='x'); storage.write(extent.offset, aligned_buffer(1 << 20), name='x'); storage.close()\n"
        "try: open_storage([here], backend='direct')\n"
        "except StorageError as error: print(error)\n"
        "print(os.listdir(here))",
    )  # fmt: skip
    assert "backend='mmap'" in said
    assert "direct is refused (Invalid argument); a real write and read succeeded" in said
    assert "filesystem='ramfs'" in said
    assert "files there are RAM" in said
    assert 'use backend="mmap" or "aiofiles"' in said
    assert "\n[]\n" in said


def test_a_full_drive(tmp_path: Path) -> None:
    said = script(
        tmp_path, "tmpfs",
        "free = lambda: os.statvfs(here).f_bavail * os.statvfs(here).f_bsize\n"
        "for backend in FILE_BACKENDS:\n"
        "    storage = open_storage([here], backend=backend)\n"
        "    first = storage.reserve(512 << 10, name='first'); left = free()\n"
        "    for nbytes in (4 << 20, 1 << 20):\n"
        "        try: storage.reserve(nbytes, name='big'); print('reserved')\n"
        "        except StorageError as error: print(error.errno == errno.ENOSPC, error.name, error.wanted, free() == left)\n"
        "    second = storage.reserve(left, name='second')\n"
        "    for extent in (first, second): storage.write(extent.offset, aligned_buffer(extent.nbytes), name='x')\n"
        "    storage.close(); print(free() == 1 << 20, os.listdir(here))",
        size="1m",
    )  # fmt: skip
    assert f"True big {4 << 20} True\nTrue big {1 << 20} True\nTrue []\n" * 3 in said


def test_a_read_only_drive(tmp_path: Path) -> None:
    said = script(
        tmp_path, "tmpfs",
        "for backend in BACKENDS[:4]:\n"
        "    try: open_storage([here], backend=backend); print('opened')\n"
        "    except StorageError as error: print(error.errno == errno.EROFS, error)",
        then="mount -o remount,ro {here}",
    )  # fmt: skip
    assert said.count("True opening of 'swap file' failed: Read-only file system") == 4
    assert str(tmp_path) in said
