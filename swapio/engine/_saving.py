"""`save_checkpoint` and `load_checkpoint`: all that training goes on from, under names that do not depend on where it lay."""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import nn

from ..checkpoint import (
    FileSum,
    Stored,
    Stretch,
    check_tag,
    find,
    latest_tag,
    leftovers,
    load_stretches,
    publish,
    set_latest,
    sum_of,
    tags,
    temporary_folder,
    verify,
    write_stretches,
)
from ..errors import UsageError
from ..zero import PortableState, Portion, Ranks, Unit

if TYPE_CHECKING:
    from ._engine import Engine

__all__ = ["load_checkpoint", "save_checkpoint"]

logger = logging.getLogger("swapio")

_ENGINE = "engine"  # name of the object with everything that is no tensor
_RANDOM = "random"  # and of those with the random state of each rank


def save_checkpoint(
    engine: Engine, save_dir: Any, tag: Any, client_state: Mapping[str, Any], save_latest: bool, exclude_frozen_parameters: bool
) -> None:
    """See `Engine.save_checkpoint`."""
    directory, ranks = Path(save_dir), engine.zero.ranks
    with ranks.together("saving a checkpoint"):
        tag = check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
        if ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            _report_leftovers(directory)
    final, temporary = directory / tag, temporary_folder(directory, tag, _same_token(ranks, tag))
    try:
        with PortableState(engine.zero) as state:
            with ranks.together("saving a checkpoint"):
                state.settle()
                stretches, objects = _what_to_save(engine, state, client_state, exclude_frozen_parameters)
            own = write_stretches(temporary, stretches, objects, group=ranks.group)
        sums = [FileSum(*t.tolist()) for t in ranks.all_gather(_as_tensor(own), what="saving a checkpoint")]
        with ranks.together("saving a checkpoint"):
            if ranks.rank == 0:
                files = {f"__{rank}_0.distcp": FileSum(s.nbytes, s.xxh3_64 % (1 << 64)) for rank, s in enumerate(sums)}
                publish(temporary, final, files | {".metadata": sum_of(temporary / ".metadata")})
                if save_latest:
                    set_latest(directory, tag)
    except BaseException:
        if ranks.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    logger.info("saved %s", final)


def _as_tensor(own: FileSum) -> torch.Tensor:
    return torch.tensor([own.nbytes, own.xxh3_64 - (1 << 64) if own.xxh3_64 >> 63 else own.xxh3_64])


def _same_token(ranks: Ranks, tag: str) -> int:
    """Rank 0's random number."""
    mine = torch.tensor([secrets.randbits(32), xxhash.xxh3_64_intdigest(tag.encode()) >> 1])
    told = [t.tolist() for t in ranks.all_gather(mine, what="saving a checkpoint")]
    if any(digest != told[0][1] for _, digest in told):
        raise UsageError(f"save_checkpoint: the ranks give different tags, this one {tag!r}; all of them must give the same")
    return int(told[0][0])


def _report_leftovers(directory: Path) -> None:
    if found := leftovers(directory):
        logger.warning("%s holds what saves that did not end have left, which is skipped; delete it: %s", directory, ", ".join(found))


# --- what is in a checkpoint ---


def _what_to_save(
    engine: Engine, state: PortableState, client_state: Mapping[str, Any], exclude_frozen: bool
) -> tuple[list[Stretch], dict[str, Any]]:
    if engine._backwards:
        logger.warning("a checkpoint is saved between backward and step: the gradients so far are not in it")
    left_out = {n for u, s, n in state.params() if exclude_frozen and not u.params[s.index].requires_grad and not s.trained}
    stretches = [_stretch(p, read=state) for p in state.owned() if p.name not in left_out]
    rank = engine.global_rank
    objects: dict[str, Any] = {f"{_RANDOM}.{rank}": _random_state(engine.device)}
    if rank == 0:
        stretches += [_buffer_stretch(name, buffer) for name, buffer in _buffers(engine.module)]
        objects[_ENGINE] = {
            "client_state": dict(client_state),
            "counters": _counters(engine),
            "optimizer": _optimizer_state(engine, state),
            "scheduler": _scheduler_state(engine),
            "scaler": engine._scaler.state_dict() if engine._scaler is not None else None,
            "extra_state": {name: module.get_extra_state() for name, module in _with_extra_state(engine.module)},
            "left_out": sorted(left_out),
            "world_size": engine.world_size,
        }
    return stretches, objects


