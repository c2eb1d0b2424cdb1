"""Limits of control groups, on trees of files as the kernel shows them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import psutil
import pytest
import torch.distributed

from swapio.spec import parse_nbytes
from swapio.swap import CgroupMemory, HostMemory, SwapManager, _auto, auto_host_memory, cgroup_cpus, cgroup_memory, host_memory
from swapio.swap._auto import host_capacity, num_local_ranks

GIB = 1 << 30
V1_NO_LIMIT = 0x7FFFFFFFFFFFF000


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def v2(folder: str, limit: object, used: int, cache: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup{folder}"
    return {f"{at}/memory.max": str(limit), f"{at}/memory.current": str(used), f"{at}/memory.stat": f"anon 5\ninactive_file {cache}"}


def v1(folder: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory{folder}"
    stat = f"inactive_file 1\ntotal_inactive_file {cache}"
    return {f"{at}/memory.limit_in_bytes": str(limit), f"{at}/memory.usage_in_bytes": str(used), f"{at}/memory.stat": stat}


@pytest.mark.parametrize(
    ("own", "files", "limit", "left"),
    [
        ("0::/", v2("", 4 * GIB, GIB), 4 * GIB, 3 * GIB),
        ("0::/", v2("", 4 * GIB, 4 * GIB, 3 * GIB), 4 * GIB, 3 * GIB),
        ("0::/", v2("", 1 * GIB, 2 * GIB), GIB, 0),
        ("0::/", v2("", "max", GIB), None, None),
        ("0::/a/b", v2("/a", 4 * GIB, GIB) | v2("/a/b", "max", GIB) | v2("/c", GIB, 0), 4 * GIB, 3 * GIB),
        ("0::/a/b", v2("/a", 8 * GIB, 7 * GIB) | v2("/a/b", 4 * GIB, GIB), 8 * GIB, GIB),
        ("0::/../other", v2("", 4 * GIB, GIB), 4 * GIB, 3 * GIB),
        ("5:memory:/job", v1("", V1_NO_LIMIT, GIB) | v1("/job", 4 * GIB, 2 * GIB, GIB), 4 * GIB, 3 * GIB),
        ("5:memory:/docker/123", v1("", 4 * GIB, GIB), 4 * GIB, 3 * GIB),
        ("9:cpu,cpuacct:/\n5:memory:/\n0::/", v1("", V1_NO_LIMIT, GIB) | v2("/unified", 4 * GIB, GIB), 4 * GIB, 3 * GIB),
        ("0::/", {}, None, None),
    ],
)
def test_memory(tmp_path: Path, own: str, files: dict[str, str], limit: int | None, left: int | None) -> None:
    found = cgroup_memory(tree(tmp_path, {"proc/self/cgroup": own, **files}))
    assert (found and found.limit_nbytes, found and found.left_nbytes) == (limit, left)


@pytest.mark.parametrize(
    ("own", "files", "cpus"),
    [
        ("0::/a", {"a/cpu.max": "150000 100000", "cpu.max": "max 100000"}, 1.5),
        ("0::/a", {"a/cpu.max": "400000 100000", "cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_cpus(tmp_path: Path, own: str, files: dict[str, str], cpus: float | None) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": own} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert cgroup_cpus(root) == cpus


def test_without_proc_there_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_memory(tmp_path) is None
    assert cgroup_cpus(tmp_path) is None


def test_auto_is_a_share_of_the_tighter(tmp_path: Path) -> None:
    small = host_memory(tree(tmp_path, {"proc/self/cgroup": "0::/", **v2("", 1000, 500)}))
    assert (small.free_nbytes, small.auto_nbytes) == (500, 400)
    assert 0 < auto_host_memory() < psutil.virtual_memory().total


def test_ranks_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_local_ranks({}) == 1
    assert num_local_ranks({"LOCAL_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}) == 4
    assert num_local_ranks({"LOCAL_WORLD_SIZE": "", "MPI_LOCALNRANKS": "2"}) == 2
    monkeypatch.setattr(_auto, "host_memory", lambda: HostMemory(100 * GIB, 50 * GIB, None))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert auto_host_memory() == host_capacity("auto") == 5 * GIB


def test_without_a_launcher_all_ranks_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert num_local_ranks({}) == 3


@pytest.mark.parametrize(
    ("wanted", "group", "said"),
    [
        ("8GiB", None, ""),
        ("12GiB", None, '12.0 GiB is more than 8.0 GiB of the machine.*"3276MiB"'),
        ("3GiB", CgroupMemory(Path("/box"), 2 * GIB, GIB), '3.0 GiB is more than 2.0 GiB of the group /box.*"819MiB"'),
        (2 * GIB, CgroupMemory(Path("/box"), 2 * GIB, GIB), ""),
    ],
)
def test_more_than_there_is_is_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, wanted: int | str, group: CgroupMemory | None, said: str
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with caplog.at_level(logging.WARNING, "swapio"):
        assert host_capacity(wanted, HostMemory(8 * GIB, 4 * GIB, group)) == parse_nbytes(wanted, key="x")
    assert re.search(said, caplog.text) if said else not caplog.records


def test_a_manager_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "swapio"):
        SwapManager(backend="memory", host_memory=1 << 50).close()
    assert "host_memory: 1024.00 TiB is more than" in caplog.text
