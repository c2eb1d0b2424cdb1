"""DeepSpeed's own ZeRO checkpoints, as if they were ours.

[Note: DeepSpeed's files] Of each rank, `*_optim_states.pt` has fp32 masters and the optimizer's state, flat. Stages 1 and 2 lay all
parameters of a group in a row and cut that into equal parts, one per rank; stage 3 cuts each parameter, pads it, and lays a rank's parts in
a row, over all groups. `*_model_states.pt` has the order and shapes of the parameters, buffers, frozen weights (at stage 3 cut in the same
way) and counters. Files are mapped, so what is read is what is wanted. Without DeepSpeed its objects are read as bags of attributes.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import StorageError, UsageError
from ._names import ENGINE, key
from ._tensors import Stretch

__all__ = ["DeepSpeedStored", "is_deepspeed"]

_OURS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments", "lr_scheduler",
    "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples", "dp_world_size",
    "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version", "compression_state", "torch_rng_state",
}  # fmt: skip
"""What is DeepSpeed's in `*_model_states.pt`; the rest is the user's."""

_SETTINGS = "lr initial_lr betas eps weight_decay momentum dampening nesterov maximize amsgrad alpha centered lr_decay rho".split()


def is_deepspeed(path: Path) -> bool:
    """Whether a folder is a checkpoint of DeepSpeed's ZeRO."""
    return any(path.glob("*mp_rank_00_model_states.pt"))


class _Piece(NamedTuple):
    """Elements of a tensor from `start` on, contiguous."""

    start: int
    values: torch.Tensor  # [numel]


