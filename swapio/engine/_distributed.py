"""Joining the ranks that a launcher started."""

from __future__ import annotations

import datetime
import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from ..errors import ConfigError

__all__ = ["init_distributed"]

logger = logging.getLogger("swapio")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialize `torch.distributed` with DeepSpeed's arguments, if that has not been done.

    `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are read as torchrun sets them. Without them this process is a group of one,
    which opens no port. Where there are GPUs, `LOCAL_RANK` names this process's.

    Args:
        dist_backend: default: `"nccl"` with CUDA, else `"gloo"`.
        distributed_port: of rank 0 on this machine, where `MASTER_PORT` is not set.
        timeout: of collectives; default: PyTorch's.
        dist_init_required: False: do nothing.
        rank, world_size: in place of `RANK` and `WORLD_SIZE`.
        auto_mpi_discovery, verbose, config: accepted, without effect.

    Raises:
        ConfigError: a backend that this machine does not have, or ranks without numbers.
    """
    if dist_init_required is False or dist.is_initialized():
        return
    cuda = torch.cuda.is_available()
    backend = dist_backend or ("nccl" if cuda else "gloo")
    if "nccl" in backend and not cuda:
        raise ConfigError(f'dist_backend: {backend!r} needs CUDA; use "gloo", or leave it out', key="dist_backend", value=backend)
    num_ranks = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
    number = rank if rank >= 0 else int(os.environ.get("RANK", "0" if num_ranks == 1 else "-1"))
    if not 0 <= number < num_ranks:
        raise ConfigError(
            f"RANK: {os.environ.get('RANK', 'not set')} of {num_ranks} ranks (WORLD_SIZE); start the script with "
            f"torchrun --nproc-per-node={num_ranks}, or set RANK to 0 to {num_ranks - 1}",
            key="RANK", value=number,
        )  # fmt: skip
    if cuda and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if init_method is None and num_ranks == 1:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    else:
        address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), os.environ.get("MASTER_PORT", distributed_port)
        where = init_method or f"tcp://{address}:{port}"
        dist.init_process_group(backend, init_method=where, rank=number, world_size=num_ranks, timeout=timeout)
    logger.info("rank %d of %d, backend %s", number, num_ranks, backend)
