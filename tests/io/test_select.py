"""Which backend is taken, and that it says why."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from swapio.errors import ConfigError, StorageError
from swapio.io import FILE_BACKENDS, ChecksummedStorage, Choice, FileStorage, StripedStorage, filesystem_of, open_storage
from swapio.io import _select as select
from swapio.spec import PAGE_NBYTES
from swapio.testing import aligned_buffer

SHM = Path("/dev/shm")


def refusing(kind: type[FileStorage], code: int) -> type[FileStorage]:
    class Refusing(kind):  # type: ignore[valid-type, misc]
        def _start(self) -> None:
            raise OSError(code, "refused")

    return Refusing


def test_auto_takes_the_first_that_works_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filesystem = filesystem_of(tmp_path).type
    with open_storage([tmp_path]) as storage:
        assert storage.choice is not None
        assert storage.choice.backend == storage.kind
        assert storage.choice.filesystem == filesystem
        assert "a real write and read succeeded" in storage.choice.reason
    for refused, taken in (("direct", "mmap"), ("mmap", "aiofiles")):
        monkeypatch.setitem(select.FILE_BACKENDS, refused, refusing(FILE_BACKENDS[refused], errno.EINVAL))
        with open_storage([tmp_path]) as storage:
            assert storage.choice is not None
            assert (storage.kind, storage.choice.backend) == (taken, taken)
            assert f"{refused} is refused (Invalid argument)" in storage.choice.reason
    monkeypatch.setitem(select.FILE_BACKENDS, "aiofiles", refusing(FILE_BACKENDS["aiofiles"], errno.EINVAL))
    with pytest.raises(StorageError):
        open_storage([tmp_path])
    assert not list(tmp_path.iterdir())


def test_what_no_backend_can_mend_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(select.FILE_BACKENDS, "direct", refusing(FILE_BACKENDS["direct"], errno.ENOSPC))
    with pytest.raises(StorageError) as caught:
        open_storage([tmp_path])
    assert caught.value.errno == errno.ENOSPC


@pytest.mark.parametrize("backend", FILE_BACKENDS)
def test_a_backend_that_was_asked_for(tmp_path: Path, backend: str) -> None:
    with open_storage([tmp_path], backend=backend) as storage:
        assert storage.kind == backend
        assert storage.choice == Choice(backend, "it was asked for", filesystem_of(tmp_path).type)


def test_memory() -> None:
    with open_storage([]) as storage:
        assert storage.choice == Choice("memory", "no path was given", "memory")
    with open_storage(["/nowhere"], backend="memory", checksums=True) as storage:
        assert isinstance(storage, ChecksummedStorage)
        assert storage.choice == Choice("memory", "it was asked for", "memory")


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use one of auto, direct, mmap, aiofiles, memory"):
        open_storage([tmp_path], backend="floppy")
    with pytest.raises(ConfigError, match="needs a directory"):
        open_storage([], backend="mmap")


def test_several_paths_are_striped(tmp_path: Path) -> None:
    with open_storage([tmp_path / "a", tmp_path / "b"], checksums=True) as storage:
        assert isinstance(storage, StripedStorage)
        assert [type(m) for m in storage.members] == [ChecksummedStorage] * 2
        assert storage.choice is not None
        assert storage.choice.backend == storage.members[0].kind
        assert storage.choice.reason.count("of the bytes by measured speed") == 2
        extent = storage.reserve(9 * PAGE_NBYTES, name="x")
        storage.write(extent.offset, aligned_buffer(9 * PAGE_NBYTES, b"striped"), name="x")
    with pytest.raises(StorageError, match="none"):
        open_storage([tmp_path / "a", tmp_path / "none" / "deeper"])
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_one_directory_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with caplog.at_level(logging.WARNING, "swapio"), open_storage([tmp_path, tmp_path / "link"]):
        assert f"{tmp_path} is given more than once" in caplog.text


@pytest.mark.skipif(filesystem_of(SHM).type != "tmpfs", reason="/dev/shm is no tmpfs")
def test_tmpfs_is_memory_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "swapio"), open_storage([SHM]) as storage:
        assert storage.choice is not None
        assert storage.choice.filesystem == "tmpfs"
    assert "/dev/shm is tmpfs: files there are RAM" in caplog.text


def test_filesystems() -> None:
    assert filesystem_of("/proc/self").type == "proc"
    assert filesystem_of("/proc/self").mount_point == "/proc"
    assert filesystem_of("/nowhere/at/all") == filesystem_of("/")
    assert filesystem_of(".").options
    assert not filesystem_of("/proc").is_memory
