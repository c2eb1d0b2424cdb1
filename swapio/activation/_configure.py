"""What `deepspeed.checkpointing.configure` sets: one state per process."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from ..config import ActivationCheckpointingConfig, load_config
from ..errors import ConfigError
from ..memory import Device, get_device
from ._offload import HostOffload

__all__ = ["configure", "current", "is_configured", "parse_section", "reset"]

logger = logging.getLogger("swapio")


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What holds for calls from now on."""

    number_checkpoints: int | None = None
    offload: HostOffload | None = None  # None: kept inputs stay where they are


_NOTHING = State()
_configured: State | None = None


def current() -> State:
    """The state in force."""
    return _configured or _NOTHING


def parse_section(**values: Any) -> ActivationCheckpointingConfig:
    """Keys of `activation_checkpointing` as the config would check them; `None` counts as not given.

    Raises:
        ConfigError: a value that cannot work.
    """
    return load_config({"activation_checkpointing": values}).activation_checkpointing


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
    *,
    device: str | torch.device | Device = "auto",
) -> None:
    """Set how `checkpoint` and `checkpoint_blocks` work, with DeepSpeed's arguments. A second call replaces what the first set.

    Args:
        mpu_: must be `None`.
        deepspeed_config: a config whose section `activation_checkpointing` counts; the arguments after it count more.
        partition_activations, contiguous_checkpointing, synchronize, profile: accepted, without effect.
        num_checkpoints: how many inputs `checkpoint_blocks` keeps; see there.
        checkpoint_in_cpu: kept inputs wait in host memory, and come back for recomputation. It counts neither what a call inside another
            checkpointed call keeps (that is recomputed) nor in `swapio.host_memory`. Without an accelerator nothing moves.
        device: where the kept inputs are: as `swapio.device` in the config, or a `swapio.memory.Device`. On CUDA, call this on the stream
            that computes.

    Raises:
        ConfigError: a config or a value that cannot work, by its key in the config.
    """
    global _configured
    if mpu_ is not None:
        raise ConfigError("mpu_: model parallelism is not supported; leave it out", key="mpu_", value=mpu_)
    given = parse_section(
        partition_activations=partition_activations,
        contiguous_memory_optimization=contiguous_checkpointing,
        number_checkpoints=num_checkpoints,
        cpu_checkpointing=checkpoint_in_cpu,
        synchronize_checkpoint_boundary=synchronize,
        profile=profile,
    )
    section = load_config(deepspeed_config).activation_checkpointing if deepspeed_config is not None else ActivationCheckpointingConfig()
    section = section.model_copy(update={name: getattr(given, name) for name in given.model_fields_set})
    offload = None
    if section.cpu_checkpointing:
        place = get_device(device)
        if place.has_memory:
            offload = HostOffload(place)
        else:
            logger.warning("activation_checkpointing.cpu_checkpointing: there is no accelerator; kept inputs are in host memory anyway")
    _close()
    _configured = State(section.number_checkpoints, offload)


def is_configured() -> bool:
    """Whether `configure` was called. `checkpoint` works without it."""
    return _configured is not None


def reset() -> None:
    """Give host memory that waits for the next kept inputs back to the system; what was configured stays, as in DeepSpeed.

    Call it before an evaluation or when training ends. What is kept for a backward pass to come is not touched.
    """
    offload = current().offload
    if offload is not None:
        offload.arena.trim()


def _close() -> None:
    offload = current().offload
    if offload is not None:
        offload.arena.close()  # what is kept stays until its graph is gone
