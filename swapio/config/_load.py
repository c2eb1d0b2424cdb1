"""From a dict or a JSON file to a complete, checked config: nothing is ignored silently."""

from __future__ import annotations

import copy
import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from ..errors import ConfigError
from ._batch import BATCH_KEYS, batch_sources, batch_triple
from ._keys import DEPRECATED, KEYS, SECTIONS, Kind, is_off
from ._params import OPTIMIZERS, REFUSED_OPTIMIZERS, SCHEDULERS
from ._schema import SwapioConfig

__all__ = ["load_config", "scheduler_params"]

Model = TypeVar("Model", bound=pydantic.BaseModel)

_TUNED = ("aio.block_size", "aio.queue_depth", "swapio.backend")
"""What a file of `swapio tune` may set."""

_MEANT = {"learning_rate": "lr", "wd": "weight_decay"}
"""Names from elsewhere that no likeness leads to."""


def load_config(
    config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int = 1, world_size_source: str = "one process"
) -> SwapioConfig:
    """Complete and check a config in DeepSpeed's format.

    As there, a value `"auto"` or null counts as not given. The argument is not changed.

    Args:
        config: a dict, or the path of a JSON file.
        world_size: number of ranks.
        world_size_source: where that number was read, for messages.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a value that cannot work, or a feature that is refused or not
            supported yet; with the dotted key and the value.
    """
    loading = _Loading(_read(config))
    loading.translate()
    loading.walk(loading.given, loading.clean, "")
    loading.batch(world_size, world_size_source)
    loading.tuned()
    loading.optimizer()
    loading.scheduler()
    loaded = _validate(SwapioConfig, loading.clean, "")
    loaded._world = (world_size, world_size_source)
    loading.without_effect(loaded)
    if loaded.fp16.enabled and loaded.bf16.enabled:
        raise ConfigError("fp16.enabled: bf16.enabled is true too; weights have one dtype, leave one out", key="fp16.enabled", value=True)
    if "gradient_clipping" not in loading.sources:
        loading.notes.append("gradient_clipping is off, since it was not asked for (DeepSpeed's default is 1.0)")
    loaded._ignored.update(loading.ignored)
    loaded._notes.extend(loading.notes)
    loaded._sources.update({key: loading.sources.get(key, "default") for key in _leaves(loaded.resolved())})
    return loaded


