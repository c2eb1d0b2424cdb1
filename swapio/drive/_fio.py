"""The same transfers by fio, to check our own figures against."""

from __future__ import annotations

import json
import math
import shutil
import subprocess

from ..errors import UsageError
from ._workload import READ_SHARE, DriveFile, Setting

__all__ = ["fio_run", "fio_version"]

_PATTERNS = {"read": "read", "write": "write", "mix": "rw"}


def fio_version() -> str | None:
    """`"fio-3.33"`; `None` where it is not installed."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, timeout=10, check=False).stdout.strip() or None


def fio_run(
    file: DriveFile,
    setting: Setting,
    action: str,
    *,
    nbytes: int,
    read_share: float = READ_SHARE,
    ramp_nbytes: int = 0,
    bytes_per_s: float = math.inf,
) -> tuple[int, int, float]:
    """Bytes read, bytes written and seconds of fio on the same file, with `O_DIRECT`, the same block and depth, by asynchronous I/O.

    Args:
        read_share: of the bytes of a mix, to whole percents.
        ramp_nbytes: of the same transfers before those that count. fio ends a ramp by time alone, so that what is returned is for more or
            fewer bytes than `nbytes`, and for all when they took no longer than the ramp; `ramp_nbytes + nbytes` are moved in any case.
        bytes_per_s: what the drive is expected to give, for that time.

    Raises:
        UsageError: fio failed, with what it said.
    """
    ramp_ms = round(1e3 * ramp_nbytes / bytes_per_s)
    command = [
        "fio", "--name=compare", f"--filename={file.path_for_others}", f"--filesize={file.extent.end}", f"--offset={file.extent.offset}",
        f"--rw={_PATTERNS[action]}", f"--rwmixread={round(100 * read_share)}", f"--bs={setting.block_nbytes}",
        f"--iodepth={setting.queue_depth}", f"--io_size={ramp_nbytes + nbytes}", f"--ramp_time={ramp_ms}ms", "--direct=1",
        "--ioengine=libaio", "--thread", "--allow_file_create=0", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        if job["error"] or done.returncode:
            raise ValueError(job["error"])
        if not job["read"]["io_bytes"] + job["write"]["io_bytes"]:
            raise ValueError("nothing moved after the ramp")
    except (ValueError, KeyError, IndexError) as error:
        raise UsageError(f"fio failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()[:500]}") from error
    # fio counts whole milliseconds; a mix ends with the later of the two
    seconds = max(job["read"]["runtime"], job["write"]["runtime"], 1) / 1e3
    return job["read"]["io_bytes"], job["write"]["io_bytes"], seconds
