"""What the facts about a machine mean for training on it: a pure function for each check."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from ..errors import StorageError
from ..io import Filesystem
from ..report import Check, Status
from ..spec import format_nbytes
from ..swap import HostMemory
from ._drive import Drive
from ._facts import Accelerators, Cores, Leftovers, LockLimit, Opened, Space
from ._place import KEPT_FREE_NBYTES, NOT_A_DRIVE, NOT_LOCAL, STATE_NBYTES

__all__ = [
    "check_accelerators",
    "check_backend",
    "check_bf16",
    "check_cores",
    "check_drive",
    "check_file_size",
    "check_filesystem",
    "check_leftovers",
    "check_memlock",
    "check_memory",
    "check_numa",
    "check_open_files",
    "check_space",
    "check_versions",
]

_ELSEWHERE = "or give a directory on a local drive"
_UNUSABLE = {
    errno.ENOENT: f"make it (mkdir -p), mount the drive it should be on, {_ELSEWHERE}",
    errno.ENOTDIR: f"give the directory that it is in, {_ELSEWHERE}",
    errno.EROFS: f"it is mounted read-only: remount it (mount -o remount,rw), {_ELSEWHERE}",
    errno.EACCES: f"let this user write there (chown or chmod), {_ELSEWHERE}",
    errno.EPERM: f"let this user write there (chown or chmod), {_ELSEWHERE}",
    errno.ENOSPC: f"the drive is full: delete something (df -h and df -i say what there is too little of), {_ELSEWHERE}",
    errno.EDQUOT: f"this user's quota is used up: delete something, {_ELSEWHERE}",
    errno.EFBIG: "files may not be that large: raise the limit (ulimit -f unlimited)",
    errno.EEXIST: "remove or rename what stands where the swap folder goes",
    errno.EMFILE: "this process may not open more files: raise the limit (ulimit -n 1024)",
    errno.EIO: f"the drive or its connection fails: see dmesg, {_ELSEWHERE}",
}
_MIN_OPEN_FILES = 256  # Python and PyTorch open some dozens; a run adds one for each path, a data loader several for each worker
_MIN_MEMORY_NBYTES = 1 << 30  # PyTorch itself takes about half of that


def check_backend(opened: Opened) -> Check:
    """How files are read and written: past the page cache is best."""
    if opened.choice is None:
        code = opened.error.errno if opened.error is not None else None
        is_there = code == errno.ENOENT and isinstance(opened.error, StorageError)  # /proc says so of new files
        advice = _UNUSABLE[code] if code in _UNUSABLE and not is_there else f"find out why no file can be made there, {_ELSEWHERE}"
        return Check("backend", Status.BROKEN, f"{opened.path} cannot be used: {opened.error}", advice)
    found = f"{opened.choice.backend}: {opened.choice.reason}"
    if opened.choice.backend == "direct":
        return Check("backend", Status.OK, found)
    advice = "without O_DIRECT every byte takes room in the page cache too, and is slower; a directory on ext4, xfs or btrfs has it"
    return Check("backend", Status.DEGRADED, found, advice)


def check_filesystem(filesystem: Filesystem) -> Check:
    """Its kind, and options that are in the way."""
    status, advice = _judge_filesystem(filesystem)
    mount = f" at {filesystem.mount_point} ({','.join(filesystem.options)})" if filesystem.options else ""
    device = f" on {filesystem.device}" if filesystem.device not in ("", "none", filesystem.type) else ""
    return Check("filesystem", status, f"{filesystem.type}{device}{mount}", advice)


def _judge_filesystem(filesystem: Filesystem) -> tuple[Status, str]:
    kind, options = filesystem.type, filesystem.options
    if filesystem.is_memory:
        return Status.BROKEN, "files there are RAM, so nothing is saved: give a directory on a local drive"
    if "ro" in options:
        return Status.BROKEN, _UNUSABLE[errno.EROFS]
    if kind.startswith(NOT_LOCAL):
        return Status.DEGRADED, "files of a network or of another program are slower and may stall: give a directory on a local drive"
    if kind.startswith(NOT_A_DRIVE):
        return Status.DEGRADED, "that is not made for large files: give a directory on ext4, xfs or btrfs"
    if {"sync", "data=journal"} & set(options):
        return Status.DEGRADED, "sync makes every write wait, data=journal writes all twice: mount without, or give another drive"
    if kind == "overlay":
        return Status.OK, "a container's layer on some drive of its host: a volume on the fastest drive is better"
    return Status.OK, "this system does not tell" if kind == "unknown" else ""


def check_space(space: Space) -> Check:
    """How large a model's state fits."""
    if not space.total_nbytes:
        return Check("space", Status.DEGRADED, "not known: the filesystem does not tell", "give a directory on ext4, xfs or btrfs")
    left = max(space.free_nbytes - KEPT_FREE_NBYTES, 0)
    found = f"{format_nbytes(space.free_nbytes)} free of {format_nbytes(space.total_nbytes)}"
    advice = f"free some, {_ELSEWHERE}; a model needs {STATE_NBYTES} bytes per parameter"
    if not space.free_nbytes:
        return Check("space", Status.BROKEN, found, advice)
    if not left:
        return Check("space", Status.DEGRADED, f"{found}, less than {format_nbytes(KEPT_FREE_NBYTES)}", advice)
    fits = f"{_count(left // STATE_NBYTES)} parameters at {STATE_NBYTES} bytes each (AdamW, fp32 or bf16)"
    return Check("space", Status.OK, f"{found}: {format_nbytes(KEPT_FREE_NBYTES)} to spare, and the state of {fits}")


