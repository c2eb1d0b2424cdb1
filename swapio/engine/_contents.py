"""What is in a checkpoint, and under which names: they do not depend on where anything lay."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..checkpoint import Stretch, key
from ..zero import PortableState, Portion

if TYPE_CHECKING:
    from ._engine import Engine

__all__ = [
    "buffer_stretch", "buffers", "engine_object", "entries", "model_config", "random_state", "set_random_state", "stretch", "ties",
    "with_extra_state",
]  # fmt: skip


def engine_object(engine: Engine, state: PortableState, client_state: Mapping[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Everything of ours that is no tensor, and what an export must know of those."""
    return {
        "client_keys": sorted(map(str, client_state)),
        "counters": _counters(engine),
        "optimizer": _optimizer_state(engine, state),
        "scheduler": _scheduler_state(engine),
        "scaler": engine._scaler.state_dict() if engine._scaler is not None else None,
        "extra_state": {name: module.get_extra_state() for name, module in with_extra_state(engine.module)},
        "left_out": sorted(left_out),
        "world_size": engine.world_size,
        "entries": entries(engine.module),
        "ties": ties(engine.module),
        "model_config": model_config(engine.module),
    }


def entries(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Of each tensor of the module's `state_dict`, once: its shape, dtype, and whether it is trained."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    passing = _passing(module)
    found |= {n: b for n, b in module.named_buffers() if n not in passing}
    return {n: {"shape": tuple(t.shape), "dtype": t.dtype, "trained": t.requires_grad} for n, t in found.items()}


def ties(module: nn.Module) -> dict[str, str]:
    """The other names of tensors that the module has under several, with the first one of each."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)):
        if first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def model_config(module: nn.Module) -> str | None:
    """The text of `config.json`, of a model that `transformers` loads by it."""
    config: Any = getattr(module, "config", None)
    if not callable(getattr(config, "to_json_string", None)) or not callable(getattr(config, "save_pretrained", None)):
        return None
    content = json.loads(config.to_json_string(use_diff=False))
    content["architectures"] = content.get("architectures") or [type(module).__name__]
    return json.dumps(content, indent=2)


def stretch(portion: Portion, *, read: PortableState | None = None, write: PortableState | None = None) -> Stretch:
    return Stretch(
        key(portion.name, portion.field), portion.dtype, portion.slot.shape, portion.slot.stride, portion.start, portion.stop,
        read=functools.partial(read.read, portion) if read is not None else None,
        write=functools.partial(write.write, portion) if write is not None else None,
    )  # fmt: skip


def buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent ones with elements."""
    passing = _passing(module)
    return ((n, b) for n, b in module.named_buffers() if n not in passing and b.numel())


def _passing(module: nn.Module) -> set[str]:
    return {f"{p}.{n}" if p else n for p, m in module.named_modules() for n in m._non_persistent_buffers_set}


def buffer_stretch(name: str, buffer: torch.Tensor) -> Stretch:
    shape = tuple(buffer.shape)
    stride = torch.empty(shape, device="meta").stride()

    def write(values: torch.Tensor) -> None:
        with torch.no_grad():
            once = tuple(slice(0, 1) if s == 0 else slice(None) for s in buffer.stride())  # an expanded one has its values once
            buffer[once].copy_(values.view(shape)[once])

    return Stretch(
        key(name), buffer.dtype, shape, stride, 0, buffer.numel(),
        read=lambda: buffer.detach().cpu().contiguous().view(-1), write=write,
    )  # fmt: skip


def with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child


def _counters(engine: Engine) -> dict[str, int]:
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps - engine.micro_steps % engine.gradient_accumulation_steps(),  # gradients so far are not saved
    }


def _optimizer_state(engine: Engine, state: PortableState) -> dict[str, Any] | None:
    if engine.optimizer is None or engine._stepper is None:
        return None
    counts = engine._stepper.num_updates
    return {
        "fields": list(state.fields),
        "state_dtype": engine._stepper.spec.state_dtype,
        "groups": [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in engine.optimizer.param_groups],
        "members": {name: unit.groups[slot.index] for unit, slot, name in state.params() if slot.trained},  # the group of each
        "num_updates": {name: counts[unit][slot.index] for unit, slot, name in state.params() if slot.trained},
    }


def _scheduler_state(engine: Engine) -> dict[str, Any] | None:
    if engine.lr_scheduler is None:
        return None
    return {"type": type(engine.lr_scheduler).__name__, "state": engine.lr_scheduler.state_dict()}


def random_state(device: torch.device) -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
