"""The config in DeepSpeed's format: what is honoured, with defaults. The descriptions are what the docs say of each key."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from ..errors import ConfigError
from ..spec import parse_nbytes
from ._params import Section

__all__ = [
    "ActivationCheckpointingConfig",
    "AioConfig",
    "Bf16Config",
    "DataTypesConfig",
    "Fp16Config",
    "MonitorConfig",
    "OffloadConfig",
    "OptimizerConfig",
    "OwnConfig",
    "SchedulerConfig",
    "SwapioConfig",
    "ZeroConfig",
]


def _strings(value: Any) -> Any:
    """One string or path, or several, as a tuple; what is neither is left for the type check."""
    if isinstance(value, str | os.PathLike):
        value = [value]
    return tuple(os.fspath(v) if isinstance(v, os.PathLike) else v for v in value) if isinstance(value, list | tuple) else value


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _interval(value: Any) -> Any:
    """Whole numbers written as 1e5 are common here, and infinity for never."""
    if isinstance(value, float):
        return None if value == math.inf else int(value) if value.is_integer() else value
    return value


def _size(key: str) -> BeforeValidator:
    check: Callable[[Any], Any] = lambda value: value if value in ("auto", None) else parse_nbytes(value, key=key)  # noqa: E731
    return BeforeValidator(check)


Strings = Annotated[tuple[str, ...], BeforeValidator(_strings)]
Interval = Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_interval)]


class OptimizerConfig(Section):
    """`optimizer`.

    As in DeepSpeed, `"Adam"` means AdamW (decoupled weight decay) unless `params.adam_w_mode` is false; here the type
    after loading says so: it is `"AdamW"`, and `"Adam"` only for the coupled one. `params` is complete.
    """

    type: str = Field(
        description='"AdamW", "Adam" (which is AdamW unless params.adam_w_mode is false), "SGD", "Adagrad", "RMSprop", "Adadelta", '
        '"Adamax", "RAdam"; in any case'
    )
    params: dict[str, Any] = Field(default_factory=dict)


class SchedulerConfig(Section):
    """`scheduler`. The type is spelt as in DeepSpeed after loading, and `params` is complete."""

    type: str = Field(description='"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"; in any case')
    params: dict[str, Any] = Field(default_factory=dict)


class Fp16Config(Section):
    """`fp16`."""

    enabled: bool = Field(default=False, description="weights and gradients in float16, with fp32 masters and a scaled loss")
    auto_cast: bool = Field(default=False, description="cast floating inputs of the model to float16")
    loss_scale: float = Field(default=0.0, ge=0, description="fixed factor of the loss; 0: dynamic")
    initial_scale_power: int = Field(default=16, ge=0, le=127, description="the dynamic scale starts at 2 to this power")
    loss_scale_window: int = Field(default=1000, ge=1, description="steps without overflow after which the next doubles the scale")
    hysteresis: int = Field(default=2, ge=1, description="the scale is halved from this overflow on; those before only count")
    consecutive_hysteresis: bool = Field(default=False, description="a step without overflow starts that count anew")
    min_loss_scale: float = Field(default=1.0, gt=0, description="an overflow at this scale is an error")

    @model_validator(mode="after")
    def _starts_above_the_minimum(self) -> Fp16Config:
        if self.loss_scale == 0 and 2.0**self.initial_scale_power < self.min_loss_scale:
            raise ConfigError(
                f"fp16.min_loss_scale: {self.min_loss_scale} is above the scale at the start, 2**{self.initial_scale_power} = "
                f"{2**self.initial_scale_power}; raise fp16.initial_scale_power or use 1",
                key="fp16.min_loss_scale", value=self.min_loss_scale,
            )  # fmt: skip
        return self


class Bf16Config(Section):
    """`bf16`."""

    enabled: bool = Field(default=False, description="weights and gradients in bfloat16, with exact fp32 masters")


class OffloadConfig(Section):
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


class ZeroConfig(Section):
    """`zero_optimization`: what is partitioned (stage) and where it rests (the two sections) are independent."""

    stage: int = Field(default=0, ge=0, le=3, description="what ranks partition; on one rank all are the same")
    offload_param: OffloadConfig = OffloadConfig()
    offload_optimizer: OffloadConfig = OffloadConfig()


class ActivationCheckpointingConfig(Section):
    """`activation_checkpointing`."""

    cpu_checkpointing: bool = Field(default=False, description="what a checkpoint keeps rests in host memory")
    number_checkpoints: int | None = Field(default=None, ge=1, description="checkpoints in one forward; null: as they come")


class DataTypesConfig(Section):
    """`data_types`."""

    grad_accum_dtype: Literal["fp32"] | None = Field(
        default=None, description="gradients are summed in fp32 over micro-batches and ranks; null: the same"
    )


class MonitorConfig(Section):
    """`csv_monitor` and `tensorboard`."""

    enabled: bool = Field(default=False, description="write loss, learning rate and loss scale at each step, on rank 0")
    output_path: Annotated[str, BeforeValidator(_path)] = Field(default="", description='a folder; "": where the program was started')
    job_name: str = Field(default="DeepSpeedJobName", min_length=1, description="folder inside output_path")


class AioConfig(Section):
    """`aio`."""

    block_size: int = Field(default=4 << 20, ge=4096, multiple_of=4096, description="bytes of one read or write (DeepSpeed: 1048576)")
    queue_depth: int = Field(default=4, ge=1, le=256, description="reads and writes in flight, one thread each (DeepSpeed: 8)")


class OwnConfig(Section):
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
    tuned: Annotated[str | None, BeforeValidator(_path)] = Field(
        default=None,
        min_length=1,
        description="file written by `swapio tune`: values for what is not given of the section aio and of backend",
    )
    optimizer_state_dtype: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="what the optimizer's state is stored as, in 4, 2 or 1 bytes each; it is computed in fp32 and rounded stochastically",
    )
    optimizer_step: Literal["auto", "in_forward", "in_backward", "at_step"] = Field(
        default="auto",
        description="when the optimizer runs: in_forward puts each unit's update off until it is needed; in_backward makes it when its "
        "last gradient comes, without clipping or skipping; auto is in_forward on one rank where not all fits in memory, else at_step",
    )


class SwapioConfig(Section):
    """The whole config, complete and checked; made by `load_config`."""

    train_batch_size: int = Field(default=1, ge=1, description="samples per step = micro batch x accumulation x world size")
    train_micro_batch_size_per_gpu: int = Field(default=1, ge=1, description="samples per forward; inferred from the other two")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="micro-batches per step; inferred from the other two")
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    gradient_clipping: float = Field(default=0.0, ge=0, description="largest norm of all gradients; 0, the default: off (DeepSpeed: 1.0)")
    steps_per_print: Interval = Field(
        default=None, description="log loss and learning rate every so many steps, by the logger swapio at level INFO; null: never"
    )
    dataloader_drop_last: bool = Field(default=False, description="of training_data, drop a last batch that is not full")
    fp16: Fp16Config = Fp16Config()
    bf16: Bf16Config = Bf16Config()
    data_types: DataTypesConfig = DataTypesConfig()
    zero_optimization: ZeroConfig = ZeroConfig()
    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    aio: AioConfig = AioConfig()
    csv_monitor: MonitorConfig = MonitorConfig()
    tensorboard: MonitorConfig = MonitorConfig()
    swapio: OwnConfig = OwnConfig()
    _world: tuple[int, str] = PrivateAttr(default=(1, "one process"))
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)
    _ignored: dict[str, tuple[Any, str]] = PrivateAttr(default_factory=dict)
    _notes: list[str] = PrivateAttr(default_factory=list)

    @property
    def world_size(self) -> int:
        """Number of ranks that the batch sizes are for."""
        return self._world[0]

    @property
    def sources(self) -> dict[str, str]:
        """Where the value of each dotted key came from: `given`, `default`, `inferred from ...`,
        `deprecated spelling ...`, `tuned FILE`."""
        return dict(self._sources)

    @property
    def accepted_without_effect(self) -> dict[str, str]:
        """Dotted keys that were given and change nothing here, with the reason."""
        return {key: why for key, (_, why) in self._ignored.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What differs from what a reader of the config may expect, one sentence each; worth a line in the log."""
        return tuple(self._notes)

    def describe(self) -> str:
        """All values in force with where each came from, and what was given without effect, one aligned line each, for people."""
        resolved, lines = self.resolved(), []
        for key, source in self._sources.items():
            value: Any = functools.reduce(lambda tree, name: tree[name], key.split("."), resolved)
            lines.append(
                (key, json.dumps(value, default=str), source + (f"; no effect: {self._ignored[key][1]}" if key in self._ignored else ""))
            )
        lines.insert(0, ("world size", str(self._world[0]), self._world[1]))
        widths = [min(max(len(line[i]) for line in lines), limit) for i, limit in enumerate((80, 24))]
        return "\n".join(f"{key:{widths[0]}} = {value:{widths[1]}}  ({source})" for key, value, source in lines)

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