def check_drive(drives: Sequence[Drive]) -> Check:
    """Of what kind the drives are."""
    found = "; ".join(f"{drive.name}{f', {drive.model}' if drive.model else ''}, {_kind(drive)}" for drive in drives)
    if not drives:
        return Check("drive", Status.OK, "not known: there is no block device below that filesystem")
    if any(drive.is_memory for drive in drives):
        return Check("drive", Status.BROKEN, found, "what is there is RAM, so nothing is saved: give a directory on a drive")
    if any(drive.spins for drive in drives):
        return Check("drive", Status.DEGRADED, found, "a spinning disk moves some 0.2 GB/s, an NVMe drive 10 to 60 times as much: use one")
    is_virtual = any(drive.is_virtual for drive in drives)
    return Check("drive", Status.OK, found, "its speed is up to the host; if that offers local NVMe drives, use one" if is_virtual else "")


def check_memory(memory: HostMemory, budget_nbytes: int | None) -> Check:
    """Whether the budget for host memory can be had, `None` for what "auto" takes."""
    found = f"{format_nbytes(memory.total_nbytes)}, {format_nbytes(memory.available_nbytes)} available"
    group = memory.cgroup
    if group is not None:
        found += f", limit of the control group {format_nbytes(group.limit_nbytes)}, {format_nbytes(group.left_nbytes)} left"
    auto = format_nbytes(memory.auto_nbytes)
    if budget_nbytes is None:
        found += f"; host_memory=auto takes {auto}"
        if memory.free_nbytes < _MIN_MEMORY_NBYTES:
            advice = f"end other programs, or raise the limit: PyTorch and activations want {format_nbytes(_MIN_MEMORY_NBYTES)}"
            return Check("memory", Status.DEGRADED, found, advice)
        return Check("memory", Status.OK, found)
    found += f"; asked for {format_nbytes(budget_nbytes)}"
    if group is not None and budget_nbytes > group.left_nbytes:
        killed = "the kernel kills a process that goes above its control group's limit"
        return Check("memory", Status.BROKEN, found, f"{killed}: ask for at most {auto}, or raise the limit (docker run --memory)")
    if budget_nbytes > memory.available_nbytes:
        return Check("memory", Status.BROKEN, found, f"that much is not there: ask for at most {auto}, or end other programs")
    if budget_nbytes > memory.auto_nbytes:
        return Check("memory", Status.DEGRADED, found, f"that leaves little for activations and PyTorch itself: {auto} is safer")
    return Check("memory", Status.OK, found)


def check_memlock(limit: LockLimit, *, has_accelerator: bool, wanted_nbytes: int) -> Check:
    """Whether `wanted_nbytes` of host memory can be pinned for the accelerator."""
    found = "unlimited" if limit.nbytes is None else format_nbytes(limit.nbytes)
    if not has_accelerator:
        return Check("memlock", Status.OK, f"{found}; it does not matter: without an accelerator nothing is pinned")
    if limit.nbytes is None or limit.nbytes >= wanted_nbytes:
        return Check("memlock", Status.OK, found)
    if limit.is_exempt:
        return Check("memlock", Status.OK, f"{found}; it does not matter: this process has CAP_IPC_LOCK")
    found += f", and {format_nbytes(wanted_nbytes)} of host memory are to be pinned for the accelerator"
    raise_it = "ulimit -l unlimited, memlock in /etc/security/limits.conf, LimitMEMLOCK= of a service, docker run --ulimit memlock=-1"
    return Check("memlock", Status.DEGRADED, found, f"memory that is not pinned is copied slower and blocks the host; raise it: {raise_it}")


