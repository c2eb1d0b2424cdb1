"""Run a function of a test module on several ranks, each a process of its own."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import queue
import socket
import time
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT_S = 110


def run(function: str, num_ranks: int, *args: Any, module: str = "tests.ranks.work", may_die: bool = False) -> list[Any]:
    """What `module.function(rank, *args)` returns on each rank; an exception in one fails the test.

    Args:
        may_die: a rank that ends without an answer counts as None.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    port = _free_port()
    workers = [
        context.Process(target=_work, args=(module, function, rank, num_ranks, port, args, answers), daemon=True)
        for rank in range(num_ranks)
    ]
    results: dict[int, Any] = {}
    try:
        for worker in workers:
            worker.start()
        missing = set(range(num_ranks))
        deadline = time.monotonic() + TIMEOUT_S
        while missing:
            gone = {r for r in missing if may_die and not workers[r].is_alive()}
            try:
                rank, failed, result = answers.get(timeout=1)
            except queue.Empty:
                missing -= gone  # they were dead before the queue was found empty
                if time.monotonic() > deadline:
                    pytest.fail(f"ranks {sorted(missing)} did not answer; so far {results}")
                continue
            if failed:
                pytest.fail(f"rank {rank}:\n{result}")
            results[rank] = torch.load(io.BytesIO(result), weights_only=False)
            missing.discard(rank)
        for worker in workers:
            worker.join(20)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.kill()
    return [results.get(rank) for rank in range(num_ranks)]


def _packed(result: Any) -> bytes:
    """As plain bytes: shared memory would end with its process."""
    buffer = io.BytesIO()
    torch.save(result, buffer)
    return buffer.getvalue()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _work(module: str, function: str, rank: int, num_ranks: int, port: int, args: tuple[Any, ...], answers: Any) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1"
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
        result = getattr(importlib.import_module(module), function)(rank, *args)
        answers.put((rank, False, _packed(result)))
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, True, traceback.format_exc()))
        raise