class DeepSpeedStored:
    """What such a folder holds; in the place of `Stored`. Objects are unpickled: load from folders that you trust.

    Raises:
        UsageError: a checkpoint that cannot be read: of tensor parallelism, of another stage.
        StorageError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pieces: dict[str, list[_Piece]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        models = [_load(p) for p in _by_rank(path.glob("*mp_rank_00_model_states.pt"))]
        optims = [_load(p)["optimizer_state_dict"] for p in _by_rank(path.glob("*zero_pp_rank_*_mp_rank_00_optim_states.pt"))]
        self._model = model = models[0]
        self._shared: dict[str, str] = model.get("shared_params") or {}
        stage = int(_value(optims[0]["zero_stage"])) if optims else 0
        if model.get("mp_world_size", 1) != 1:
            raise UsageError(f"{path} was saved by {model['mp_world_size']} ranks of model parallelism, which is not supported")
        if len(optims) != model["dp_world_size"] or (stage == 3 and len(models) != len(optims)):
            wanted = model["dp_world_size"]
            why = f"{len(optims)} of the {wanted} files *_optim_states.pt are there"
            raise StorageError("read", name="optim_states", path=str(path), offset=0, wanted=wanted, got=len(optims), why=why)
        self._optimizer: dict[str, Any] = optims[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
        if not isinstance(self._optimizer, dict):
            raise UsageError(f"{path} was saved with elastic_checkpoint, which is not supported; save it without")
        self._scaler = optims[0].get("loss_scaler")
        self._fields: list[str] = []
        self._num_updates: dict[str, int] = {}
        if stage == 3:
            self._add_stage3(models, optims)
        else:
            self._add_stage12(optims)
        self._add_module(stage)
        for name, pieces in self._pieces.items():
            found, wanted = sum(p.values.numel() for p in pieces), math.prod(self.shapes[name])
            if found != wanted:
                why = f"{found} of its {wanted} elements were stored"
                raise StorageError("read", name=name, path=str(path), offset=0, wanted=wanted, got=found, why=why)

    def get(self, name: str) -> Any:
        """What `save_checkpoint` of swapio would have stored under that name."""
        if name != ENGINE:
            return None
        model = self._model
        config = model.get("ds_config") or {}
        config = json.loads(Path(config).read_text()) if isinstance(config, str) else config
        steps = config.get("gradient_accumulation_steps", 1)
        groups = [{k: v for k, v in g.items() if k in _SETTINGS} for g in self._optimizer["param_groups"]]
        schedule = model.get("lr_scheduler")
        return {
            "client_state": {k: v for k, v in model.items() if k not in _OURS},
            "counters": {
                "global_steps": model["global_steps"],
                "global_samples": model["global_samples"],
                "skipped_steps": model["skipped_steps"],
                "micro_steps": model["global_steps"] * (steps if isinstance(steps, int) else 1),
            },
            "optimizer": {"fields": self._fields, "groups": groups, "num_updates": self._num_updates},
            "scheduler": None if schedule is None else {"type": (config.get("scheduler") or {}).get("type"), "state": schedule},
            "scaler": _scaler_state(self._scaler),
            "extra_state": {
                n.removesuffix("_extra_state").removesuffix("."): v
                for n, v in model["module"].items()
                if not isinstance(v, torch.Tensor) and n.rsplit(".", 1)[-1] == "_extra_state"
            },
            "left_out": [],
            "world_size": model["dp_world_size"],
        }

    def load(self, stretches: Sequence[Stretch]) -> None:
        """Read and `write` the stretches one after the other."""
        for stretch in stretches:
            if stretch.write is None:
                continue
            if stretch.stride == torch.empty(stretch.shape, device="meta").stride():
                values = self._read(stretch.name, stretch.start, stretch.stop, stretch.dtype)
            else:
                numel = math.prod(stretch.shape)
                whole = self._read(stretch.name, 0, numel, stretch.dtype).view(stretch.shape)
                values = torch.empty(numel, dtype=stretch.dtype)
                values.as_strided(stretch.shape, stretch.stride).copy_(whole)
                values = values[stretch.start : stretch.stop]
            stretch.write(values)

    def _read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.empty(stop - start, dtype=dtype)
        for piece in self._pieces[name]:
            first, last = max(start, piece.start), min(stop, piece.start + piece.values.numel())
            if first < last:
                values[first - start : last - start].copy_(piece.values[first - piece.start : last - piece.start])
        return values

    # --- what is where ---

    def _add(self, name: str, shape: tuple[int, ...], start: int, values: torch.Tensor) -> None:
        """A piece of a tensor; what lies beyond its end is padding."""
        self.shapes[name], self.dtypes[name] = shape, values.dtype
        pieces = self._pieces.setdefault(name, [])
        if start < math.prod(shape):
            pieces.append(_Piece(start, values[: math.prod(shape) - start]))

    def _add_trained(self, group: int, state: dict[str, Any], name: str, shape: tuple[int, ...], start: int, where: slice) -> None:
        """A piece of a master, and of what the optimizer keeps beside it: `where` of the flat tensors of a group of one rank."""
        self._add(key(name), shape, start, state["masters"][where])
        for field, values in state["fields"].items():
            self._add(key(name, field), shape, start, values[where])
        self._num_updates[name] = state["steps"]
        self._fields = sorted(state["fields"])

    def _add_stage12(self, optims: Sequence[dict[str, Any]]) -> None:
        for group, shapes in enumerate(self._model["param_shapes"]):
            starts = dict.fromkeys(shapes, 0)  # how much of each parameter the ranks before have
            begin = 0  # of the rank's part in the row of the group
            for optim in optims:
                masters = optim["single_partition_of_fp32_groups"][group]
                state = _group_state(masters, optim["base_optimizer_state"]["state"].get(group, {}))
                for name, numel, at in _fragments(optim, group, shapes, begin, masters.numel()):
                    self._add_trained(group, state, name, tuple(shapes[name]), starts[name], slice(at, at + numel))
                    starts[name] += numel
                begin += masters.numel()

    def _add_stage3(self, models: Sequence[dict[str, Any]], optims: Sequence[dict[str, Any]]) -> None:
        shapes = {name: tuple(shape) for group in self._model["param_shapes"] for name, shape in group.items()}
        for rank, optim in enumerate(optims):
            # parts do not cross from one flat tensor to the next
            parts = ((number, flat, 0) for number, flat in enumerate(optim["fp32_flat_groups"]))
            number, flat, at = next(parts, (0, torch.empty(0), 0))
            state = _group_state(flat, optim["optimizer_state_dict"]["state"].get(number, {}))
            for name, shape in shapes.items():
                each = -(-math.prod(shape) // len(optims))
                if at + each > flat.numel():
                    number, flat, at = next(parts, (0, torch.empty(0), 0))
                    state = _group_state(flat, optim["optimizer_state_dict"]["state"].get(number, {}))
                self._add_trained(number, state, name, shape, rank * each, slice(at, at + each))
                at += each
        for name, shape in (self._model.get("frozen_param_shapes") or {}).items():
            each = -(-math.prod(shape) // len(models))
            for rank, model in enumerate(models):
                self._add(key(name), tuple(shape), rank * each, model["frozen_param_fragments"][name].view(-1))

    def _add_module(self, stage: int) -> None:
        """Buffers, and what is whole of the rest."""
        buffers = set(self._model["buffer_names"])
        for name, tensor in self._model["module"].items():
            whole = stage < 3 or name in buffers
            if isinstance(tensor, torch.Tensor) and whole and name not in self._shared and key(name) not in self.shapes and tensor.numel():
                self._add(key(name), tuple(tensor.shape), 0, tensor.contiguous().view(-1))


def _fragments(optim: dict[str, Any], group: int, shapes: dict[str, Any], begin: int, numel: int) -> Iterator[tuple[str, int, int]]:
    """What a rank has of the parameters of a group: name, elements, and the first of them in its part."""
    mappings = optim.get("param_slice_mappings")
    if mappings is not None:
        for name, fragment in mappings[group].items():
            yield name, _value(fragment, "numel", 0), _value(fragment, "start", 1)
        return
    start = 0  # of the parameter in the row
    for name, shape in shapes.items():
        stop = start + math.prod(shape)
        first, last = max(start, begin), min(stop, begin + numel)
        if first < last:
            yield name, last - first, first - begin
        start = stop


def _group_state(masters: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    # they may lack the padding at the end that the masters have
    fields = {n: v for n, v in state.items() if isinstance(v, torch.Tensor) and v.dim() == 1 and n != "step"}
    return {"masters": masters.view(-1), "fields": fields, "steps": int(state.get("step", 0))}


def _scaler_state(scaler: Any) -> dict[str, Any] | None:
    if scaler is None or not getattr(scaler, "dynamic", False):
        return None
    since = scaler.cur_iter - scaler.last_overflow_iter - 1  # steps without an overflow
    return {"scale": float(scaler.cur_scale), "patience": int(scaler.cur_hysteresis), "stable_steps": max(since, 0)}


def _by_rank(paths: Iterator[Path]) -> list[Path]:
    def rank(path: Path) -> int:
        found = re.search(r"zero_pp_rank_(\d+)_", path.name)
        return int(found[1]) if found else 0

    return sorted(paths, key=rank)


class _Object:
    """In the place of an object of DeepSpeed: what it was made of."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def _value(found: Any, name: str = "value", index: int = 0) -> int:
    """A number, or one that an object of DeepSpeed has."""
    if isinstance(found, _Object):
        return int(found.__dict__[name] if name in found.__dict__ else found.args[index])
    return int(getattr(found, name, found))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] == "deepspeed":
            return type(name, (_Object,), {})
        return super().find_class(module, name)


class _Pickle:
    """What `torch.load` wants of the module `pickle`."""

    Unpickler = _Unpickler
    load: Callable[..., Any] = staticmethod(pickle.load)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_Pickle)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        nbytes = path.stat().st_size
        why = f"it is damaged: {type(error).__name__}: {str(error).splitlines()[0]}"
        raise StorageError("read", name=path.name, path=str(path), offset=0, wanted=nbytes, got=0, why=why) from error
