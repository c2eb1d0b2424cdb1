from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pydantic
import pytest
import torch

from swapio.config import load_config
from swapio.errors import ConfigError, SwapioError


def test_nothing_given_is_complete() -> None:
    loaded = load_config({})
    assert (loaded.train_batch_size, loaded.gradient_clipping, loaded.bf16.enabled, loaded.optimizer) == (1, 0.0, False, None)
    assert loaded.zero_optimization.offload_param.device == loaded.zero_optimization.offload_optimizer.device == "none"
    assert (loaded.swapio.host_memory, loaded.swapio.timeout_s) == ("auto", 300.0)
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.accepted_without_effect == {}
    assert "gradient_clipping is off" in loaded.notes[0]


def test_a_tutorials_config_loads() -> None:
    given = {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 5e8,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
    kept = copy.deepcopy(given)
    loaded = load_config(given)
    assert given == kept
    assert loaded.train_micro_batch_size_per_gpu == 8
    assert loaded.zero_optimization.offload_optimizer.paths == ["/local_nvme"]
    assert "fp32, in the order of the ranks" in loaded.accepted_without_effect["zero_optimization.overlap_comm"]
    assert loaded.sources["train_batch_size"] == loaded.sources["zero_optimization.overlap_comm"] == "given"
    assert loaded.sources["train_micro_batch_size_per_gpu"] == "inferred from train_batch_size and the world size"
    assert loaded.resolved()["zero_optimization"]["offload_param"] == {"device": "cpu", "nvme_path": [], "pin_memory": True}


DEEPSPEED_DEFAULTS: dict[str, Any] = {
    "train_batch_size": 1, "train_micro_batch_size_per_gpu": None, "gradient_accumulation_steps": "auto",
    "managed_gradient_accumulation": True, "steps_per_print": None, "prescale_gradients": False,
    "gradient_predivide_factor": 1.0, "gradient_allreduce_op": "mean", "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32", "zero_allow_untested_optimizer": False, "zero_force_ds_cpu_optimizer": True,
    "wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False, "disable_python_gc": False,
    "dataloader_drop_last": False,
    "fp16": {
        "enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2,
        "consecutive_hysteresis": False, "min_loss_scale": 1, "fp16_master_weights_and_grads": False,
    },
    "bf16": {
        "enabled": False, "immediate_grad_update": False, "check_grad_overflow": True, "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    },
    "torch_autocast": {"enabled": False, "dtype": None, "lower_precision_safe_modules": None},
    "data_types": {"grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None, "keep_in_fp32_modules": "auto"},
    "optimizer": {"type": "AdamW", "params": {}, "legacy_fusion": False}, "scheduler": {"type": None, "params": None},
    "activation_checkpointing": {
        "partition_activations": False, "contiguous_memory_optimization": False, "cpu_checkpointing": False, "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False, "profile": False,
    },
    "checkpoint": {
        "tag_validation": "WARN", "load_universal": False, "use_node_local_storage": False,
        "parallel_write": {"pipeline_stage": False}, "checkpoint_serialization": True, "writer": None,
    },
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "wandb": {"enabled": False, "project": "deepspeed"}, "csv_monitor": {"enabled": False}, "comet": {"enabled": False},
    "compile": {"deepcompile": False, "offload_activation": False, "double_buffer": True},
    "aio": {
        "queue_depth": 8, "block_size": 1048576, "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True,
        "use_gds": False,
    },
    "zero_optimization": {
        "stage": 0, "contiguous_gradients": True, "reduce_scatter": True, "reduce_bucket_size": 5e8,
        "use_multi_rank_bucket_allreduce": True, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": None,
        "compute_grad_norm": True,
        "load_from_fp32_weights": True, "elastic_checkpoint": False, "zenflow": None, "sub_group_size": 1e9,
        "stage3_prefetch_bucket_size": 5e7, "stage3_param_persistence_threshold": 1e5, "stage3_model_persistence_threshold": 2**63 - 1,
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0, "stage3_use_all_reduce_for_fetch_params": False, "stage3_allgather_sequential": False,
        "ignore_unused_parameters": True, "legacy_stage1": False, "round_robin_gradients": False, "parameter_alignment": False,
        "zero_hpz_partition_size": 1, "zero_quantized_weights": False, "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False, "memory_efficient_linear": True, "pipeline_loading_checkpoint": False,
        "override_module_apply": True, "log_trace_cache_warnings": False, "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False, "leaf_module": {"classes": [], "names": [], "name_suffixes": []},
        "mics_shard_size": -1, "mics_hierarchical_params_gather": False, "zeropp_loco_param": None,
        "cpu_offload": None, "cpu_offload_param": None, "cpu_offload_use_pin_memory": None,
        "offload_param": {
            "device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9, "pin_memory": True,
        },
        "offload_optimizer": {
            "device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True, "pipeline_read": False, "pipeline_write": False,
            "fast_init": False, "ratio": 1.0, "super_offload": False, "cpuadam_cores_perc": 0.8,
        },
    },
}  # fmt: skip


def test_deepspeeds_defaults_written_out_load() -> None:
    loaded = load_config(DEEPSPEED_DEFAULTS | {"gradient_clipping": 1.0})
    assert loaded.gradient_clipping == 1.0
    assert loaded.scheduler is None
    resolved = loaded.resolved()
    assert resolved["fp16"]["loss_scale_window"] == 1000
    assert resolved["aio"]["overlap_events"] is True
    assert loaded.sources["aio.queue_depth"] == "given"
    assert loaded.sources["aio.overlap_events"] == "given"
    assert json.loads(json.dumps(resolved)) == resolved
    assert load_config(resolved).resolved() == resolved


@pytest.mark.parametrize(
    ("config", "key", "says"),
    [
        ({"zero_optimisation": {}}, "zero_optimisation", "'zero_optimization'"),
        ({"offload_param": {}}, "offload_param", "'zero_optimization.offload_param'"),
        ({"zero_optimization": {"stagee": 3}}, "zero_optimization.stagee", "'zero_optimization.stage'"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage", "4"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage", "True"),
        ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage", "'3'"),
        ({"zero_optimization": True}, "zero_optimization", "no section"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "zero_optimization.offload_param", '{"device": "none"}'),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.nvme_path",
            '"nvme_path": "/mnt/nvme0"',
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": []}}},
            "zero_optimization.offload_param.nvme_path",
            "nvme0",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": ""}}},
            "zero_optimization.offload_param.nvme_path",
            "nvme0",
        ),
        ({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": 3}}}, "zero_optimization.offload_param.nvme_path", "3"),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, "zero_optimization.offload_param.device", "'nvme'"),
        ({"zero_optimization": {"cpu_offload": "yes"}}, "zero_optimization.cpu_offload", "offload_optimizer"),
        ({"zero_optimization": {"cpu_offload": []}}, "zero_optimization.cpu_offload", "neither true nor false"),
        ({"zero_optimization.stage": 3}, "zero_optimization.stage", "nest"),
        ({3: 3}, "3", "unknown key"),
        ({"swapio": {"host_memry": 1}}, "swapio.host_memry", "'swapio.host_memory'"),
        ({"swapio": {"host_memory": True}}, "swapio.host_memory", "1GiB"),
        ({"swapio": {"host_memory": "much"}}, "swapio.host_memory", "1GiB"),
        ({"swapio": {"device_memory": -1}}, "swapio.device_memory", "-1"),
        ({"swapio": {"timeout_s": 0}}, "swapio.timeout_s", "0"),
        ({"swapio": {"timeout_s": float("nan")}}, "swapio.timeout_s", "nan"),
        ({"swapio": {"timeout_s": float("inf")}}, "swapio.timeout_s", "inf"),
        ({"swapio": {"backend": "floppy"}}, "swapio.backend", "mmap"),
        ({"swapio": {"backend": "raid"}}, "swapio.backend", "'direct'"),
        ({"swapio": {"units": 3}}, "swapio.units", "3"),
        ({"swapio": {"units": [3]}}, "swapio.units", "3"),
        ({"gradient_clipping": -1.0}, "gradient_clipping", "-1.0"),
        ({"gradient_clipping": True}, "gradient_clipping", "True"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op", 'multiply the loss by the number of ranks.; .* use "mean"'),
        ({"steps_per_print": 0}, "steps_per_print", "0"),
        ({"steps_per_print": 2.5}, "steps_per_print", "2.5"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype", "'fp32' .got 'bf16'"),
        ({"activation_checkpointing": {"number_checkpoints": 0}}, "activation_checkpointing.number_checkpoints", "0"),
        ({"csv_monitor": {"enabled": True, "output_path": 3}}, "csv_monitor.output_path", "3"),
        ({"csv_monitor": {"job": "x"}}, "csv_monitor.job", "'csv_monitor.job_name'"),
        ({"tensorboard": True}, "tensorboard", '{"enabled": false}'),
        ({"wandb": {"enabled": True}}, "wandb", "use csv_monitor or tensorboard"),
        ({"bf16": {"enabled": 1}}, "bf16.enabled", "1"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled", "bf16.enabled is true too"),
        ({"fp16": {"enabled": True}, "bfloat16": {"enabled": True}}, "fp16.enabled", "bf16.enabled is true too"),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale", "-1"),
        ({"fp16": {"hysteresis": 0}}, "fp16.hysteresis", "0"),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window", "0"),
        ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale", "0"),
        (
            {"fp16": {"initial_scale_power": 3, "min_loss_scale": 9}},
            "fp16.min_loss_scale",
            r"9.0 is above the scale at the start, 2..3 = 8",
        ),
        ({"fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads", "masters are fp32"),
        ({"aio": {"block_size": 1000}}, "aio.block_size", "4096"),
        ({"aio": {"use_gds": True}}, "aio.use_gds", "not supported .bytes pass"),
        ({"train_batch_size": "8"}, "train_batch_size", "whole number"),
        ({"train_batch_size": True}, "train_batch_size", "whole number"),
        ({"train_batch_size": 0}, "train_batch_size", "1 or more"),
    ],
)
def test_errors_name_the_key(config: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(config)
    assert str(caught.value).startswith(f"{key}:")
    assert caught.value.key == key
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, SwapioError)


def test_off_values_are_accepted_and_listed() -> None:
    loaded = load_config({"gradient_clipping": 0, "fp16": {"enabled": False, "loss_scale": 0}, "wandb": {"enabled": False, "project": "x"}})
    assert loaded.accepted_without_effect == {"fp16.loss_scale": "fp16.enabled is false", "wandb": "it is off"}
    assert loaded.notes == ()
    assert loaded.sources["gradient_clipping"] == loaded.sources["fp16.loss_scale"] == "given"


@pytest.mark.parametrize(("given", "interval"), [(100, 100), (1e5, 100_000), (float("inf"), None), (None, None), ("auto", None)])
def test_steps_per_print_is_written_in_many_ways(given: Any, interval: int | None) -> None:
    assert load_config({"steps_per_print": given}).steps_per_print == interval
    assert isinstance(load_config({"steps_per_print": given}).steps_per_print, int | None)


def test_what_is_honoured_is_there() -> None:
    given = {
        "fp16": {"enabled": True, "loss_scale": 128, "auto_cast": True, "min_loss_scale": 0.25},
        "csv_monitor": {"enabled": True, "output_path": Path("logs"), "job_name": "run"},
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4, "partition_activations": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "dataloader_drop_last": True,
    }
    loaded = load_config(given)
    assert (loaded.fp16.loss_scale, loaded.fp16.auto_cast, loaded.fp16.min_loss_scale, loaded.fp16.hysteresis) == (128.0, True, 0.25, 2)
    assert (loaded.csv_monitor.output_path, loaded.csv_monitor.job_name, loaded.tensorboard.enabled) == ("logs", "run", False)
    assert (loaded.activation_checkpointing.cpu_checkpointing, loaded.activation_checkpointing.number_checkpoints) == (True, 4)
    assert (loaded.data_types.grad_accum_dtype, loaded.dataloader_drop_last) == ("fp32", True)
    assert list(loaded.accepted_without_effect) == ["activation_checkpointing.partition_activations"]
    assert load_config(loaded.resolved()).resolved() == loaded.resolved()


def test_describe_has_every_value_and_its_source() -> None:
    given = {
        "train_batch_size": 8,
        "bfloat16": {"enabled": True},
        "dump_state": Path("x"),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
    }
    loaded = load_config(given, world_size=2, world_size_source="WORLD_SIZE")
    lines = loaded.describe().splitlines()
    assert lines[0].split() == ["world", "size", "=", "2", "(WORLD_SIZE)"]
    assert len(lines) == len(loaded.sources) + 1
    assert len({line.index(" = ") for line in lines}) == 1
    found = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in lines}
    assert re.fullmatch(r"4 +\(inferred from train_batch_size and the world size\)", found["train_micro_batch_size_per_gpu"])
    assert re.fullmatch(r"true +\(deprecated spelling bfloat16\)", found["bf16.enabled"])
    assert re.fullmatch(r'"x" +\(given; no effect: engine.config.describe\(\) has it\)', found["dump_state"])
    assert re.fullmatch(r"0\.5 +\(given\)", found["optimizer.params.lr"])
    assert re.fullmatch(r'"auto" +\(default\)', found["swapio.host_memory"])
    assert re.fullmatch(r"null +\(default\)", found["scheduler"])


def test_sizes_and_paths_become_plain_values(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": tmp_path}
    loaded = load_config(
        {"swapio": {"host_memory": "1.5GiB", "device_memory": "auto"}, "zero_optimization": {"stage": 3, "offload_param": offload}}
    )
    assert loaded.swapio.host_memory == 3 * 2**29
    assert loaded.swapio.device_memory is None
    assert loaded.zero_optimization.offload_param.nvme_path == (os.fspath(tmp_path),)
    both = load_config({"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": [str(tmp_path), "/b"]}}})
    assert both.zero_optimization.offload_param.paths == [str(tmp_path), "/b"]


def test_a_path_that_is_not_used_is_listed() -> None:
    loaded = load_config({"zero_optimization": {"offload_param": {"device": "cpu", "nvme_path": "/x"}}})
    assert loaded.accepted_without_effect == {"zero_optimization.offload_param.nvme_path": 'the device is "cpu"'}


@pytest.mark.parametrize(
    ("given", "kind", "params"),
    [
        ({"type": "AdamW"}, "AdamW", {}),
        ({"type": "adamw", "params": {"lr": 1, "adam_w_mode": False}}, "AdamW", {"lr": 1.0}),
        ({"type": "Adam", "params": {"lr": "auto", "betas": [0.8, 0.9]}}, "AdamW", {"betas": (0.8, 0.9)}),
        ({"type": "Adam", "params": {"adam_w_mode": False, "fused": True}}, "Adam", {"adam_w_mode": False}),
    ],
)
def test_adam(given: dict[str, Any], kind: str, params: dict[str, Any]) -> None:
    defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
    loaded = load_config({"optimizer": given})
    assert loaded.optimizer is not None
    assert (loaded.optimizer.type, loaded.optimizer.params) == (kind, defaults | params)
    assert load_config(loaded.resolved()).optimizer == loaded.optimizer
    assert any("is AdamW" in note for note in loaded.notes) == (given["type"] == "Adam" and kind == "AdamW")
    assert ("optimizer.params.adam_w_mode" in loaded.accepted_without_effect) == (given["type"] == "adamw")


def test_sgd() -> None:
    loaded = load_config({"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}})
    assert loaded.optimizer is not None
    assert loaded.optimizer.params == {
        "lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False,
    }  # fmt: skip
    assert loaded.sources["optimizer.params.momentum"] == "given"
    assert loaded.sources["optimizer.params.nesterov"] == "default"


@pytest.mark.parametrize("name", ["Adagrad", "RMSprop", "Adadelta", "Adamax", "RAdam"])
def test_types_with_the_defaults_of_pytorch(name: str) -> None:
    loaded = load_config({"optimizer": {"type": name.upper()}})
    assert loaded.optimizer is not None
    assert loaded.optimizer.type == name
    defaults = getattr(torch.optim, name)([torch.zeros(1)]).defaults
    assert loaded.optimizer.params == {key: defaults[key] for key in loaded.optimizer.params}
    assert set(defaults) - set(loaded.optimizer.params) <= {
        "initial_accumulator_value", "foreach", "fused", "capturable", "differentiable",
    }  # fmt: skip
    given = load_config({"optimizer": {"type": name, "params": {"lr": 0.5, "foreach": True}}}).optimizer
    assert given is not None
    assert given.params == loaded.optimizer.params | {"lr": 0.5}


@pytest.mark.parametrize(
    ("optimizer", "key", "says"),
    [
        ({"typ": "AdamW"}, "optimizer.typ", "'optimizer.type'"),
        ({}, "optimizer.type", "missing"),
        ({"params": {"lr": 1.0}}, "optimizer.type", "missing"),
        ({"type": "Lion"}, "optimizer.type", "'Lion' is not supported yet"),
        ({"type": "AdmW"}, "optimizer.type", "'AdmW' .*; did you mean \"AdamW\"; use one of"),
        ({"type": 3}, "optimizer.type", "3"),
        ({"type": "AdamW", "params": {"weight_deacy": 0.1}}, "optimizer.params.weight_deacy", "'optimizer.params.weight_decay'"),
        ({"type": "AdamW", "params": {"learning_rate": 0.1}}, "optimizer.params.learning_rate", "did you mean 'optimizer.params.lr'"),
        ({"type": "AdamW", "params": {"momentum": 0.9}}, "optimizer.params.momentum", "it has lr, weight_decay, maximize, betas"),
        ({"type": "SGD", "params": {"betas": [0.9, 0.9]}}, "optimizer.params.betas", "it has lr, .*, momentum"),
        ({"type": "AdamW", "params": {"lr": "1e-3"}}, "optimizer.params.lr", "'1e-3'"),
        ({"type": "AdamW", "params": {"lr": -1.0}}, "optimizer.params.lr", "-1.0"),
        ({"type": "AdamW", "params": {"betas": [0.9]}}, "optimizer.params.betas", "required"),
        ({"type": "AdamW", "params": {"betas": [0.9, 1.0]}}, "optimizer.params.betas", "less than 1"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1.0}}, "optimizer.params.max_grad_norm", "gradient_clipping"),
        ({"type": "AdamW", "params": {"bias_correction": False}}, "optimizer.params.bias_correction", "use true"),
        (
            {"type": "Adagrad", "params": {"initial_accumulator_value": 0.1}},
            "optimizer.params.initial_accumulator_value",
            "starts as zeros",
        ),
        ({"type": "RMSprop", "params": {"betas": [0.9, 0.9]}}, "optimizer.params.betas", "it has lr, .*, alpha, eps, momentum, centered"),
        ({"type": "NAdam"}, "optimizer.type", "'NAdam' is not supported: it multiplies up"),
        ({"type": "AdamW", "params": [1]}, "optimizer.params", "no section"),
    ],
)
def test_optimizer_errors(optimizer: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        load_config({"optimizer": optimizer})
    assert caught.value.key == key


def test_old_spellings_map() -> None:
    loaded = load_config({"bfloat16": {"enabled": True}, "zero_optimization": {"cpu_offload": True, "prefetch_bucket_size": 5}})
    assert loaded.bf16.enabled
    assert loaded.zero_optimization.offload_optimizer.device == "cpu"
    assert loaded.sources["zero_optimization.offload_optimizer.device"] == "deprecated spelling zero_optimization.cpu_offload"
    assert loaded.sources["bf16.enabled"] == "deprecated spelling bfloat16"
    assert "zero_optimization.stage3_prefetch_bucket_size" in loaded.accepted_without_effect
    assert loaded.notes[0] == "bfloat16 is a deprecated spelling of bf16"
    with pytest.raises(ConfigError, match="given too"):
        load_config({"bfloat16": {}, "bf16": {}})
    pinned = load_config({"zero_optimization": {"offload_optimizer": None, "cpu_offload_use_pin_memory": True}})
    assert list(pinned.accepted_without_effect) == ["zero_optimization.offload_optimizer.pin_memory"]


def test_json(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"train_batch_size": 4, "bf16": {"enabled": "auto"}}))
    assert load_config(path).train_batch_size == load_config(str(path)).train_batch_size == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": 1,\n "b" 2}', r"c\.json, line 2, column 6"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "c.json has the key 'enabled' twice"),
        ("[1]", "holds a list"),
        ('{"zero_optimization.stage": 3}', "nest"),
        ("", "line 1"),
        (b"\xff", "cannot be read"),
        (None, "No such file"),
    ],
)
def test_json_errors_name_the_file(tmp_path: Path, text: str | bytes | None, says: str) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=says):
        load_config(path)


def test_neither_dict_nor_path() -> None:
    with pytest.raises(ConfigError, match="list is neither"):
        load_config([])  # type: ignore[arg-type]


def test_a_loaded_config_does_not_change() -> None:
    loaded = load_config({})
    with pytest.raises(pydantic.ValidationError):
        loaded.train_batch_size = 2
    loaded.sources.clear()
    loaded.resolved()["swapio"].clear()
    assert loaded.sources
    assert loaded.resolved()["swapio"]
