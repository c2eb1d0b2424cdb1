"""What `swapio doctor` finds on this machine, on filesystems made for it, and on machines made of files; and what it makes of the facts."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from swapio.cli import _checks, _doctor, _facts, main
from swapio.cli._app import app
from swapio.cli._checks import (
    check_accelerators,
    check_backend,
    check_bf16,
    check_cores,
    check_drive,
    check_file_size,
    check_filesystem,
    check_leftovers,
    check_memlock,
    check_memory,
    check_numa,
    check_open_files,
    check_space,
    check_versions,
)
from swapio.cli._doctor import examine, run_doctor
from swapio.cli._drive import Drive, drives_of
from swapio.cli._facts import Accelerator, Accelerators, Cores, Leftovers, LockLimit, Opened, Space
from swapio.cli._place import Place
from swapio.errors import StorageError
from swapio.io import FILE_BACKENDS, Choice, DirectStorage, Filesystem, filesystem_of, open_storage
from swapio.report import Check, Status, check_line, verdict, worst
from swapio.swap import CgroupMemory, HostMemory
from tests.mounts import mounted

GIB = 1 << 30
OK, DEGRADED, BROKEN = Status
GPU = Accelerators((Accelerator("cuda:0 H", 80 * GIB, 79 * GIB),), num_nodes=1, built_for="12.8")


def parsed(report: dict[str, Any]) -> list[Check]:
    return [Check(c["name"], Status(c["status"]), c["found"], c["advice"]) for c in report["checks"]]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A root with a control group of 4 GiB and half a processor, two NUMA nodes, no GPU, and no capabilities."""
    group = "sys/fs/cgroup/job"
    return tree(
        tmp_path / "machine",
        {
            "proc/self/cgroup": "0::/job",
            "proc/self/status": "Name:\tpython\nCapEff:\t0000000000000000",
            f"{group}/memory.max": str(4 * GIB),
            f"{group}/memory.current": str(GIB),
            f"{group}/memory.stat": "inactive_file 0",
            f"{group}/cpu.max": "50000 100000",
            "sys/devices/system/node/node0/x": "",
            "sys/devices/system/node/node1/x": "",
        },
    )


def invoke(*args: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *map(str, args)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


# this machine


def test_this_machine(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    code, lines = invoke(place, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    checks = parsed(report)
    assert lines.splitlines() == [*map(check_line, checks), verdict(checks)]
    assert report["verdict"] == worst(checks)
    assert code == ["ok", "degraded", "broken"].index(report["verdict"])
    assert list(place.iterdir()) == []

    found = by_name(checks)
    with open_storage([place]) as storage:
        assert storage.choice is not None
        assert found["backend"].found == f"{storage.choice.backend}: {storage.choice.reason}"
    assert found["path"].found == f"{place}, as asked"
    assert found["filesystem"].found.startswith(filesystem_of(place).type)
    assert ("cuda:0" in found["devices"].found) == torch.cuda.is_available()
    assert f"torch {torch.__version__}" in found["versions"].found
    assert not [c for c in checks if "not known, because" in c.found]


def test_json_alone_on_standard_output(tmp_path: Path) -> None:
    code, out = invoke(tmp_path, "--json", "-")
    report = json.loads(out)
    assert code == ["ok", "degraded", "broken"].index(report["verdict"])
    assert len({c["name"] for c in report["checks"]}) == len(report["checks"]) == 15


@pytest.mark.parametrize(("statuses", "code"), [([OK], 0), ([OK, DEGRADED, OK], 1), ([DEGRADED, BROKEN, OK], 2), ([], 0)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: list[Status], code: int) -> None:
    monkeypatch.setattr(_doctor, "examine", lambda path, budget: [Check(f"c{i}", s, "found") for i, s in enumerate(statuses)])
    assert invoke(tmp_path)[0] == invoke(tmp_path, "--json", "-")[0] == code


def test_a_terminal_gets_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = [Check("first", OK, "[bold] :smile: x"), Check("second", BROKEN, "y" * 200, "do this")]
    monkeypatch.setattr(_doctor, "examine", lambda path, budget: checks)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=60)
    assert run_doctor(tmp_path, None, None, console) == 2
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert lines[0] == "ok      first   [bold] :smile: x"
    assert lines[1].startswith("broken  second  yyy")
    assert lines[-2].strip() == "do this"
    assert lines[-1] == "broken: training like this fails; mend what is broken first (1 ok, 0 degraded, 1 broken)"
    assert all(len(line) <= 60 for line in lines[:-1])


def test_a_line_stays_one_line() -> None:
    check = Check("x", OK, "a\nb\x1b[31m\udce4", "c\t d")
    assert (check.found, check.advice) == ("a b [31m\\udce4", "c d")
    assert check_line(check) == "ok        x            a b [31m\\udce4 -> c d"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host-memory", "many"], "--host-memory: 'many' is not a size"),
        (["--json", "/dev/null/x"], "--json: /dev/null/x cannot be written"),
    ],
)
def test_what_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["swapio", "doctor", str(tmp_path), *args])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_check_that_fails_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ValueError("no\nidea")

    before = [check.name for check in examine(tmp_path)]
    names = "try_storage space drives_below leftovers soft_limit lock_limit accelerators computes_in_bf16 numa_nodes cores versions".split()
    for name in names:
        monkeypatch.setattr(_facts, name, fail)
    for name in ("filesystem_of", "host_memory", "places"):
        monkeypatch.setattr(_doctor, name, fail)
    checks = examine()
    assert [check.name for check in checks] == before
    assert {(check.status, check.found) for check in checks} == {(DEGRADED, "not known, because ValueError: no idea")}


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ([Place(Path("/a"), "xfs", GIB, False), Place(Path("/b"), "xfs", GIB, True)], OK, "/a, the best of the local drives .* (2)"),
        ([], DEGRADED, "no local drive can be written, so /tmp is looked at"),
    ],
)
def test_the_path_is_chosen_as_elsewhere(monkeypatch: pytest.MonkeyPatch, found: list[Place], status: Status, words: str) -> None:
    monkeypatch.setattr(_doctor, "places", lambda: found)
    monkeypatch.setattr(_facts, "try_storage", lambda path: Opened(path, Choice("direct", f"in {path}", "xfs")))
    checks = by_name(examine())
    assert checks["path"].status is status
    assert all(word in checks["path"].found for word in words.split(" .* "))
    assert checks["backend"].found == f"direct: in {found[0].path if found else '/tmp'}"


