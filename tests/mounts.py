"""Filesystems that a test can mount: in a namespace of its own, so nothing is left and nobody else sees them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TMPFS = "mount -t tmpfs -o size={size} none {at}"
OVERLAY = (
    f"{TMPFS} && mkdir {{at}}/lower {{at}}/upper {{at}}/work {{at}}/top && mount -t overlay -o lowerdir={{at}}/lower,upperdir={{at}}/upper,"
)
LOOP = "truncate -s {size} {at}.image && mkfs.{kind} -q {at}.image && mount -o loop {at}.image {at}"
MOUNTS = {
    "tmpfs": (TMPFS, ""),
    "overlay": (OVERLAY + "workdir={at}/work none {at}/top", "top"),
    "ramfs": ("mount -t ramfs none {at}", ""),
    "ext4": (LOOP, ""),
    "xfs": (LOOP, ""),
    "btrfs": (LOOP, ""),
}


def mounted(tmp_path: Path, kind: str, command: list[str], *, size: str = "512m", then: str = "true") -> subprocess.CompletedProcess[str]:
    """Run a command, `{here}` in it replaced by a directory on a new filesystem."""
    if shutil.which("unshare") is None or (MOUNTS[kind][0] is LOOP and shutil.which(f"mkfs.{kind}") is None):
        pytest.skip(f"no tool to make {kind} here")
    at = tmp_path / "mount"
    at.mkdir()
    mount, below = MOUNTS[kind]
    here = str(at / below)
    inside = f'{mount.format(size=size, at=at, kind=kind)} && {then.format(here=here)} || exit 99; exec "$@"'
    user = ["--map-root-user"] if os.getuid() else []  # which may mount less
    run = ["unshare", "--mount", *user, "sh", "-c", inside, "sh", *(part.replace("{here}", here) for part in command)]
    done = subprocess.run(run, cwd=ROOT, text=True, capture_output=True, check=False)
    if done.returncode == 99 or done.stderr.startswith("unshare:"):
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
    return done
