"""Delays at every edge change no bit; failures end in one error at the caller, and nothing is left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import swapio
from swapio.io import DirectStorage, MemoryStorage
from swapio.memory import SimulatedDevice
from swapio.testing import FaultyStorage, GatedStorage

from . import models
from .models import batch, check_same, config, make, smallest_budget, train, train_plain, with_budget


@pytest.mark.parametrize("extra_units", range(5))
@pytest.mark.parametrize("edge", ["read", "write", "copy"])
def test_delay_at_each_edge(tmp_path: Path, edge: str, extra_units: int) -> None:
    """Upload and download share one stream of the simulated device: a delay there delays both."""
    settings = config(tmp_path, device="simulated")
    budget = smallest_budget(make(), settings) + extra_units * models.largest_unit(make())
    storage = GatedStorage(MemoryStorage(), read_latency_s=0.002 * (edge == "read"), write_latency_s=0.002 * (edge == "write"))
    device = SimulatedDevice(latency_s=0.002 * (edge == "copy"))
    with (
        swapio.SwapManager(storage=storage, host_memory=budget, device=device, timeout_s=30) as manager,
        swapio.initialize(model=make(), config=settings, manager=manager)[0] as engine,
    ):
        got = train(engine, steps=3)
        engine.zero.detach_idle()
        assert not manager.mover.room.scratch
        assert not [owner for r in manager.mover.records.values() for _, owner in tuple(r.pins) if owner is engine.zero]
        assert manager.arena.peak_nbytes <= budget
    check_same(got, train_plain(make(), steps=3))


def test_nothing_is_in_flight_after_a_step_with_branches(tmp_path: Path) -> None:
    def fn(model: Any, step: int) -> Any:
        ids, targets = batch(step)
        x = model.embed(ids)
        for number, block in enumerate(model.blocks):
            if (step + number) % 2:
                x = block(x)
        return model.loss(x, targets)

    settings = config(tmp_path)
    settings["swapio"]["host_memory"] = smallest_budget(make(), settings) + models.largest_unit(make())
    with swapio.initialize(model=make(), config=settings)[0] as engine:
        for step in range(6):
            engine.backward(fn(engine.module, step))
            engine.step()
            engine.manager.flush().wait()
            deadline = time.monotonic() + 10
            while any(r.movement for r in engine.manager.mover.records.values()):
                assert time.monotonic() < deadline, engine.manager.mover.pending()
            assert all(u.grads is None and not u.pins for u in engine.zero.units)


def _left(path: Path) -> list[str]:
    files = [str(p) for p in path.rglob("*") if p.is_file()]
    threads = [t.name for t in threading.enumerate() if t.name.startswith("swapio")]
    open_files = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(path) in str(link.readlink()):
                open_files.append(str(link.readlink()))
        except OSError:
            continue
    return files + threads + open_files


def _train_until_error(path: Path, storage: Any, arm: Any) -> BaseException:
    settings = config(path)
    budget = smallest_budget(make(), settings)
    manager = swapio.SwapManager(storage=storage, host_memory=budget, timeout_s=20)
    with manager:
        engine = swapio.initialize(model=make(), config=settings, manager=manager)[0]
        train(engine, steps=1)
        arm()
        with pytest.raises(swapio.StorageError) as caught:
            train(engine, steps=3)
        start = time.monotonic()
        engine.close()
        manager.close()
        assert time.monotonic() - start < 5
    return caught.value


@pytest.mark.parametrize("action", ["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failing_drive(tmp_path: Path, action: str, code: int) -> None:
    storage = FaultyStorage(DirectStorage(tmp_path))

    def arm() -> None:
        storage.fail = lambda asked, name: code if asked == action else 0

    error = _train_until_error(tmp_path, storage, arm)
    assert isinstance(error, swapio.StorageError)
    assert (error.action, error.errno) == (action, code)
    assert error.name
    assert str(tmp_path) in error.path
    assert not _left(tmp_path)


def test_a_truncated_swap_file(tmp_path: Path) -> None:
    storage = DirectStorage(tmp_path)
    error = _train_until_error(tmp_path, storage, lambda: os.truncate(f"/proc/self/fd/{storage.fileno()}", 8192))
    assert "truncated" in str(error)
    assert not _left(tmp_path)


def test_a_full_drive_is_an_error_of_initialize(tmp_path: Path) -> None:
    model = make()
    want = models.values(model)
    settings = with_budget(config(tmp_path), smallest_budget(model, config(tmp_path)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(swapio.StorageError) as caught:
            swapio.initialize(model=model, config=settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert not _left(tmp_path)
    check_same(([], models.values(model)), ([], want))
    models.plain_loss(model, 0).backward()  # type: ignore[no-untyped-call]


def test_an_unwritable_path(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(swapio.StorageError, match="no/such/place"):
        swapio.initialize(model=model, config=config(tmp_path / "no" / "such" / "place"))
    models.plain_loss(model, 0).backward()  # type: ignore[no-untyped-call]
    assert not _left(tmp_path)


def test_a_small_tmpfs(tmp_path: Path) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        settings = with_budget(config(tmp_path), smallest_budget(make(), config(tmp_path)))
        with pytest.raises(swapio.StorageError) as caught:
            swapio.initialize(model=make(), config=settings)
        assert caught.value.errno == errno.ENOSPC
        assert not _left(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import swapio; from tests.engine.models import *\n"
        "s = config(Path(sys.argv[1])); s['swapio']['host_memory'] = smallest_budget(make(), s)\n"
        "e = swapio.initialize(model=make(), config=s)[0]\n"
        "print('ready', flush=True)\n"
        "while True: train(e, steps=1)\n"
    )
    root = Path(__file__).parents[2]
    for delay in (0.0, 0.1, 0.3):
        child = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=root)
        with child:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            time.sleep(delay)  # any moment will do
            child.send_signal(signal.SIGKILL)
        assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_asserts_are_not_needed(tmp_path: Path) -> None:
    """`python -O` changes nothing."""
    script = (
        "import sys; from pathlib import Path; import swapio; from tests.engine.models import *\n"
        "s = config(Path(sys.argv[1])); s['swapio']['host_memory'] = 1683456 * 2\n"
        "e = swapio.initialize(model=make(), config=s)[0]\n"
        "print(train(e, steps=3)[0]); e.close()"
    )
    root = Path(__file__).parents[2]
    outs = [
        subprocess.run([sys.executable, *flags, "-c", script, str(tmp_path)], capture_output=True, text=True, cwd=root, check=True).stdout
        for flags in ((), ("-O",))
    ]
    assert outs[0] == outs[1]
    assert outs[0].startswith("[")