# paths that cannot be used, or not well


def doctor_on(tmp_path: Path, kind: str, **mount: str) -> tuple[int, dict[str, Check]]:
    done = mounted(tmp_path, kind, [sys.executable, "-m", "swapio", "doctor", "{here}", "--json", "-"], **mount)
    assert done.stderr == ""
    return done.returncode, by_name(parsed(json.loads(done.stdout)))


@pytest.mark.slow
def test_a_read_only_mount(tmp_path: Path) -> None:
    code, found = doctor_on(tmp_path, "tmpfs", then="mount -o remount,ro {here}")
    assert (code, found["backend"].status) == (2, BROKEN)
    assert "Read-only file system" in found["backend"].found
    assert "remount it (mount -o remount,rw)" in found["backend"].advice


@pytest.mark.slow
def test_a_full_drive(tmp_path: Path) -> None:
    code, found = doctor_on(tmp_path, "tmpfs", size="1m", then="(cat /dev/zero > {here}/fill 2>/dev/null || true)")
    assert (code, found["backend"].status, found["space"].status) == (2, BROKEN, BROKEN)
    assert "[ENOSPC]" in found["backend"].found
    assert "delete something" in found["backend"].advice
    assert found["space"].found == "0 B free of 1.0 MiB"


@pytest.mark.slow
def test_without_o_direct_and_in_memory(tmp_path: Path) -> None:
    code, found = doctor_on(tmp_path, "ramfs")
    assert (code, found["backend"].status, found["filesystem"].status, found["space"].status) == (2, DEGRADED, BROKEN, DEGRADED)
    assert found["backend"].found == "mmap: direct is refused (Invalid argument); a real write and read succeeded"


@pytest.mark.slow
def test_a_filesystem_in_a_file(tmp_path: Path) -> None:
    _, found = doctor_on(tmp_path, "ext4", size="16m")
    assert (found["filesystem"].status, found["space"].status, found["drive"].status) == (OK, DEGRADED, OK)
    assert found["filesystem"].found.startswith("ext4 on /dev/loop")
    assert found["drive"].found.startswith("loop")
    assert found["drive"].found.endswith("virtual")


@pytest.mark.skipif(filesystem_of("/dev/shm").type != "tmpfs", reason="/dev/shm is no tmpfs")
def test_tmpfs() -> None:
    before = os.listdir("/dev/shm")
    code, out = invoke("/dev/shm")
    assert code == 2
    assert "broken    filesystem   tmpfs" in out
    assert "files there are RAM" in out
    assert os.listdir("/dev/shm") == before


