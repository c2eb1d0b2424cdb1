"""The config in DeepSpeed's format: what is honoured, with defaults."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

__all__ = [
    "AioConfig",
    "Bf16Config",
    "OffloadConfig",
    "OptimizerConfig",
    "OwnConfig",
    "SwapioConfig",
    "ZeroConfig",
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OptimizerConfig(_Section):
    """`optimizer`: as in DeepSpeed, `Adam` means AdamW unless `params.adam_w_mode` is false."""

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class Bf16Config(_Section):
    """`bf16`: weights and gradients in bfloat16, with exact fp32 masters."""

    enabled: bool = False


class OffloadConfig(_Section):
    """`zero_optimization.offload_param` and `.offload_optimizer`: where they rest."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | list[str] | None = None

    @property
    def paths(self) -> list[str]:
        """The directories, as a list."""
        return [self.nvme_path] if isinstance(self.nvme_path, str) else list(self.nvme_path or ())

    @model_validator(mode="after")
    def _path_given(self) -> OffloadConfig:
        if self.device == "nvme" and not self.paths:
            raise ValueError('device "nvme" needs a directory: "nvme_path": "/mnt/nvme0"')
        return self


class ZeroConfig(_Section):
    """`zero_optimization`: on one rank every stage is the same; where things rest is said by the two sections."""

    stage: Literal[0, 1, 2, 3] = 0
    offload_param: OffloadConfig | None = None
    offload_optimizer: OffloadConfig | None = None


class AioConfig(_Section):
    """`aio`: bytes of one read or write, and how many are in flight (one thread each)."""

    block_size: int = Field(default=4 << 20, ge=4096, multiple_of=4096)
    queue_depth: int = Field(default=4, ge=1, le=256)


class OwnConfig(_Section):
    """`swapio`: what DeepSpeed has no word for."""

    host_memory: int | str = "auto"
    device_memory: int | str | None = None
    device: str = "auto"
    units: list[str] = Field(default_factory=list)
    timeout_s: float = Field(default=300.0, gt=0)
    backend: Literal["auto", "direct", "memory"] = "auto"
    optimizer_step: Literal["auto", "at_step"] = "auto"

    @field_validator("host_memory", "device_memory", mode="before")
    @classmethod
    def _not_a_bool(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, bool):
            raise ValueError('write a size, for example 1073741824 or "1GiB"')
        return value


class SwapioConfig(_Section):
    """The whole config; made by `load_config`."""

    train_batch_size: int = Field(default=1, ge=1)
    train_micro_batch_size_per_gpu: int = Field(default=1, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
    optimizer: OptimizerConfig | None = None
    bf16: Bf16Config = Bf16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    aio: AioConfig = AioConfig()
    swapio: OwnConfig = OwnConfig()
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _without_effect: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def sources(self) -> dict[str, str]:
        """Where each given or inferred value came from, by dotted key; all others are defaults."""
        return dict(self._sources)

    @property
    def accepted_without_effect(self) -> dict[str, str]:
        """Keys that were given and cannot change a result here, with the reason."""
        return dict(self._without_effect)

    def resolved(self) -> dict[str, Any]:
        """Every value in force, as a dict in the config's own format."""
        return self.model_dump()
