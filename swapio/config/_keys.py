"""Every key of the config and what becomes of it, as one table. Keys that are honoured come from the schema, all others are listed here."""

from __future__ import annotations

import dataclasses
import enum
import json
import types
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from ._schema import AdamParams, SgdParams, SwapioConfig

__all__ = ["DEPRECATED", "KEYS", "SECTIONS", "Key", "Kind", "config_table", "is_off"]


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
_ONE_RANK = "one rank does not communicate"
_BUDGET = "swapio.host_memory bounds everything, and what comes next is learnt"
_OFF = "its section is off"
_METHOD = "it changes the training method: do it in the training loop"

_NO_EFFECT = (
    ("", "steps_per_print dump_state", "engine.stats() and engine.config.resolved() have it; nothing is printed"),
    ("", "wall_clock_breakdown memory_breakdown timers comms_logger", "engine.stats() has times and bytes"),
    ("", "log_level", "set the level of the logger 'swapio'"),
    ("", "disable_python_gc", "collections are not relied on"),
    ("", "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", "there is one implementation of each optimizer"),
    ("", "prescale_gradients gradient_predivide_factor gradient_allreduce_op fp32_allreduce disable_allgather", _ONE_RANK),
    ("", "communication_data_type seq_parallel_communication_data_type seq_parallel_comm_data_type", _ONE_RANK),
    ("", "pipeline use_data_before_expert_parallelism vocabulary_size", "it describes models that are refused, or only warns"),
    ("optimizer", "legacy_fusion", "there is one implementation"),
    ("optimizer.params", "torch_adam fused foreach", "there is one implementation"),
    ("fp16", "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale", _OFF),
    ("fp16", "fused_mode fp16_master_weights_and_grads", _OFF),
    ("bf16", "immediate_grad_update", "gradients are kept in the dtype of the weights until the step"),
    ("torch_autocast", "dtype lower_precision_safe_modules", _OFF),
    ("activation_checkpointing", "profile synchronize_checkpoint_boundary", "it only measures"),
    ("activation_checkpointing", "contiguous_memory_optimization", "it only says how kept inputs lie in memory"),
    ("checkpoint", "tag_validation", "one rank agrees with itself"),
    ("aio", "single_submit overlap_events intra_op_parallelism thread_count", "aio.queue_depth is the number of threads that do the I/O"),
    ("zero_optimization", "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce overlap_comm", _ONE_RANK),
    ("zero_optimization", "allgather_partitions allgather_bucket_size stage3_allgather_sequential round_robin_gradients", _ONE_RANK),
    ("zero_optimization", "stage3_use_all_reduce_for_fetch_params zero_hpz_partition_size", _ONE_RANK),
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
"""Section, keys, why they cannot change a result."""

_NOT_YET: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_clipping": ((0,), "off unless asked for; DeepSpeed: 1.0"),
    "fp16.enabled": ((False,), "use bf16"),
    "scheduler": (({"type": None},), "give lr_scheduler to swapio.initialize"),
    "torch_autocast.enabled": ((False,), "use bf16"),
    "managed_gradient_accumulation": ((True,), "without accumulation there is nothing to manage"),
    "dataloader_drop_last": ((False,), "make the DataLoader yourself"),
    "tensorboard": (_SWITCH, "log engine.stats()"),
    "wandb": (_SWITCH, "log engine.stats()"),
    "comet": (_SWITCH, "log engine.stats()"),
    "csv_monitor": (_SWITCH, "log engine.stats()"),
    "trackio": (_SWITCH, "log engine.stats()"),
    "flops_profiler": (_SWITCH, "use torch.profiler"),
    "compile": (({"deepcompile": False},), "leave it out"),
    "data_types.grad_accum_dtype": ((), "gradients have the dtype of the weights"),
    "data_types.param_dtype": ((), "use bf16"),
    "data_types.buffer_dtype": ((), "buffers have the dtype of the weights"),
    "data_types.keep_in_fp32_modules": ((), "use bf16, which holds for all modules"),
    "checkpoint.load_universal": ((False,), "checkpoints are not there yet"),
    "checkpoint.use_node_local_storage": ((False,), "checkpoints are not there yet"),
    "checkpoint.parallel_write": (({"pipeline_stage": False},), "checkpoints are not there yet"),
    "checkpoint.checkpoint_serialization": ((True,), "checkpoints are not there yet"),
    "checkpoint.writer": ((), "checkpoints are not there yet"),
    "bf16.bf16_master_weights_and_grads": ((False,), "masters are fp32"),
    "bf16.bf16_optimizer_states": ((False,), "optimizer states are fp32"),
    "zero_optimization.compute_grad_norm": ((True,), "without clipping no norm is computed"),
    "zero_optimization.zero_quantized_weights": ((False,), "leave it out"),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), "leave it out"),
    "zero_optimization.zero_quantized_gradients": ((False,), "leave it out"),
    "zero_optimization.offload_optimizer.ratio": ((1,), "swapio.host_memory decides how much stays in host memory"),
    "swapio.tuned": ((), "write the section aio"),
    "swapio.optimizer_state_dtype": (("fp32",), "optimizer states are fp32"),
}
"""Values that are taken so far, and what to use instead of others."""

