"""The config in DeepSpeed's format: what is honoured, with defaults. The descriptions are what the docs say of each key."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationInfo, field_validator

from ..spec import parse_nbytes

__all__ = [
    "OPTIMIZERS",
    "ActivationCheckpointingConfig",
    "AdamParams",
    "AioConfig",
    "Bf16Config",
    "Fp16Config",
    "OffloadConfig",
    "OptimizerConfig",
    "OwnConfig",
    "SgdParams",
    "SwapioConfig",
    "ZeroConfig",
]


def _strings(value: Any) -> Any:
    """One string or path, or several, as a tuple; what is neither is left for the type check."""
    if isinstance(value, str | os.PathLike):
        value = [value]
    return tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in value) if isinstance(value, list | tuple) else value


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _later(*values: str) -> BeforeValidator:
    """Refuses values that have a name already and no code yet."""

    def check(value: Any) -> Any:
        if isinstance(value, str) and value in values:
            raise ValueError("not supported yet; leave it out")
        return value

    return BeforeValidator(check)


def _size(key: str) -> BeforeValidator:
    check: Callable[[Any], Any] = lambda value: value if value in ("auto", None) else parse_nbytes(value, key=key)  # noqa: E731
    return BeforeValidator(check)


Strings = Annotated[tuple[str, ...], BeforeValidator(_strings)]
Rate = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class AdamParams(_Section):
    """`optimizer.params` of AdamW and Adam."""

    lr: Rate = Field(default=1e-3, description="learning rate")
    betas: Annotated[tuple[Beta, Beta], BeforeValidator(_pair)] = Field(default=(0.9, 0.999), description="decay of the two moments")
    eps: Rate = Field(default=1e-8, description="added to the denominator")
    weight_decay: Rate = Field(default=0.0, description="as in DeepSpeed 0 when not given, for AdamW too (PyTorch: 0.01)")
    amsgrad: bool = Field(default=False, description="keep the largest second moment")
    maximize: bool = Field(default=False, description="ascend")
    adam_w_mode: bool = Field(default=True, description='type "Adam": true, as in DeepSpeed, makes it AdamW')


class SgdParams(_Section):
    """`optimizer.params` of SGD."""

    lr: Rate = Field(default=1e-3, description="learning rate")
    momentum: Rate = Field(default=0.0, description="0 keeps no state")
    dampening: float = Field(default=0.0, description="of the momentum")
    weight_decay: Rate = Field(default=0.0, description="added to the gradient")
    nesterov: bool = Field(default=False, description="Nesterov's momentum")
    maximize: bool = Field(default=False, description="ascend")


OPTIMIZERS: dict[str, tuple[str, type[AdamParams] | type[SgdParams]]] = {
    "adamw": ("AdamW", AdamParams),
    "adam": ("Adam", AdamParams),
    "sgd": ("SGD", SgdParams),
}
"""By type in lower case: the resolved type, and what `params` may hold."""


class OptimizerConfig(_Section):
    """`optimizer`.

    As in DeepSpeed, `"Adam"` means AdamW (decoupled weight decay) unless `params.adam_w_mode` is false; here the type
    after loading says so: it is `"AdamW"`, and `"Adam"` only for the coupled one. `params` is complete.
    """

    type: str = Field(description='"AdamW", "Adam" (which is AdamW unless params.adam_w_mode is false), "SGD"; in any case')
    params: dict[str, Any] = Field(default_factory=dict)


class Fp16Config(_Section):
    """`fp16`."""

    enabled: bool = Field(default=False, description="weights and gradients in float16")


class Bf16Config(_Section):
    """`bf16`."""

    enabled: bool = Field(default=False, description="weights and gradients in bfloat16, with exact fp32 masters")


class OffloadConfig(_Section):
    """`zero_optimization.offload_param` and `.offload_optimizer`: where they rest."""

    device: Literal["none", "cpu", "nvme"] = Field(
        default="none", description="where it rests: on the accelerator, in host memory, on a drive"
    )
    nvme_path: Strings = Field(
        default=(), validate_default=True, description="directory on a local drive, or a list of them; needed for nvme"
    )

    @property
    def paths(self) -> list[str]:
        """The directories, as a list."""
        return list(self.nvme_path)

    @field_validator("nvme_path")
    @classmethod
    def _given(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if info.data.get("device") == "nvme" and not all(value or [""]):
            raise ValueError('the device "nvme" needs a directory, for example "nvme_path": "/mnt/nvme0"')
        return value


class ZeroConfig(_Section):
    """`zero_optimization`: what is partitioned (stage) and where it rests (the two sections) are independent."""

    stage: int = Field(default=0, ge=0, le=3, description="what ranks partition; on one rank all are the same")
    offload_param: OffloadConfig = OffloadConfig()
    offload_optimizer: OffloadConfig = OffloadConfig()


class AioConfig(_Section):
    """`aio`."""

    block_size: int = Field(default=4 << 20, ge=4096, multiple_of=4096, description="bytes of one read or write (DeepSpeed: 1048576)")
    queue_depth: int = Field(default=4, ge=1, le=256, description="reads and writes in flight, one thread each (DeepSpeed: 8)")


class ActivationCheckpointingConfig(_Section):
    """`activation_checkpointing`, for `swapio.checkpointing`."""

    cpu_checkpointing: bool = Field(default=False, description="kept inputs of checkpointed calls wait in host memory for backward")
    number_checkpoints: int | None = Field(default=None, ge=1, description="inputs kept by checkpoint_blocks; null keeps every block's")


class OwnConfig(_Section):
    """`swapio`: what DeepSpeed has no word for."""

    host_memory: Annotated[int | Literal["auto"], _size("swapio.host_memory")] = Field(
        default="auto", description='hard limit of host memory: bytes, a text like "8GiB", or "auto" for what the machine can spare'
    )
    device_memory: Annotated[int | None, _size("swapio.device_memory")] = Field(
        default=None, description="the same for the accelerator; null keeps nothing there longer than it is used"
    )
    device: str = Field(default="auto", min_length=1, description='"auto" (CUDA if there is one), "cpu", "cuda", "cuda:1", "simulated"')
    units: Strings = Field(default=(), description="name patterns of the modules that move as one; empty: found in the model")
    timeout_s: float = Field(default=300.0, gt=0, description="seconds before a wait becomes an error")
    backend: Literal["auto", "direct", "mmap", "aiofiles", "memory"] = Field(default="auto", description="how files are used")
    checksums: bool = Field(default=False, description="check what is read back from a drive")
    optimizer_step: Annotated[Literal["auto", "at_step"], _later("in_forward", "in_backward")] = Field(
        default="auto", description="when the optimizer runs; auto is at_step"
    )


class SwapioConfig(_Section):
    """The whole config, complete and checked; made by `load_config`."""

    train_batch_size: int = Field(default=1, ge=1, description="samples per step = micro batch x accumulation x world size")
    train_micro_batch_size_per_gpu: int = Field(default=1, ge=1, description="samples per forward; inferred from the other two")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="inferred from the other two; more than 1 is not supported yet")
    optimizer: OptimizerConfig | None = None
    scheduler: dict[str, Any] | None = Field(default=None, description="give lr_scheduler to swapio.initialize")
    gradient_clipping: float = Field(default=0.0, ge=0, description="off unless asked for (DeepSpeed: 1.0)")
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    aio: AioConfig = AioConfig()
    swapio: OwnConfig = OwnConfig()
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _ignored: dict[str, tuple[Any, str]] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @property
    def sources(self) -> dict[str, str]:
        """Where the value of each dotted key came from: `given`, `default`, `inferred from ...`, `deprecated spelling ...`."""
        return dict(self._sources)

    @property
    def accepted_without_effect(self) -> dict[str, str]:
        """Dotted keys that were given and change nothing here, with the reason."""
        return {key: why for key, (_, why) in self._ignored.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from what a reader of the config may expect, one sentence each; worth a line in the log."""
        return tuple(self._notes)

    def resolved(self) -> dict[str, Any]:
        """Every value in force, and those given without effect, in the config's own format; `load_config` takes it again."""
        tree = self.model_dump(mode="json")
        for key, (value, _) in self._ignored.items():
            *path, name = key.split(".")
            section = tree
            for part in path:
                section = section.setdefault(part, {})
            section.setdefault(name, value)
        return tree