def test_a_drive_that_refuses_o_direct(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Refusing(DirectStorage):
        def _start(self) -> None:
            raise OSError(errno.EINVAL, "refused")

    monkeypatch.setitem(FILE_BACKENDS, "direct", Refusing)
    check = by_name(examine(tmp_path))["backend"]
    assert check.status is DEGRADED
    assert check.found == "mmap: direct is refused (Invalid argument); a real write and read succeeded"
    assert "ext4, xfs or btrfs" in check.advice


@pytest.mark.parametrize(
    ("path", "found", "advice"),
    [
        ("missing/deeper", "No such file or directory", "make it (mkdir -p)"),
        ("file", "Not a directory", "give the directory that it is in"),
        ("/proc", "opening of 'swap file' failed", "no file can be made there"),
    ],
)
def test_a_path_that_cannot_be_used(tmp_path: Path, path: str, found: str, advice: str) -> None:
    (tmp_path / "file").touch()
    checks = by_name(examine(tmp_path / path))
    assert checks["backend"].status is BROKEN
    assert found in checks["backend"].found
    assert advice in checks["backend"].advice
    assert not [c for c in checks.values() if "not known, because" in c.found]
    assert os.listdir(tmp_path) == ["file"]


def test_a_path_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    user = os.geteuid()
    os.seteuid(user or 65534)  # permissions do not stop root
    try:
        checks = by_name(examine(tmp_path))
    finally:
        os.seteuid(user)
    assert checks["backend"].status is BROKEN
    assert "Permission denied" in checks["backend"].found
    assert "chown or chmod" in checks["backend"].advice


@pytest.mark.slow
def test_a_limit_on_files_fails_the_backend_and_is_said(tmp_path: Path) -> None:
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); from swapio.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "doctor", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "[EFBIG]" in done.stdout
    assert "degraded  file size    at most 1000 B: the state of 83 parameters -> raise it: ulimit -f unlimited" in done.stdout


def test_what_the_log_says_is_said_by_the_checks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def warn(path: Path, budget: int | None) -> list[Check]:
        logging.getLogger("swapio").warning("once is enough")
        return []

    log, root = logging.getLogger("swapio"), logging.getLogger()
    before, root.handlers = (list(log.handlers), root.handlers), []  # pytest's own, or the last resort is never asked
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_doctor, "examine", warn)
            run_doctor(tmp_path, None, None, Console())
    finally:
        root.handlers = before[1]
    assert capfd.readouterr().err == ""
    assert log.handlers == before[0]


def opened(code: int) -> Opened:
    return Opened(Path("/x"), error=StorageError("opening", name="swap file", path="/x", offset=0, wanted=0, got=0, errno=code))


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EROFS, "remount"),
        (errno.EACCES, "chmod"),
        (errno.EPERM, "chmod"),
        (errno.ENOSPC, "delete"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EEXIST, "rename"),
        (errno.EMFILE, "ulimit -n"),
        (errno.EIO, "dmesg"),
        (errno.ENODEV, "a directory on a local drive"),
    ],
)
def test_each_refusal_has_its_advice(code: int, advice: str) -> None:
    check = check_backend(opened(code))
    assert check.status is BROKEN
    assert errno.errorcode[code] in check.found
    assert advice in check.advice


# judgement


def filesystem(kind: str, options: str = "rw,relatime") -> Filesystem:
    return Filesystem(kind, "/dev/x", "/mnt", tuple(options.split(",")))


MEMORY = HostMemory(64 * GIB, 32 * GIB, None)
LIMITED = dataclasses.replace(MEMORY, cgroup=CgroupMemory(Path("/g"), 8 * GIB, 2 * GIB))
SSD = Drive("nvme0n1", "Fast 1TB", rotational=False, is_virtual=False)
DISK = Drive("sda", "Slow 1TB", rotational=True, is_virtual=False)
VIRTUAL = Drive("vda", "", rotational=True, is_virtual=True)
NONE = Leftovers(Path("/x/swapio-0"), None, (), ())


