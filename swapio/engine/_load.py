"""`load_checkpoint`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..checkpoint import CLIENT_STATE, ENGINE, RANDOM, DeepSpeedStored, Stored, checker, find, is_deepspeed, key, latest_tag, listed, verify
from ..errors import UsageError
from ..zero import PortableState, Portion, Unit
from ._contents import buffer_stretch, buffers, set_random_state, stretch, with_extra_state
from ._save import report_leftovers

if TYPE_CHECKING:
    from ._engine import Engine

__all__ = ["kind", "load_checkpoint", "some"]

logger = logging.getLogger("swapio")


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
            report_leftovers(directory)
        tag = latest_tag(directory) if tag is None else str(tag)
        path = None if tag is None else directory / tag if is_deepspeed(directory / tag) else find(directory, tag)
    if path is None:
        there = listed(directory)
        logger.warning("nothing is loaded: %s has no file 'latest', and no tag was given; checkpoints there: %s", directory, there)
        return None, None
    once = _can_be_read_once(engine) and not is_deepspeed(path)
    with ranks.together(f"checking {path}"):
        if not once and not is_deepspeed(path):
            verify(path, share=ranks.rank, num_shares=ranks.size)
    with PortableState(engine.zero) as state:
        try:
            with ranks.together(f"reading {path}"):
                state.settle()
                stored = DeepSpeedStored(path) if is_deepspeed(path) else Stored(path, check=checker(path) if once else None)
                loading = _Loading(engine, state, stored, wanted)
                loading.prepare(once=once)
            with ranks.together(f"loading settings from {path}"):
                loading.apply_settings()
        except BaseException:
            state.take_back()
            raise
        if not once:
            engine._zero_grad()
        try:
            with ranks.together(f"loading {path}"):
                loading.apply()
        except BaseException:
            engine._failed = True  # unless all that was changed can be as before: weights of two kinds are not to be given back
            if not loading.has_begun_with_rest:
                state.take_back()
                loading.undo_settings()
                engine._failed = False
            raise
        engine.zero.refresh_views()
    logger.info("loaded %s", path)
    return str(path), loading.client_state


def _can_be_read_once(engine: Engine) -> bool:
    """Whether little has to be set aside: before the first step there is no optimizer state, and there are no gradients."""
    begun = engine.global_steps or engine.micro_steps or any(any(u.has_grad) for u in engine.zero.units)
    return engine.zero.ranks.alone and not begun


class _Loading:
    """A checkpoint that fits the engine; nothing that cannot be taken back is changed before `apply`.

    Raises:
        UsageError: it does not fit.
    """

    def __init__(self, engine: Engine, state: PortableState, stored: Stored | DeepSpeedStored, wanted: _Wanted) -> None:
        self.engine = engine
        self.state = state
        self.stored = stored
        self.wanted = wanted
        self.objects: dict[str, Any] = stored.get(ENGINE)
        self.client_state = self.objects["client_state"] if "client_state" in self.objects else stored.get(CLIENT_STATE)
        self.random = stored.get(f"{RANDOM}.{engine.global_rank}")
        self._buffers = dict(buffers(engine.module))
        self._params = {name: (unit, slot) for unit, slot, name in state.params()}
        self._settings: tuple[list[dict[str, Any]], dict[str, Any], list[tuple[nn.Module, Any]]] = [], {}, []  # as they were
        self._first: list[Portion] = []  # what can be taken back
        self._rest: list[Portion] = []
        self._untouched: list[Portion] = []
        self.has_begun_with_rest = False
        self._loaded = self._matching_names()
        for name in sorted(self._loaded):
            self._check_tensor(key(name), name)
        if wanted.optimizer:
            self._check_optimizer()
        if wanted.scheduler:
            self._check_scheduler()

    def _matching_names(self) -> set[str]:
        extra = {name for name, _ in with_extra_state(self.engine.module)}
        here = self._params.keys() | self._buffers.keys() | {f"{n}._extra_state" for n in extra}
        there = {n.removeprefix("module.") for n in self.stored.shapes if n.startswith("module.")}
        there |= {f"{n}._extra_state" for n in self.objects["extra_state"]}
        left_out = set(self.objects["left_out"])
        missing, unexpected = here - there - left_out, there - here
        if missing or unexpected:
            say = f"not in the checkpoint: {some(missing)}; not in the model: {some(unexpected)}"
            if self.wanted.strict:
                raise UsageError(f"{self.stored.path} does not fit the model. {say}. load_module_strict=False loads what both have")
            logger.warning("%s does not fit the model, what both have is loaded. %s", self.stored.path, say)
        if kept := here & left_out - there:
            logger.info("not in the checkpoint (exclude_frozen_parameters), so as they are: %s", some(kept))
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
        if kind(dtype) != kind(here_dtype):
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
        members = saved.get("members", {})
        moved = {n for n in trained & members.keys() if members[n] != self._params[n][0].groups[self._params[n][1].index]}
        if moved:
            raise UsageError(f"other param groups have {some(moved)} in {self.stored.path} than here: give the same groups, or {other}")
        for name in trained & saved["num_updates"].keys() & self._loaded:
            for field in self.state.fields:
                if key(name, field) not in self.stored.shapes:
                    raise UsageError(f"{key(name, field)!r} is not in {self.stored.path}; {other}")
                self._check_tensor(key(name, field), name)
        stepper = self.engine._stepper
        there = saved.get("state_dtype", "fp32")
        if stepper is not None and there != stepper.spec.state_dtype:
            logger.info(
                "%s has the optimizer state of a run with %s; it is converted to %s", self.stored.path, there, stepper.spec.state_dtype
            )
        if fresh := trained - saved["num_updates"].keys():
            logger.warning("not trained when the checkpoint was saved, so their optimizer state begins anew: %s", some(fresh))
        if unused := saved["num_updates"].keys() & self._params.keys() - trained:
            logger.warning("not trained any more, so the optimizer state in the checkpoint is not used: %s", some(unused))

    def _check_scheduler(self) -> None:
        saved, here = self.objects["scheduler"], type(self.engine.lr_scheduler).__name__
        if saved is None or saved["type"] not in (None, here):
            raise UsageError(
                f"{self.stored.path} has {'no scheduler' if saved is None else saved['type']}, and here is {here}: use the same, or pass "
                "load_lr_scheduler_states=False to load the rest"
            )

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups if self.engine.optimizer is not None else []

    def prepare(self, *, once: bool) -> None:
        """See what is replaced.

        Args:
            once: nothing was verified yet. What replaces bytes that can be taken back is as it is read; the rest here.

        Raises:
            StorageError: the rest is damaged.
        """
        wanted: list[Portion] = []
        for p in self.state.kept():
            (wanted if p.name in self._loaded and self._is_stored(p) else self._untouched).append(p)
        if once:
            self.state.set_aside(wanted, self._untouched)
        for p in wanted:
            (self._first if once and self.state.is_aside(p) else self._rest).append(p)
        if once:
            verify(self.stored.path, but={key(p.name, p.field) for p in self._first})

    def apply(self) -> None:
        """Change everything but the settings."""
        self.state.expect(self._first)
        self.stored.load([stretch(p, write=self.state) for p in self._first])
        self.has_begun_with_rest = True
        self.state.overwrite(self._rest, [*self._untouched, *self._first])
        self.stored.load([stretch(p, write=self.state) for p in self._rest])
        self.stored.load([buffer_stretch(n, b) for n, b in self._buffers.items() if n in self._loaded])
        self._begin_anew()
        by_unit: dict[Unit, list[int]] = {}
        for name in self._loaded & self._params.keys():
            unit, slot = self._params[name]
            by_unit.setdefault(unit, []).append(slot.index)
        for unit, indices in by_unit.items():
            self.state.written(unit, indices)
        self._apply_counts()

    def apply_settings(self) -> None:
        """Change param groups, scheduler and extra state, or nothing."""
        groups = [dict(group) for group in self._groups]
        self._settings = groups, dict(vars(self.engine.lr_scheduler)) if self.wanted.scheduler else {}, []
        try:
            if self.wanted.optimizer:
                for group, saved in zip(self._groups, self.objects["optimizer"]["groups"], strict=True):
                    group.update(saved)
            if self.wanted.scheduler:
                self.engine.lr_scheduler.load_state_dict(self.objects["scheduler"]["state"])
            for name, module in with_extra_state(self.engine.module):
                if name in self.objects["extra_state"]:
                    self._settings[2].append((module, module.get_extra_state()))
                    module.set_extra_state(self.objects["extra_state"][name])
        except Exception:
            self.undo_settings()
            raise

    def undo_settings(self) -> None:
        groups, schedule, extra = self._settings
        for group, old in zip(self._groups, groups, strict=True):
            group.update(old)
        if self.wanted.scheduler:
            vars(self.engine.lr_scheduler).update(schedule)
        for module, state in extra:
            with contextlib.suppress(Exception):  # what it refuses it may refuse again
                module.set_extra_state(state)

    def _is_stored(self, portion: Portion) -> bool:
        return portion.field is None or (self.wanted.optimizer and portion.name in self.objects["optimizer"]["num_updates"])

    def _begin_anew(self) -> None:
        """Zeros for optimizer state that the checkpoint does not have."""
        if self.wanted.optimizer:
            for portion in self.state.kept():
                if portion.field is not None and not self._is_stored(portion):
                    self.state.write(portion, torch.zeros(portion.stop - portion.start, dtype=torch.float32))

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
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()  # a step begins, however many were accumulated then
        if self.random is not None:
            set_random_state(self.random, engine.device)
        else:
            logger.info("rank %d was not there when the checkpoint was saved: its random state stays", engine.global_rank)


def kind(dtype: torch.dtype) -> str:
    """Dtypes of one kind are converted."""
    return "floating" if dtype.is_floating_point else str(dtype)


def some(names: Iterable[str], most: int = 5) -> str:
    """The first names, for people."""
    found: Sequence[str] = sorted(names)
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(map(repr, found[:most])) or "nothing") + more