_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "amp": (_SWITCH, "Apex is not used: use bf16"),
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
    "activation_checkpointing.partition_activations": ((False,), "it cuts activations between model-parallel ranks: there are none"),
    "tensor_parallel": (({"autotp_size": 0}, {"autotp_size": 1}), "models are not cut within a layer"),
    "expert_parallel": (_SWITCH, "experts are units like others"),
    "sequence_parallel_size": ((1,), "sequences are not cut"),
    "bf16.check_grad_overflow": ((True,), "a step with a gradient that is not finite never reaches 16-bit weights"),
    "optimizer.params.bias_correction": ((True,), "the bias is always corrected"),
    "optimizer.params.max_grad_norm": ((0,), "use the top-level gradient_clipping"),
    "zero_optimization.zenflow": ((), "its updates lag behind; here every step is exact"),
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


def _schema_keys(model: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        parts = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, BaseModel)]
        if key == "optimizer.params":  # depends on the type
            yield from {k.key: k for params in (SgdParams, AdamParams) for k in _schema_keys(params, f"{key}.")}.values()
        elif parts:
            yield from _schema_keys(parts[0], f"{key}.")
        else:
            yield Key(key, Kind.HONOURED, field.description or "", None if field.is_required() else field.default)


def _rows() -> Iterator[Key]:
    unbuilt = {**_NOT_YET, **_REFUSED}
    yield from (key for key in _schema_keys(SwapioConfig) if key.key not in unbuilt)
    for section, names, why in _NO_EFFECT:
        yield from (Key(f"{section}.{name}".lstrip("."), Kind.NO_EFFECT, why) for name in names.split())
    yield from (Key(key, Kind.NOT_YET, note, off=off) for key, (off, note) in _NOT_YET.items())
    yield from (Key(key, Kind.REFUSED, note, off=off) for key, (off, note) in _REFUSED.items())
    yield from (Key(key, Kind.DEPRECATED, f"use {new}") for key, (new, _) in DEPRECATED.items())


ROWS = tuple(_rows())
KEYS = types.MappingProxyType({row.key: row for row in ROWS})
"""The table, by dotted key."""

SECTIONS = frozenset(key.rpartition(".")[0] for key in KEYS) | {"zero_optimization", ""}


def config_table() -> list[tuple[str, str, str, str]]:
    """The table for the docs: key, what becomes of it, default or the values that are taken (as JSON), note; by section."""

    def values(row: Key) -> str:
        return ", ".join(map(json.dumps, row.off)) if row.off else json.dumps(row.default) if row.kind is Kind.HONOURED else ""

    return [(row.key, str(row.kind), values(row), row.note) for row in sorted(ROWS, key=lambda row: row.key.rpartition(".")[0])]