def scheduler_params(named: Any, params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The section `scheduler` checked and completed: its type as DeepSpeed spells it, and all its `params`.

    Raises:
        ConfigError: an unknown type or key, or a value that cannot work.
    """
    if not isinstance(named, str) or named.lower() not in SCHEDULERS:
        known = ", ".join(f'"{name}"' for name, _ in SCHEDULERS.values())
        near = difflib.get_close_matches(str(named).lower(), SCHEDULERS, n=1)
        hint = f'did you mean "{SCHEDULERS[near[0]][0]}"? ' if near else ""
        raise ConfigError(f"scheduler.type: {named!r} is none; {hint}It is one of {known}", key="scheduler.type", value=named)
    name, model = SCHEDULERS[named.lower()]
    return name, _validate(model, {k: v for k, v in params.items() if not _absent(v)}, "scheduler.params.").model_dump()


class _Loading:
    """One config on its way."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        self.clean: dict[str, Any] = {}  # what goes into the schema
        self.sources: dict[str, str] = {}  # of all keys that are no plain default
        self.ignored: dict[str, tuple[Any, str]] = {}
        self.notes: list[str] = []
        self.spelled: dict[str, str] = {}  # new spelling -> the one given

    def translate(self) -> None:
        """Move deprecated spellings to their new place."""
        for old, (new, values) in DEPRECATED.items():
            section, name = self._at(old, make=False)
            if name not in section:
                continue
            value = section.pop(name)
            if _absent(value):
                continue
            if values is not None:
                if not isinstance(value, bool):
                    raise ConfigError(f"{old}: {value!r} is neither true nor false; better give {new}", key=old, value=value)
                value = copy.copy(values[value])
            target, last = self._at(new, make=True)
            if target.get(last) is not None:
                raise ConfigError(f"{old}: {new} is given too; keep only {new}", key=old, value=value)
            target[last] = value
            self.spelled[new] = old
            self.notes.append(f"{old} is a deprecated spelling of {new}")

    def _at(self, dotted: str, *, make: bool) -> tuple[dict[str, Any], str]:
        *path, name = dotted.split(".")
        section = self.given
        for part in path:
            if make and section.get(part) is None:
                section[part] = {}
            inner = section.get(part)
            if not isinstance(inner, dict):
                return {}, name  # `walk` says what is wrong with it
            section = inner
        return section, name

    def walk(self, tree: dict[str, Any], clean: dict[str, Any], prefix: str) -> None:
        """Sort one section's keys by what becomes of them."""
        for name, value in tree.items():
            key = f"{prefix}{name}"
            row = KEYS.get(key)
            if row is None and key not in SECTIONS:
                raise ConfigError(f"{key}: unknown key; did you mean {_nearest(key)!r}?", key=key, value=value)
            if _absent(value):
                continue
            if row is None:
                if not isinstance(value, dict):
                    raise ConfigError(f"{key}: {value!r} is no section; write for example {_example(key)}", key=key, value=value)
                in_schema = prefix or name in SwapioConfig.model_fields
                self.walk(value, clean.setdefault(name, {}) if in_schema else {}, f"{key}.")
                continue
            spelled = next((old for new, old in self.spelled.items() if f"{key}.".startswith(f"{new}.")), None)
            self.sources[key] = "given" if spelled is None else f"deprecated spelling {spelled}"
            if row.kind is Kind.HONOURED:
                clean[name] = value
            elif row.kind is Kind.NO_EFFECT:
                self.ignored[key] = (value, row.note)
            elif is_off(value, row.off):
                self.ignored[key] = (value, "it is off")
            else:
                off = " or ".join(["leave it out", *(f"use {json.dumps(v)}" for v in row.off)])
                refused = "is not supported yet" if row.kind is Kind.NOT_YET else "is not supported"
                raise ConfigError(f"{key}: {value!r} {refused} ({row.note}); {off}", key=key, value=value)

    def batch(self, world_size: int, source: str) -> None:
        """Infer the batch sizes."""
        for key in BATCH_KEYS:
            value = self.clean.get(key)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ConfigError(f'{key}: {value!r} is no whole number; write for example 8, or "auto"', key=key, value=value)
        given = [self.clean.get(key) for key in BATCH_KEYS]
        total, micro, steps = batch_triple(*given, world_size=world_size, world_size_source=source)
        self.clean.update(zip(BATCH_KEYS, (total, micro, steps), strict=True))
        self.sources.update(zip(BATCH_KEYS, batch_sources(*given), strict=True))

    def tuned(self) -> None:
        """Fill in from the file of `swapio tune` what is not given."""
        path = self.clean.get("swapio", {}).get("tuned")
        if not isinstance(path, str | os.PathLike):
            return  # the schema says what is wrong with it
        found = _read_json(Path(path), key="swapio.tuned").get("swapio_config")
        try:
            if not isinstance(found, dict):
                raise ConfigError("no object `swapio_config`; write the file with `swapio tune`")
            for section, values in found.items():
                for name, value in values.items() if isinstance(values, dict) else [("", values)]:
                    key = f"{section}.{name}".rstrip(".")
                    if key not in _TUNED:
                        raise ConfigError(f"it sets {key!r}, which is not tuned; it may set {', '.join(_TUNED)}")
                    if key not in self.sources:
                        self.clean.setdefault(section, {})[name] = value
                        self.sources[key] = f"tuned {path}"
            _validate(SwapioConfig, found, "")
        except ConfigError as error:
            raise ConfigError(f"swapio.tuned: {path}: {error}", key="swapio.tuned", value=str(path)) from error

    def scheduler(self) -> None:
        """Check `scheduler.params` against the type, and complete them."""
        section = self.clean.pop("scheduler", None)
        if not section:  # all null is how it is written to be off
            return
        kind, params = scheduler_params(section.get("type", ""), section.get("params", {}))
        rate = (self.clean.get("optimizer") or {"params": {}})["params"].get("lr")
        if kind == "WarmupDecayLR" and "scheduler.params.warmup_max_lr" not in self.sources and rate not in (None, params["warmup_max_lr"]):
            self.notes.append(
                f"scheduler.params.warmup_max_lr of {kind} is {params['warmup_max_lr']} when not given, as in DeepSpeed, "
                f"not optimizer.params.lr {rate}"
            )
        self.clean["scheduler"] = {"type": kind, "params": params}

    def without_effect(self, loaded: SwapioConfig) -> None:
        """List what was given of sections that are off."""
        for name in ("offload_param", "offload_optimizer"):
            section = getattr(loaded.zero_optimization, name)
            if section.device != "nvme" and section.paths:
                self.ignored[f"zero_optimization.{name}.nvme_path"] = (section.paths, f'the device is "{section.device}"')
        for name in ("fp16", "csv_monitor", "tensorboard"):
            if not getattr(loaded, name).enabled:
                for key, value in self.clean.get(name, {}).items():
                    if key != "enabled":
                        self.ignored[f"{name}.{key}"] = (value, f"{name}.enabled is false")

    def optimizer(self) -> None:
        """Check `optimizer.params` against the type, and complete them."""
        section = self.clean.get("optimizer")
        if section is None:
            return
        named = section.get("type", "")
        if not isinstance(named, str) or named.lower() not in OPTIMIZERS:
            why = f"{named!r} is not supported yet, or no update that treats each element alone" if named else "missing"
            if reason := REFUSED_OPTIMIZERS.get(str(named).lower()):
                why = f"{named!r} is not supported: {reason}"
            elif near := difflib.get_close_matches(str(named).lower(), OPTIMIZERS, n=1):
                why += f'; did you mean "{OPTIMIZERS[near[0]][0]}"'
            known = ", ".join(f'"{name}"' for name, _ in OPTIMIZERS.values())
            raise ConfigError(f"optimizer.type: {why}; use one of {known}", key="optimizer.type", value=named)
        kind, model = OPTIMIZERS[named.lower()]
        params = _validate(model, section.get("params", {}), "optimizer.params.").model_dump()
        coupled = params.pop("adam_w_mode", True) is False
        if coupled and kind == "AdamW":
            self.ignored["optimizer.params.adam_w_mode"] = (False, "the type AdamW decides it, as in DeepSpeed")
        elif coupled:
            params["adam_w_mode"] = False
        elif kind == "Adam":
            kind = "AdamW"
            self.sources["optimizer.type"] = "inferred from Adam and adam_w_mode"
            self.notes.append("optimizer.type Adam is AdamW, as in DeepSpeed, unless optimizer.params.adam_w_mode is false")
        self.clean["optimizer"] = {"type": kind, "params": params}


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return _plain(config, "")
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config: {type(config).__name__} is neither a dict nor the path of a JSON file", key="config", value=config)
    return _read_json(Path(config), key="config")


def _read_json(path: Path, *, key: str) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_twins)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}", key=key, value=str(path)) from error
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{key}: {where}: {error.msg}", key=key, value=str(path)) from error
    except _TwinError as error:
        raise ConfigError(f"{key}: {path} has the key {error.args[0]!r} twice in one section", key=key, value=str(path)) from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{key}: {path} holds a {type(loaded).__name__}, not an object", key=key, value=str(path))
    return _plain(loaded, "")


