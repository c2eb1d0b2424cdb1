"""What this machine has, without judging it. Nothing here raises for what a machine may lack; `_checks.py` says what the facts mean."""

from __future__ import annotations

import dataclasses
import errno
import os
import platform
import resource
import shutil
import stat
import warnings
from pathlib import Path
from typing import Any

import torch

import swapio

from ..io import Choice, filesystem_of, is_private_folder, open_storage, scratch_root
from ..swap import cgroup_cpus
from ._drive import Drive, drives_of

__all__ = [
    "Accelerator",
    "Accelerators",
    "Cores",
    "Leftovers",
    "LockLimit",
    "Opened",
    "Space",
    "accelerators",
    "computes_in_bf16",
    "cores",
    "drives_below",
    "leftovers",
    "lock_limit",
    "numa_nodes",
    "soft_limit",
    "space",
    "try_storage",
    "versions",
]

_CAP_IPC_LOCK = 14
_cuda: Any = torch.cuda  # partly untyped


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """What came of opening a storage at `path`: the backend and why, or the error."""

    path: Path
    choice: Choice | None = None
    error: OSError | None = None


def try_storage(path: Path) -> Opened:
    """Write and read a file in `path` as training would; it is gone afterwards. A directory that is not there is not made."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        with open_storage([path]) as storage:
            return Opened(path, choice=storage.choice)
    except OSError as error:
        return Opened(path, error=error)


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a filesystem; both 0 where it does not tell."""

    total_nbytes: int
    free_nbytes: int


def space(path: Path) -> Space:
    """Of the filesystem that holds `path`, or would."""
    usage = shutil.disk_usage(_existing(path))
    return Space(usage.total, usage.free)


def drives_below(path: Path, root: Path = Path("/")) -> list[Drive]:
    """The drives that `path` lies on, or would; empty where that is not known. `root` is where `sys` is."""
    found = drives_of(_existing(path).stat().st_dev, root=root)
    node = Path(filesystem_of(path).device)
    if not found and node.is_block_device():  # btrfs: files have a device number that no device has
        found = drives_of(node.stat().st_rdev, root=root)
    return found


def soft_limit(kind: int) -> int | None:
    """The soft limit `resource.RLIMIT_...` of this process, `None` for no limit."""
    limit = resource.getrlimit(kind)[0]
    return None if limit == resource.RLIM_INFINITY else limit


@dataclasses.dataclass(frozen=True, slots=True)
class LockLimit:
    """Bytes that this process may lock in memory, `None` for no limit, and whether it has the right to lock more."""

    nbytes: int | None
    is_exempt: bool


def lock_limit(root: Path = Path("/")) -> LockLimit:
    """`RLIMIT_MEMLOCK`, and the capability `CAP_IPC_LOCK`, as a root outside of containers has it."""
    lines = (line.partition(":") for line in (root / "proc/self/status").read_text().splitlines())
    capabilities = next((int(value, 16) for name, _, value in lines if name == "CapEff"), 0)
    return LockLimit(soft_limit(resource.RLIMIT_MEMLOCK), bool(capabilities >> _CAP_IPC_LOCK & 1))


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerator:
    """A GPU; `problem` is what PyTorch says when it cannot compute there."""

    name: str
    total_nbytes: int = 0
    free_nbytes: int = 0
    problem: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Accelerators:
    """The GPUs that PyTorch sees; how many NVIDIA GPUs the system has; what CUDA PyTorch is built for, empty for none.

    `problem` is what PyTorch said while it looked, `hidden` the value of `CUDA_VISIBLE_DEVICES` where it is set.
    """

    found: tuple[Accelerator, ...] = ()
    num_nodes: int = 0
    built_for: str = ""
    problem: str = ""
    hidden: str | None = None

    @property
    def usable(self) -> bool:
        return any(not device.problem for device in self.found)


def accelerators(root: Path = Path("/")) -> Accelerators:
    """Asks PyTorch, and computes a little on each GPU; `root` is where `dev` is."""
    problem, found = "", []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.version.cuda is not None:
            try:
                _cuda.init()
            except RuntimeError as error:
                problem = _first_line(error)
        if _cuda.is_available():
            found = [_accelerator(index) for index in range(_cuda.device_count())]
    return Accelerators(
        tuple(found),
        num_nodes=len(list((root / "dev").glob("nvidia[0-9]*"))),
        built_for=torch.version.cuda or "",
        problem=problem or "; ".join(_first_line(warning.message) for warning in said),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _accelerator(index: int) -> Accelerator:
    name = f"cuda:{index}"
    try:
        name = f"{name} {_cuda.get_device_name(index)}"
        free, total = _cuda.mem_get_info(index)
        torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as error:
        return Accelerator(name, problem=_first_line(error))
    return Accelerator(name, total, free)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]


def computes_in_bf16() -> bool:
    """Whether this processor has instructions for bf16; without them PyTorch is many times slower in it than in fp32."""
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is not None and bool(supported())


def numa_nodes(root: Path = Path("/")) -> int:
    """Of this machine; 0 where the system does not tell."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


@dataclasses.dataclass(frozen=True, slots=True)
class Cores:
    """Of the machine, that this process may run on, whose time its control group may take (`None`: no limit), and PyTorch's threads."""

    total: int
    allowed: int
    quota: float | None
    num_threads: int

    @property
    def usable(self) -> float:
        return self.allowed if self.quota is None else min(self.allowed, self.quota)


def cores(root: Path = Path("/")) -> Cores:
    """With the control groups below `root`."""
    total = os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return Cores(total, allowed, cgroup_cpus(root), torch.get_num_threads())


def versions() -> dict[str, str]:
    """Of what the numbers depend on, for reports."""
    found = {
        "swapio": swapio.__version__,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        platform.system(): platform.release(),
    }
    if torch.version.cuda is not None and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, _cuda.nccl.version()))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Leftovers:
    """The folder of this user below the path (`usable`: `None` where there is none) with what is in it, and those of other users."""

    root: Path
    usable: bool | None
    in_use: tuple[str, ...]
    others: tuple[str, ...]


def leftovers(path: Path) -> Leftovers:
    """To be asked after a storage was opened there, which removes what dead processes left."""
    root = scratch_root(path)
    usable = is_private_folder(root)
    others = tuple(sorted(found.name for found in path.glob("swapio-[0-9]*") if found != root))
    return Leftovers(root, usable, tuple(sorted(os.listdir(root))) if usable else (), others)


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(found for found in (path, *path.parents) if os.path.exists(found))