def check_accelerators(accelerators: Accelerators) -> Check:
    """What computes. Without a GPU it is the processor, which is fine unless there is one that PyTorch cannot use."""
    devices = accelerators.found
    broken = [device for device in devices if device.problem]
    if broken:
        found = "; ".join(f"{device.name}: {device.problem}" for device in broken)
        advice = 'another PyTorch or driver may know that GPU; without it: "swapio": {"device": "cpu"}, or CUDA_VISIBLE_DEVICES'
        return Check("devices", Status.BROKEN, found, advice)
    if devices:
        found = "; ".join(f"{d.name}, {format_nbytes(d.total_nbytes)}, {format_nbytes(d.free_nbytes)} free" for d in devices)
        return Check("devices", Status.OK, found, "one process uses one of them" if len(devices) > 1 else "")
    built = f"PyTorch is built for CUDA {accelerators.built_for}" if accelerators.built_for else "PyTorch is built without CUDA"
    if not accelerators.num_nodes:
        return Check("devices", Status.OK, f"the processor computes: no NVIDIA GPU is visible, {built}")
    found = f"the processor computes, though there are NVIDIA GPUs ({accelerators.num_nodes}): {built}"
    if not accelerators.built_for:
        return Check("devices", Status.DEGRADED, found, "install PyTorch's CUDA build to use them")
    said = accelerators.problem or "it does not say why it does not see them"
    hidden = f"; CUDA_VISIBLE_DEVICES is {accelerators.hidden!r}" if accelerators.hidden is not None else ""
    advice = f"{'unset CUDA_VISIBLE_DEVICES; ' if hidden else ''}see whether nvidia-smi works: the driver must be as new as that CUDA"
    return Check("devices", Status.DEGRADED, f"{found}; {said}{hidden}", advice)


def check_bf16(supported: bool, *, has_accelerator: bool) -> Check:
    """Whether 16-bit weights are fast."""
    if has_accelerator:
        return Check("bf16", Status.OK, "the accelerator computes in it")
    if supported:
        return Check("bf16", Status.OK, "this processor computes in it")
    found = "this processor has no instructions for it, so bf16 is about ten times slower than fp32"
    return Check("bf16", Status.DEGRADED, found, "train in fp32; that needs the same 12 bytes of state per parameter")


def check_cores(cores: Cores) -> Check:
    """Whether PyTorch starts as many threads as can run."""
    found = f"{cores.usable:g} of {cores.total} usable"
    if cores.quota is not None and cores.quota < cores.allowed:
        found += f" (the control group's limit; {cores.allowed} by affinity)"
    found += f"; threads of PyTorch: {cores.num_threads}"
    if cores.num_threads > cores.usable:
        advice = f"more threads than processors wait for each other: set OMP_NUM_THREADS={max(int(cores.usable), 1)}"
        return Check("cores", Status.DEGRADED, found, advice)
    return Check("cores", Status.OK, found)


def check_numa(num_nodes: int) -> Check:
    """Whether memory has a near and a far side."""
    if not num_nodes:
        return Check("numa", Status.OK, "not known: this system does not tell")
    note = "run on the node that the drive is on: numactl --cpunodebind=N --membind=N" if num_nodes > 1 else ""
    return Check("numa", Status.OK, f"{num_nodes} node{'s' if num_nodes > 1 else ''}", note)


def check_open_files(limit: int | None) -> Check:
    """RLIMIT_NOFILE."""
    if limit is None or limit >= _MIN_OPEN_FILES:
        return Check("open files", Status.OK, f"{'unlimited' if limit is None else f'at most {limit}'} at once")
    return Check("open files", Status.DEGRADED, f"at most {limit} at once", "data loaders may need more: ulimit -n 1024")


def check_file_size(limit: int | None) -> Check:
    """RLIMIT_FSIZE: a swap file cannot grow beyond it."""
    if limit is None:
        return Check("file size", Status.OK, "unlimited")
    found = f"at most {format_nbytes(limit)}: the state of {_count(limit // STATE_NBYTES)} parameters"
    return Check("file size", Status.DEGRADED, found, "raise it: ulimit -f unlimited")


def check_leftovers(left: Leftovers) -> Check:
    """What else is in the directory for swap files. Those of dead processes were removed when the storage was opened."""
    if left.usable is False:
        found = f"{left.root} is no folder that only this user can write to"
        return Check("leftovers", Status.DEGRADED, found, "remove or rename it: where files need a name, they go there")
    parts = [f"in use by other runs: {', '.join(left.in_use)}"] if left.in_use else []
    parts += [f"of other users: {', '.join(left.others)}"] if left.others else []
    return Check("leftovers", Status.OK, "; ".join(parts) or "none")


def check_versions(versions: Mapping[str, str]) -> Check:
    """What to write in a report; Linux is the only system that training is tested on."""
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    if "Linux" in versions:
        return Check("versions", Status.OK, found)
    return Check("versions", Status.DEGRADED, found, "swapio is made for Linux: no O_DIRECT and no unnamed files elsewhere")


def _kind(drive: Drive) -> str:
    if drive.is_memory:
        return "RAM"
    return {True: "spins", False: "does not spin", None: "virtual"}[drive.spins]


def _count(number: int) -> str:
    for unit, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"), (10**3, "thousand")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)