@pytest.mark.parametrize(
    ("check", "status", "words"),
    [
        (check_backend(Opened(Path("/x"), Choice("direct", "because", "xfs"))), OK, "direct: because"),
        (check_backend(Opened(Path("/x"), Choice("aiofiles", "because", "xfs"))), DEGRADED, "page cache"),
        (check_filesystem(filesystem("xfs")), OK, "xfs on /dev/x at /mnt (rw,relatime)"),
        (check_filesystem(filesystem("tmpfs")), BROKEN, "RAM"),
        (check_filesystem(filesystem("ramfs")), BROKEN, "RAM"),
        (check_filesystem(filesystem("nfs4")), DEGRADED, "network"),
        (check_filesystem(filesystem("fuse.sshfs")), DEGRADED, "network"),
        (check_filesystem(filesystem("proc")), DEGRADED, "not made for large files"),
        (check_filesystem(filesystem("ext4", "ro,relatime")), BROKEN, "remount"),
        (check_filesystem(filesystem("ext4", "rw,sync")), DEGRADED, "wait"),
        (check_filesystem(filesystem("ext4", "rw,data=journal")), DEGRADED, "twice"),
        (check_filesystem(filesystem("ext4", "rw,data=ordered")), OK, ""),
        (check_filesystem(filesystem("overlay")), OK, "container"),
        (check_filesystem(Filesystem("unknown", "", "/", ())), OK, "does not tell"),
        (check_space(Space(100 * GIB, 13 * GIB)), OK, "1.1 billion parameters at 12 bytes each"),
        (check_space(Space(100 * GIB, GIB + 12 * 2_500_000)), OK, "2.5 million parameters"),
        (check_space(Space(100 * GIB, GIB)), DEGRADED, "less than 1.0 GiB"),
        (check_space(Space(100 * GIB, 0)), BROKEN, "12 bytes per parameter"),
        (check_space(Space(0, 0)), DEGRADED, "not known"),
        (check_drive([SSD]), OK, "nvme0n1, Fast 1TB, does not spin"),
        (check_drive([SSD, DISK]), DEGRADED, "sda, Slow 1TB, spins"),
        (check_drive([VIRTUAL]), OK, "vda, virtual"),
        (check_drive([Drive("zram0", "", rotational=False, is_virtual=True)]), BROKEN, "zram0, RAM"),
        (check_drive([]), OK, "not known"),
        (check_memory(MEMORY, None), OK, "host_memory=auto takes 25.6 GiB"),
        (check_memory(MEMORY, 8 * GIB), OK, "asked for 8.0 GiB"),
        (check_memory(MEMORY, 30 * GIB), DEGRADED, "25.6 GiB is safer"),
        (check_memory(MEMORY, 33 * GIB), BROKEN, "ask for at most 25.6 GiB"),
        (check_memory(LIMITED, 4 * GIB), OK, "limit of the control group 8.0 GiB, 6.0 GiB left"),
        (check_memory(LIMITED, 5 * GIB), DEGRADED, "4.8 GiB is safer"),
        (check_memory(LIMITED, 7 * GIB), BROKEN, "ask for at most 4.8 GiB"),
        (check_memory(LIMITED, None), OK, "auto takes 4.8 GiB"),
        (check_memory(HostMemory(GIB, GIB // 2, None), None), DEGRADED, "raise the limit"),
        (
            check_memlock(LockLimit(64 << 10, False), has_accelerator=True, wanted_nbytes=GIB),
            DEGRADED,
            "64.0 KiB, and 1.0 GiB of host memory",
        ),
        (check_memlock(LockLimit(64 << 10, True), has_accelerator=True, wanted_nbytes=GIB), OK, "this process has CAP_IPC_LOCK"),
        (check_memlock(LockLimit(64 << 10, False), has_accelerator=False, wanted_nbytes=GIB), OK, "64.0 KiB; it does not matter"),
        (check_memlock(LockLimit(GIB - 1, False), has_accelerator=True, wanted_nbytes=GIB), DEGRADED, "ulimit -l unlimited"),
        (check_memlock(LockLimit(GIB, False), has_accelerator=True, wanted_nbytes=GIB), OK, "1.0 GiB"),
        (check_memlock(LockLimit(None, False), has_accelerator=True, wanted_nbytes=GIB), OK, "unlimited"),
        (check_accelerators(GPU), OK, "cuda:0 H, 80.0 GiB, 79.0 GiB free"),
        (check_accelerators(dataclasses.replace(GPU, found=GPU.found * 2)), OK, "one process uses one"),
        (
            check_accelerators(Accelerators((*GPU.found, Accelerator("cuda:1 K", problem="no kernel image")))),
            BROKEN,
            "cuda:1 K: no kernel image",
        ),
        (check_accelerators(Accelerators()), OK, "PyTorch is built without CUDA"),
        (check_accelerators(Accelerators(built_for="12.8", problem="Found no NVIDIA driver")), OK, "built for CUDA 12.8"),
        (check_accelerators(Accelerators(num_nodes=2)), DEGRADED, "install PyTorch's CUDA build"),
        (check_accelerators(Accelerators(num_nodes=2, built_for="12.8", problem="driver too old")), DEGRADED, "driver too old"),
        (check_accelerators(Accelerators(num_nodes=2, built_for="12.8", hidden="")), DEGRADED, "unset CUDA_VISIBLE_DEVICES"),
        (check_bf16(False, has_accelerator=True), OK, "accelerator"),
        (check_bf16(True, has_accelerator=False), OK, "this processor computes in it"),
        (check_bf16(False, has_accelerator=False), DEGRADED, "train in fp32"),
        (check_cores(Cores(8, 8, None, 8)), OK, "8 of 8 usable"),
        (check_cores(Cores(8, 4, None, 8)), DEGRADED, "OMP_NUM_THREADS=4"),
        (check_cores(Cores(8, 8, 1.5, 8)), DEGRADED, "1.5 of 8 usable (the control group's limit; 8 by affinity)"),
        (check_cores(Cores(8, 8, 0.5, 1)), DEGRADED, "OMP_NUM_THREADS=1"),
        (check_cores(Cores(8, 2, 4.0, 2)), OK, "2 of 8 usable;"),
        (check_numa(0), OK, "not known"),
        (check_numa(1), OK, "1 node"),
        (check_numa(2), OK, "numactl"),
        (check_open_files(None), OK, "unlimited"),
        (check_open_files(1024), OK, "1024"),
        (check_open_files(64), DEGRADED, "ulimit -n"),
        (check_file_size(None), OK, "unlimited"),
        (check_file_size(12_000), DEGRADED, "the state of 1.0 thousand parameters"),
        (check_leftovers(NONE), OK, "none"),
        (check_leftovers(dataclasses.replace(NONE, usable=False)), DEGRADED, "/x/swapio-0 is no folder that only this user can write to"),
        (
            check_leftovers(dataclasses.replace(NONE, usable=True, in_use=("1-2-3",), others=("swapio-9",))),
            OK,
            "1-2-3; of other users: swapio-9",
        ),
        (check_versions({"swapio": "1", "Linux": "6"}), OK, "swapio 1, Linux 6"),
        (check_versions({"swapio": "1", "Darwin": "24"}), DEGRADED, "made for Linux"),
    ],
)
def test_judgement(check: Check, status: Status, words: str) -> None:
    assert check.status is status
    assert words in f"{check.found} | {check.advice}"
    assert check.advice or check.status is OK


def test_every_check_is_judged_here() -> None:
    assert {name for name in globals() if name.startswith("check_") and name != "check_line"} == set(_checks.__all__)


# facts


@pytest.fixture
def memlock_64_kib() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 10, hard))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))


