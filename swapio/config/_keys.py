"""Every key of the config and what becomes of it, as one table. Keys that are honoured come from the schema, all others are listed here."""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from ._params import OPTIMIZERS, SCHEDULERS
from ._schema import SwapioConfig

__all__ = ["DEPRECATED", "KEYS", "ROWS", "SECTIONS", "Key", "Kind", "is_off"]


class Kind(enum.StrEnum):
    """What becomes of a key. Each key has exactly one."""

    HONOURED = "honoured"
    NO_EFFECT = "accepted, without effect"
    """It cannot change a result here, so any value is taken; `SwapioConfig.accepted_without_effect` lists it."""
    NOT_YET = "not supported yet"
    """Only the values that mean off are taken."""
    REFUSED = "refused"
    """Not planned. Only the values that mean off are taken."""
    DEPRECATED = "deprecated spelling"
    """Taken as its new name, which decides the rest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A row of the table.

    Attributes:
        key: dotted.
        note: one clause: what it does, why it has no effect, or what to use instead.
        default: of an honoured key.
        off: of one that is not supported yet or refused: values that are taken.
            A dict stands for any section that has these entries, or lacks them.
    """

    key: str
    kind: Kind
    note: str
    default: Any = None
    off: tuple[Any, ...] = ()


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether `value` is one of `off`, and of its type; `False` is not 0."""
    for allowed in off:
        if isinstance(allowed, dict) and isinstance(value, dict):
            if all(value.get(k) in (None, "auto") or is_off(value[k], (v,)) for k, v in allowed.items()):
                return True
        elif isinstance(value, bool) == isinstance(allowed, bool) and type(value) in (int, float, str, bool, dict) and value == allowed:
            return True
    return False


_SWITCH = ({"enabled": False},)
_REDUCTION = "gradients are reduced in fp32, in the order of the ranks, as each unit's arrive"
_GATHER = "weights are gathered unit by unit, just in time"
_BUDGET = "swapio.host_memory bounds everything, and what comes next is learnt"
_OFF = "its section is off"
_METHOD = "it changes the training method: do it in the training loop"
_SERVICE = "nothing is sent to a service: use csv_monitor or tensorboard, or log engine.stats()"
_EXACT = "what ranks exchange is exact"
_NO_CHECKPOINTS = "checkpoints are not there yet"

_NO_EFFECT = (
    ("", "dump_state", "engine.config.describe() has it"),
    ("", "wall_clock_breakdown memory_breakdown timers comms_logger", "engine.stats() has times and bytes"),
    ("", "log_level", "set the level of the logger 'swapio'"),
    ("", "disable_python_gc", "collections are not relied on"),
    ("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "there is one implementation of each optimizer"),
    ("", "prescale_gradients gradient_predivide_factor", "gradients are averaged in fp32, where it does not matter when they are divided"),
    ("", "communication_data_type fp32_allreduce", "gradients are reduced in fp32 in any case"),
    ("", "disable_allgather", _GATHER),
    ("", "seq_parallel_communication_data_type seq_parallel_comm_data_type", "sequences are not cut"),
    ("", "pipeline use_data_before_expert_parallelism vocabulary_size", "it describes models that are refused, or only warns"),
    ("optimizer", "legacy_fusion", "there is one implementation"),
    ("optimizer.params", "torch_adam fused foreach", "there is one implementation"),
    ("fp16", "fused_mode", "there is one implementation"),
    ("bf16", "immediate_grad_update", "gradients are in place as soon as they are computed"),
    ("torch_autocast", "dtype lower_precision_safe_modules", _OFF),
    ("activation_checkpointing", "profile synchronize_checkpoint_boundary", "it only measures"),
    ("activation_checkpointing", "partition_activations", "it splits them among ranks that cut a model within a layer; there are none"),
    ("activation_checkpointing", "contiguous_memory_optimization", "host memory is one arena, which does not fragment"),
    ("checkpoint", "tag_validation", _NO_CHECKPOINTS),
    ("aio", "single_submit overlap_events intra_op_parallelism thread_count", "aio.queue_depth is the number of threads that do the I/O"),
    ("zero_optimization", "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce", _REDUCTION),
    ("zero_optimization", "overlap_comm round_robin_gradients", _REDUCTION),
    ("zero_optimization", "allgather_partitions allgather_bucket_size stage3_allgather_sequential", _GATHER),
    ("zero_optimization", "stage3_use_all_reduce_for_fetch_params zero_hpz_partition_size", _GATHER),
    ("zero_optimization", "compute_grad_norm", "the norm is computed when gradient_clipping needs it"),
    ("zero_optimization", "sub_group_size stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance", _BUDGET),
    ("zero_optimization", "stage3_param_persistence_threshold stage3_model_persistence_threshold", _BUDGET),
    ("zero_optimization", "stage3_module_granularity_threshold leaf_module", "swapio.units says what moves as one"),
    ("zero_optimization", "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", "loading does not depend on the layout"),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save", "state_dict() is always whole"),
    ("zero_optimization", "ignore_unused_parameters legacy_stage1 parameter_alignment memory_efficient_linear", "it does not arise here"),
    ("zero_optimization", "override_module_apply save_muon_momentum_buffer_in_memory", "it does not arise here"),
    ("zero_optimization", "log_trace_cache_warnings enable_sanity_checks", "it only checks"),
    ("zero_optimization.offload_param", "buffer_count buffer_size max_in_cpu", "swapio.host_memory bounds the buffers"),
    ("zero_optimization.offload_param", "pin_memory", "host memory is pinned where there is an accelerator"),
    ("zero_optimization.offload_optimizer", "buffer_count pipeline pipeline_read pipeline_write", "always pipelined, within the budget"),
    ("zero_optimization.offload_optimizer", "fast_init cpuadam_cores_perc", "PyTorch's threads do the step"),
    ("zero_optimization.offload_optimizer", "pin_memory", "host memory is pinned where there is an accelerator"),
)
"""Section, keys, why they cannot change a result beyond rounding, with any number of ranks."""

_NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "checkpoint.load_universal": ((False,), _NO_CHECKPOINTS),
    "checkpoint.use_node_local_storage": ((False,), _NO_CHECKPOINTS),
    "checkpoint.parallel_write": (({"pipeline_stage": False},), _NO_CHECKPOINTS),
    "checkpoint.checkpoint_serialization": ((True,), _NO_CHECKPOINTS),
    "checkpoint.writer": ((), _NO_CHECKPOINTS),
}
"""Values that are taken so far, and what to use instead of others."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "amp": (_SWITCH, "Apex is not used: use bf16 or fp16"),
    "torch_autocast.enabled": ((False,), "it keeps a 16-bit copy of every weight: use bf16 or fp16"),
    "managed_gradient_accumulation": ((True,), "leave gradient_accumulation_steps 1 and call step() where a batch ends: gradients add up"),
    "gradient_allreduce_op": (("mean",), "gradients are averaged; for their sum multiply the loss by the number of ranks"),
    "data_types.param_dtype": ((), "use bf16 or fp16"),
    "data_types.buffer_dtype": ((), "buffers have the dtype of the weights"),
    "data_types.keep_in_fp32_modules": ((), "bf16 and fp16 hold for all modules"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are fp32: 16-bit ones lose small updates"),
    "bf16.bf16_optimizer_states": ((False,), 'use swapio.optimizer_state_dtype: "bf16"'),
    "fp16.fp16_master_weights_and_grads": ((False,), "masters are fp32: 16-bit ones lose small updates"),
    "wandb": (_SWITCH, _SERVICE),
    "comet": (_SWITCH, _SERVICE),
    "trackio": (_SWITCH, _SERVICE),
    "flops_profiler": (_SWITCH, "use torch.profiler or torch.utils.flop_counter"),
    "compile": (({"deepcompile": False},), "its passes move the tensors that the engine moves"),
    "sparse_gradients": ((False,), "gradients are dense"),
    "graph_harvesting": ((False,), "steps are not captured in CUDA graphs"),
    "sparse_attention": ((), "attention is the model's: use torch.nn.attention"),
    "elasticity": (_SWITCH, "write the batch sizes"),
    "autotuning": (_SWITCH, "write the values"),
    "compression_training": ((), _METHOD),
    "quantize_training": (_SWITCH, _METHOD),
    "progressive_layer_drop": (_SWITCH, _METHOD),
    "eigenvalue": (_SWITCH, _METHOD),
    "curriculum_learning": (_SWITCH, _METHOD),
    "data_efficiency": (_SWITCH, _METHOD),
    "weight_quantization": ((), "it is for inference"),
    "hybrid_engine": (_SWITCH, "call generate() on the model as it is"),
    "nebula": (_SWITCH, "the service is not used"),
    "tensor_parallel": (({"autotp_size": 0}, {"autotp_size": 1}), "models are not cut within a layer"),
    "expert_parallel": (_SWITCH, "experts are units like others"),
    "sequence_parallel_size": ((1,), "sequences are not cut"),
    "bf16.check_grad_overflow": ((True,), "a step with a gradient that is not finite never reaches 16-bit weights"),
    "optimizer.params.bias_correction": ((True,), "the bias is always corrected"),
    "optimizer.params.initial_accumulator_value": ((0,), "state starts as zeros"),
    "optimizer.params.max_grad_norm": ((0,), "use the top-level gradient_clipping"),
    "zero_optimization.zenflow": ((), "its updates lag behind; here every step is exact"),
    "zero_optimization.zero_quantized_weights": ((False,), _EXACT),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _EXACT),
    "zero_optimization.zero_quantized_gradients": ((False,), _EXACT),
    "zero_optimization.offload_optimizer.ratio": ((1,), "swapio.host_memory decides how much stays in host memory"),
    "zero_optimization.offload_optimizer.super_offload": ((False,), "swapio.host_memory decides what stays where"),
    "zero_optimization.mics_shard_size": ((-1,), "DeepSpeed has removed it"),
    "zero_optimization.mics_hierarchical_params_gather": ((False,), "DeepSpeed has removed it"),
    "zero_optimization.zeropp_loco_param": ((), "DeepSpeed has removed it"),
    "aio.use_gds": ((False,), "bytes pass through host memory, where the budget counts them"),
}
"""The same for what is not planned."""