class _TwinError(Exception):
    pass


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in pairs:
        if key in tree:
            raise _TwinError(key)
        tree[key] = value
    return tree


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value == "auto")


def _plain(section: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    """A copy in dicts whose keys are strings without dots, so that a dotted key is unique."""
    for name in section:
        if not isinstance(name, str) or "." in name or not name:
            raise ConfigError(
                f"{prefix}{name}: unknown key; nest sections instead of writing dots", key=f"{prefix}{name}", value=section[name]
            )
    return {k: _plain(v, f"{prefix}{k}.") if isinstance(v, Mapping) else copy.copy(v) for k, v in section.items()}


def _validate(model: type[Model], values: dict[str, Any], prefix: str) -> Model:
    try:
        return model.model_validate(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
    key = prefix + ".".join(part for part in first["loc"] if isinstance(part, str))
    value = first.get("input")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        raise cause
    if first["type"] == "extra_forbidden":
        owner = f"{prefix.partition('.')[0]}.type"
        raise ConfigError(f"{key}: not a setting of this {owner}; it has {', '.join(model.model_fields)}", key=key, value=value)
    if first["type"] == "missing" and key.endswith(f".{first['loc'][-1]}"):
        raise ConfigError(f"{key}: missing, and it has no default; write a value", key=key)
    message = first["msg"].removeprefix("Value error, ")
    got = f" (got {value!r})" if value != () else ""  # an empty tuple is a default: nothing was given
    raise ConfigError(f"{key}: {message[0].lower() + message[1:]}{got}", key=key, value=value)


def _nearest(key: str) -> str:
    """The known key that was most likely meant: of the same section, else of the same name elsewhere, else the least unlike."""
    section, _, name = key.rpartition(".")
    name = _MEANT.get(name, name)
    known = [*KEYS, *(s for s in SECTIONS if s)]
    beside = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    anywhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    for names, cutoff in ((beside, 0.7), (anywhere, 0.8), (beside or anywhere, 0.0)):
        if near := difflib.get_close_matches(name, names, n=1, cutoff=cutoff):
            return names[near[0]]
    return next(iter(KEYS))


def _example(section: str) -> str:
    rows = [row for row in KEYS.values() if row.key.rpartition(".")[0] == section and row.default is not None]
    return json.dumps({row.key.rpartition(".")[2]: row.default for row in rows[:1]})


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in SECTIONS and isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        else:
            yield key