@pytest.mark.usefixtures("memlock_64_kib")
def test_memlock_of_64_kib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: Path) -> None:
    for devices, status in ((Accelerators(), OK), (GPU, DEGRADED)):
        monkeypatch.setattr(_facts, "accelerators", lambda root, devices=devices: devices)
        check = by_name(examine(tmp_path, GIB, root=machine))["memlock"]
        assert check.status is status
        assert check.found.startswith("64.0 KiB")
    assert "of host memory are to be pinned" in check.found
    (machine / "proc/self/status").write_text("CapInh:\t0\nCapEff:\t0000000000004000\n")
    assert "CAP_IPC_LOCK" in by_name(examine(tmp_path, GIB, root=machine))["memlock"].found


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it matters")
def test_memlock_of_64_kib_in_a_shell(tmp_path: Path) -> None:
    command = ["sh", "-c", 'ulimit -l 64; exec "$@"', "sh", sys.executable, "-m", "swapio", "doctor", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "ok        memlock      64.0 KiB; it does not matter: without an accelerator nothing is pinned" in done.stdout, done.stderr


def test_a_small_control_group(tmp_path: Path, machine: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    for budget, status in ((None, OK), (GIB, OK), (3 * GIB, DEGRADED), (3 * GIB + 1, BROKEN), (5 * GIB, BROKEN)):
        checks = by_name(examine(place, budget, root=machine))
        if "3.0 GiB left" not in checks["memory"].found:
            pytest.skip("this machine has less memory than the control group")
        assert checks["memory"].status is status, budget
    assert (checks["cores"].status, checks["numa"].found) == (DEGRADED, "2 nodes")
    assert checks["cores"].found.startswith("0.5 of")


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    code, out = invoke(tmp_path, "--host-memory", "1000TiB")
    assert code == 2
    assert "broken    memory" in out
    assert "asked for 1000.00 TiB -> that much is not there" in out or "kernel kills" in out


def block(root: Path, name: str, at: str, device: int, **files: str) -> Path:
    """A block device as `/sys` has it: the folder, and a link by number."""
    folder = root / "sys/devices" / at / name
    tree(folder, {key.replace("__", "/"): text for key, text in files.items()})
    link = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder)
    return folder


def test_drives_of_partitions_and_stacks(tmp_path: Path) -> None:
    numbers = map(os.makedev, [8] * 20, range(20))
    make: Callable[..., Path] = block
    disk, part, nvme, virtual, mapper, paths, raid = (next(numbers) for _ in range(7))
    sda = make(tmp_path, "sda", "pci/ata1/block", disk, queue__rotational="1", device__model="ST1000  ")
    sda1 = make(tmp_path, "sda1", "pci/ata1/block/sda", part, partition="1")
    make(tmp_path, "nvme0n1", "pci/nvme/nvme0", nvme, queue__rotational="0", device__model="Fast")
    make(tmp_path, "vda", "pci/virtio1/block", virtual, queue__rotational="1")
    multi = make(tmp_path, "nvme1n1", "virtual/nvme-subsystem/nvme-subsys1", paths, queue__rotational="0", device__model="Faster")
    dm = make(tmp_path, "dm-0", "virtual/block", mapper, queue__rotational="0", slaves__x="")
    (dm / "slaves/x").unlink()
    (dm / "slaves/sda1").symlink_to(sda1)
    md = make(tmp_path, "md0", "virtual/block", raid, queue__rotational="0", slaves__x="")
    (md / "slaves/x").unlink()
    (md / "slaves/dm-0").symlink_to(dm)
    (md / "slaves/nvme1n1").symlink_to(multi)
    want_sda = Drive("sda", "ST1000", rotational=True, is_virtual=False)
    want_multi = Drive("nvme1n1", "Faster", rotational=False, is_virtual=False)
    assert drives_of(disk, root=tmp_path) == drives_of(part, root=tmp_path) == drives_of(mapper, root=tmp_path) == [want_sda]
    assert drives_of(nvme, root=tmp_path) == [Drive("nvme0n1", "Fast", rotational=False, is_virtual=False)]
    assert drives_of(raid, root=tmp_path) == [want_sda, want_multi]
    [found] = drives_of(virtual, root=tmp_path)
    assert (found.is_virtual, found.spins, want_sda.spins, want_multi.spins) == (True, None, True, False)
    (sda / "device/model").write_text("QEMU HARDDISK")
    assert drives_of(disk, root=tmp_path)[0].spins is None
    assert drives_of(os.makedev(0, 42), root=tmp_path) == []


def test_accelerators_of_this_machine(tmp_path: Path) -> None:
    tree(tmp_path, {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": ""})
    found = _facts.accelerators(tmp_path)
    assert found.num_nodes == 2
    assert len(found.found) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert found.built_for == (torch.version.cuda or "")
    if not torch.cuda.is_available():
        assert check_accelerators(found).status is DEGRADED


def test_a_gpu_that_pytorch_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Old")
    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    found = _facts.accelerators()
    assert found.found == (Accelerator("cuda:0 Old", problem="CUDA error: no kernel image is available"),)
    assert not found.usable


def test_leftovers(tmp_path: Path) -> None:
    root = tmp_path / f"swapio-{os.getuid()}"
    other = tmp_path / f"swapio-{os.getuid() + 1}"
    assert _facts.leftovers(tmp_path) == Leftovers(root, None, (), ())
    (root / "1-2-3").mkdir(parents=True)
    root.chmod(0o700)
    other.mkdir()
    (tmp_path / "swapio-notes").mkdir()
    assert _facts.leftovers(tmp_path) == Leftovers(root, True, ("1-2-3",), (other.name,))
    assert by_name(examine(tmp_path))["leftovers"].found == f"of other users: {other.name}"  # its process is gone, so it was removed
    root.mkdir(exist_ok=True)
    root.chmod(0o777)
    assert by_name(examine(tmp_path))["leftovers"].status is DEGRADED
