"""Every key of DeepSpeed's config format that is not in the schema, and what becomes of it. Data only."""

from __future__ import annotations

from typing import Any

__all__ = ["DEPRECATED", "NOT_YET", "NO_EFFECT"]

NO_EFFECT: dict[str, str] = {
    "steps_per_print": "nothing is printed",
    "wall_clock_breakdown": "engine.stats() has the times",
    "memory_breakdown": "engine.stats() has the bytes",
    "dump_state": "engine.config.resolved() gives it",
    "disable_python_gc": "collections are not relied on",
    "zero_allow_untested_optimizer": "an optimizer is supported or refused",
    "zero_force_ds_cpu_optimizer": "there is one implementation",
    "prescale_gradients": "one rank has nothing to average",
    "gradient_predivide_factor": "one rank has nothing to average",
    "gradient_allreduce_op": "one rank has nothing to average",
    "communication_data_type": "one rank sends nothing",
    "aio.single_submit": "I/O is done by threads",
    "aio.overlap_events": "I/O is done by threads",
    "aio.intra_op_parallelism": "aio.queue_depth is the number of threads",
    "aio.thread_count": "aio.queue_depth is the number of threads",
    "bf16.immediate_grad_update": "gradients are kept in the weights' dtype until the step",
    "bf16.check_grad_overflow": "a non-finite gradient always skips the step of 16-bit weights",
} | {
    f"zero_optimization.{key}": reason
    for keys, reason in (
        (
            "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
            "allgather_bucket_size overlap_comm round_robin_gradients stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
            "one rank does not communicate",
        ),
        (
            "sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
            "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold",
            "swapio.host_memory bounds everything, and what comes next is learnt",
        ),
        ("load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint", "checkpoints do not depend on the layout"),
        ("stage3_gather_16bit_weights_on_model_save", "state_dict() is always whole"),
        ("ignore_unused_parameters legacy_stage1 parameter_alignment memory_efficient_linear override_module_apply", "not needed here"),
        ("log_trace_cache_warnings enable_sanity_checks leaf_module save_muon_momentum_buffer_in_memory", "not needed here"),
    )
    for key in keys.split()
} | {
    f"zero_optimization.{section}.{key}": "swapio.host_memory bounds the buffers"
    for section, keys in (
        ("offload_param", "buffer_count buffer_size max_in_cpu pin_memory"),
        ("offload_optimizer", "buffer_count pin_memory pipeline_read pipeline_write pipeline fast_init cpuadam_cores_perc"),
    )
    for key in keys.split()
}  # fmt: skip
"""Accepted because they cannot change a result here, with the reason."""

NOT_YET: dict[str, tuple[Any, ...]] = {
    "gradient_clipping": (0, 0.0, None),
    "fp16": ({"enabled": False}, None),
    "fp16.enabled": (False,),
    "torch_autocast": ({"enabled": False}, None),
    "scheduler": (None,),
    "activation_checkpointing": (None,),
    "tensorboard": ({"enabled": False}, None),
    "wandb": ({"enabled": False}, None),
    "comet": ({"enabled": False}, None),
    "csv_monitor": ({"enabled": False}, None),
    "flops_profiler": ({"enabled": False}, None),
    "data_types": (None,),
    "checkpoint": (None,),
    "compile": (None,),
    "managed_gradient_accumulation": (True,),
    "dataloader_drop_last": (False,),
    "seq_parallel_communication_data_type": (None,),
    "zero_optimization.zenflow": (None,),
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.compute_grad_norm": (True,),
    "zero_optimization.offload_optimizer.ratio": (1, 1.0),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "aio.use_gds": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "swapio.checksums": (False,),
    "swapio.tuned": (None,),
    "swapio.optimizer_state_dtype": ("fp32",),
}
"""Known, but only these values, which mean off, are accepted so far."""

DEPRECATED: dict[str, tuple[str, Any]] = {
    "bfloat16": ("bf16", None),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", {True: {"device": "cpu"}, False: None}),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param", {True: {"device": "cpu"}, False: None}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {True: {"device": "cpu"}, False: None}),
    "zero_optimization.cpu_offload_use_pin_memory": ("zero_optimization.offload_optimizer.pin_memory", None),
    "zero_optimization.prefetch_bucket_size": ("zero_optimization.stage3_prefetch_bucket_size", None),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": ("zero_optimization.stage3_gather_16bit_weights_on_model_save", None),
}
"""Old spelling -> the new one, and how values translate (None: as they are)."""