_ON_CPU = {True: {"device": "cpu"}, False: {"device": "none"}}
DEPRECATED: dict[str, tuple[str, dict[bool, Any] | None]] = {
    "bfloat16": ("bf16", None),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", _ON_CPU),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param", _ON_CPU),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", _ON_CPU),
    "zero_optimization.cpu_offload_use_pin_memory": ("zero_optimization.offload_optimizer.pin_memory", None),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", None),
} | {
    f"{section}.{name.removeprefix('stage3_')}": (f"{section}.{name}", None)
    for section, names, _ in _NO_EFFECT
    for name in names.split()
    if name.startswith("stage3_")
}
"""Old spelling -> the new one, and how its values translate (None: as they are)."""


_PARAMS: dict[str, tuple[type[BaseModel], ...]] = {
    "optimizer.params": tuple(model for _, model in reversed(OPTIMIZERS.values())),
    "scheduler.params": tuple(model for _, model in reversed(SCHEDULERS.values())),
}
"""What depends on a type; of two with one name the last is the row of the table."""


def _schema_keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        parts = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        if key in _PARAMS:
            yield from {k.key: k for params in _PARAMS[key] for k in _schema_keys(params, f"{key}.")}.values()
        elif parts:
            yield from _schema_keys(parts[0], f"{key}.")
        else:
            yield Key(key, Kind.HONOURED, field.description or "", None if field.is_required() else field.default)


def _rows() -> Iterator[Key]:
    yield from _schema_keys(SwapioConfig)
    for section, names, why in _NO_EFFECT:
        yield from (Key(f"{section}.{name}".lstrip("."), Kind.NO_EFFECT, why) for name in names.split())
    yield from (Key(key, Kind.NOT_YET, note, off=off) for key, (off, note) in _NOT_YET.items())
    yield from (Key(key, Kind.REFUSED, note, off=off) for key, (off, note) in _REFUSED.items())
    yield from (Key(key, Kind.DEPRECATED, f"use {new}") for key, (new, _) in DEPRECATED.items())


ROWS = tuple(_rows())
KEYS = types.MappingProxyType({row.key: row for row in ROWS})
"""The table, by dotted key."""

SECTIONS = frozenset(key.rpartition(".")[0] for key in KEYS) | {"zero_optimization", ""}