def _stretch(portion: Portion, *, read: PortableState | None = None, write: PortableState | None = None) -> Stretch:
    return Stretch(
        _key(portion.name, portion.field), portion.dtype, portion.slot.shape, portion.slot.stride, portion.start, portion.stop,
        read=functools.partial(read.read, portion) if read is not None else None,
        write=functools.partial(write.write, portion) if write is not None else None,
    )  # fmt: skip


def _key(name: str, field: str | None = None) -> str:
    return f"module.{name}" if field is None else f"optimizer.{field}.{name}"


def _buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent ones with elements."""
    passing = {f"{p}.{n}" if p else n for p, m in module.named_modules() for n in m._non_persistent_buffers_set}
    return ((n, b) for n, b in module.named_buffers() if n not in passing and b.numel())


def _buffer_stretch(name: str, buffer: torch.Tensor) -> Stretch:
    shape = tuple(buffer.shape)
    stride = torch.empty(shape, device="meta").stride()

    def write(values: torch.Tensor) -> None:
        with torch.no_grad():
            buffer.copy_(values.view(shape))

    return Stretch(
        _key(name), buffer.dtype, shape, stride, 0, buffer.numel(),
        read=lambda: buffer.detach().cpu().contiguous().view(-1), write=write,
    )  # fmt: skip


def _with_extra_state(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_modules():
        if type(child).get_extra_state is not nn.Module.get_extra_state:
            yield name, child


def _counters(engine: Engine) -> dict[str, int]:
    return {
        "global_steps": engine.global_steps,
        "global_samples": engine.global_samples,
        "skipped_steps": engine.skipped_steps,
        "micro_steps": engine.micro_steps,
    }


def _optimizer_state(engine: Engine, state: PortableState) -> dict[str, Any] | None:
    if engine.optimizer is None or engine._stepper is None:
        return None
    counts = engine._stepper.num_updates
    return {
        "fields": list(state.fields),
        "state_dtype": engine._stepper.spec.state_dtype,
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups],
        "num_updates": {name: counts[unit][slot.index] for unit, slot, name in state.params() if slot.trained},
    }


def _scheduler_state(engine: Engine) -> dict[str, Any] | None:
    if engine.lr_scheduler is None:
        return None
    return {"type": type(engine.lr_scheduler).__name__, "state": engine.lr_scheduler.state_dict()}


def _random_state(device: torch.device) -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# --- loading ---


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """What `load_checkpoint` was told to load."""

    strict: bool
    optimizer: bool
    scheduler: bool
    module_only: bool


def load_checkpoint(
    engine: Engine,
    load_dir: Any,
    tag: Any,
    load_module_strict: bool,
    load_optimizer_states: bool,
    load_lr_scheduler_states: bool,
    load_module_only: bool,
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    directory, ranks = Path(load_dir), engine.zero.ranks
    wanted = _Wanted(
        strict=load_module_strict,
        optimizer=load_optimizer_states and not load_module_only and engine.optimizer is not None,
        scheduler=load_lr_scheduler_states and not load_module_only and engine.lr_scheduler is not None,
        module_only=load_module_only,
    )
    with ranks.together("looking for a checkpoint"):
        if ranks.rank == 0:
            _report_leftovers(directory)
        tag = latest_tag(directory) if tag is None else str(tag)
        path = find(directory, tag) if tag is not None else None
    if path is None:
        there = ", ".join(map(repr, tags(directory))) or "none"
        logger.warning("nothing is loaded: %s has no file 'latest', and no tag was given; checkpoints there: %s", directory, there)
        return None, None
    with ranks.together(f"checking {path}"):
        verify(path, share=ranks.rank, num_shares=ranks.size)
    with PortableState(engine.zero) as state:
        with ranks.together(f"reading {path}"):
            state.settle()
            loading = _Loading(engine, state, Stored(path), wanted)
        with ranks.together(f"loading settings from {path}"):
            loading.apply_settings()
        engine._zero_grad()
        try:
            with ranks.together(f"loading {path}"):
                loading.apply()
        except BaseException:
            engine._failed = True  # weights of two kinds: not to be given back
            raise
        engine.zero.refresh_views()
    logger.info("loaded %s", path)
    return str(path), loading.objects["client_state"]


class _Loading:
    """A checkpoint that fits the engine; nothing of the engine is changed before `apply`.

    Raises:
        UsageError: it does not fit.
    """

    def __init__(self, engine: Engine, state: PortableState, stored: Stored, wanted: _Wanted) -> None:
        self.engine = engine
        self.state = state
        self.stored = stored
        self.wanted = wanted
        self.objects: dict[str, Any] = stored.get(_ENGINE)
        self.random = stored.get(f"{_RANDOM}.{engine.global_rank}")
        self._buffers = dict(_buffers(engine.module))
        self._params = {name: (unit, slot) for unit, slot, name in state.params()}
        self._loaded = self._matching_names()
        for name in sorted(self._loaded):
            self._check_tensor(_key(name), name)
        if wanted.optimizer:
            self._check_optimizer()
        if wanted.scheduler:
            self._check_scheduler()

    def _matching_names(self) -> set[str]:
        extra = {name for name, _ in _with_extra_state(self.engine.module)}
        here = self._params.keys() | self._buffers.keys() | {f"{n}._extra_state" for n in extra}
        there = {n.removeprefix("module.") for n in self.stored.shapes if n.startswith("module.")}
        there |= {f"{n}._extra_state" for n in self.objects["extra_state"]}
        left_out = set(self.objects["left_out"])
        missing, unexpected = here - there - left_out, there - here
        if missing or unexpected:
            say = f"not in the checkpoint: {_some(missing)}; not in the model: {_some(unexpected)}"
            if self.wanted.strict:
                raise UsageError(f"{self.stored.path} does not fit the model. {say}. load_module_strict=False loads what both have")
            logger.warning("%s does not fit the model, what both have is loaded. %s", self.stored.path, say)
        if kept := here & left_out - there:
            logger.info("not in the checkpoint (exclude_frozen_parameters), so as they are: %s", _some(kept))
        return here & there - {f"{n}._extra_state" for n in extra}

    def _check_tensor(self, key: str, name: str) -> None:
        shape, dtype = self.stored.shapes[key], self.stored.dtypes[key]
        if name in self._params:
            slot = self._params[name][1]
            here, here_dtype = slot.shape, slot.dtype
        else:
            here, here_dtype = tuple(self._buffers[name].shape), self._buffers[name].dtype
        if shape != here:
            raise UsageError(f"{key!r} has the shape {here}, and {shape} in {self.stored.path}; load into the same model")
        if _kind(dtype) != _kind(here_dtype):
            raise UsageError(f"{key!r} is {here_dtype}, and {dtype} in {self.stored.path}; load into the same model")

    def _check_optimizer(self) -> None:
        saved = self.objects["optimizer"]
        other = "pass load_optimizer_states=False to load the rest"
        if saved is None:
            raise UsageError(f"{self.stored.path} has no optimizer state: it was saved without an optimizer; {other}")
        if set(saved["fields"]) != set(self.state.fields):
            raise UsageError(
                f"{self.stored.path} has the optimizer state {', '.join(saved['fields']) or '(none)'}; the optimizer here keeps "
                f"{', '.join(self.state.fields) or '(none)'}: use the same kind, or {other}"
            )
        if len(saved["groups"]) != len(self._groups):
            raise UsageError(
                f"{self.stored.path} has {len(saved['groups'])} param groups, the optimizer here {len(self._groups)}: use the same groups, "
                f"or {other}"
            )
        trained = {n for n, (_, slot) in self._params.items() if slot.trained}
        for name in trained & saved["num_updates"].keys() & self._loaded:
            for field in self.state.fields:
                if _key(name, field) not in self.stored.shapes:
                    raise UsageError(f"{_key(name, field)!r} is not in {self.stored.path}; {other}")
                self._check_tensor(_key(name, field), name)
        stepper = self.engine._stepper
        there = saved.get("state_dtype", "fp32")
        if stepper is not None and there != stepper.spec.state_dtype:
            logger.info(
                "%s has the optimizer state of a run with %s; it is converted to %s", self.stored.path, there, stepper.spec.state_dtype
            )
        if fresh := trained - saved["num_updates"].keys():
            logger.warning("not trained when the checkpoint was saved, so their optimizer state begins anew: %s", _some(fresh))
        if unused := saved["num_updates"].keys() & self._params.keys() - trained:
            logger.warning("not trained any more, so the optimizer state in the checkpoint is not used: %s", _some(unused))

    def _check_scheduler(self) -> None:
        saved, here = self.objects["scheduler"], type(self.engine.lr_scheduler).__name__
        if saved is None or saved["type"] != here:
            raise UsageError(
                f"{self.stored.path} has {'no scheduler' if saved is None else saved['type']}, and here is {here}: use the same, or pass "
                "load_lr_scheduler_states=False to load the rest"
            )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups if self.engine.optimizer is not None else []

    def apply(self) -> None:
        """Change everything but the settings."""
        load_stretches(self.stored, self._stretches())
        self._begin_anew()
        by_unit: dict[Unit, list[int]] = {}
        for name in self._loaded & self._params.keys():
            unit, slot = self._params[name]
            by_unit.setdefault(unit, []).append(slot.index)
        for unit, indices in by_unit.items():
            self.state.written(unit, indices)
        self._apply_counts()
        for name, module in _with_extra_state(self.engine.module):
            if name in self.objects["extra_state"]:
                module.set_extra_state(self.objects["extra_state"][name])

    def apply_settings(self) -> None:
        """Change param groups and scheduler, or nothing."""
        before = [dict(group) for group in self._groups]
        try:
            if self.wanted.optimizer:
                for group, saved in zip(self._groups, self.objects["optimizer"]["groups"], strict=True):
                    group.update(saved)
            if self.wanted.scheduler:
                self.engine.lr_scheduler.load_state_dict(self.objects["scheduler"]["state"])
        except Exception:
            for group, old in zip(self._groups, before, strict=True):
                group.update(old)
            raise

    def _stretches(self) -> list[Stretch]:
        found = [_stretch(p, write=self.state) for p in self.state.kept() if p.name in self._loaded and self._is_stored(p)]
        return found + [_buffer_stretch(n, b) for n, b in self._buffers.items() if n in self._loaded]

    def _is_stored(self, portion: Portion) -> bool:
        return portion.field is None or (self.wanted.optimizer and portion.name in self.objects["optimizer"]["num_updates"])

    def _begin_anew(self) -> None:
        """Zeros for optimizer state that the checkpoint does not have."""
        if self.wanted.optimizer:
            for portion in self.state.kept():
                if portion.field is not None and not self._is_stored(portion):
                    self.state.write(portion, torch.zeros(portion.stop - portion.start))

    def _apply_counts(self) -> None:
        engine, stepper = self.engine, self.engine._stepper
        if self.wanted.optimizer and stepper is not None:
            saved = self.objects["optimizer"]["num_updates"]
            for name, (unit, slot) in self._params.items():
                stepper.num_updates[unit][slot.index] = saved.get(name, 0) if slot.trained else 0
            if engine._scaler is not None and self.objects["scaler"] is not None:
                engine._scaler.load_state_dict(self.objects["scaler"])
                engine.zero.loss_scale = engine._scaler.scale
        if self.wanted.module_only:
            return
        for name, value in self.objects["counters"].items():
            setattr(engine, name, value)
        if self.random is not None:
            _set_random_state(self.random, engine.device)
        else:
            logger.info("rank %d was not there when the checkpoint was saved: its random state stays", engine.global_rank)


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else str(dtype)


def _some(names: Iterable[str], most: int = 5) -> str:
    found: Sequence[str] = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(map(repr, found[:most])) or "nothing") + more
