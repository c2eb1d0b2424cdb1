"""From a dict or a JSON file to a checked config: nothing is ignored silently."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from ..errors import ConfigError
from ._keys import DEPRECATED, NO_EFFECT, NOT_YET
from ._schema import OptimizerConfig, SwapioConfig

__all__ = ["batch_triple", "load_config"]

_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def load_config(config: Mapping[str, Any] | str | os.PathLike[str], *, world_size: int = 1) -> SwapioConfig:
    """Check a config in DeepSpeed's format.

    Args:
        config: a dict, or the path of a JSON file.

    Raises:
        ConfigError: an unknown key (the nearest known one is named), a value that cannot work, or a feature that is not supported yet;
            with the dotted key and the value.
    """
    given = _read(config)
    sources: dict[str, str] = {}
    without_effect: dict[str, str] = {}
    clean = _translate(given, sources)
    _drop_known(clean, "", without_effect)
    for key in _keys(clean):
        sources.setdefault(key, "given")
    batch = batch_triple(*(_number(clean.get(k), k) for k in _BATCH), world_size=world_size)
    for key, value in zip(_BATCH, batch, strict=True):
        if key not in clean or clean[key] == "auto":
            sources[key] = "inferred" if any(isinstance(clean.get(k), int) for k in _BATCH) else "default"
        clean[key] = value
    for key, limit in (("gradient_accumulation_steps", 1),):
        if clean[key] > limit:
            raise ConfigError(
                f"{key}: {clean[key]} is not supported yet; use 1 (train_batch_size {batch[0]} = micro batch {batch[1]} x accumulation "
                f"{batch[2]} x world size {world_size})",
                key=key, value=clean[key],
            )  # fmt: skip
    if isinstance(clean.get("swapio"), dict) and clean["swapio"].get("device_memory", None) == "auto":
        clean["swapio"] = clean["swapio"] | {"device_memory": None}
    try:
        loaded = SwapioConfig.model_validate(clean)
    except pydantic.ValidationError as error:
        raise _explain(error) from None
    loaded._sources.update(sources)
    loaded._without_effect.update(without_effect)
    return loaded


def batch_triple(total: int | None, micro: int | None, steps: int | None, *, world_size: int = 1) -> tuple[int, int, int]:
    """Infer what is missing of `train_batch_size = micro batch x accumulation steps x world size`; nothing given is 1 each.

    Raises:
        ConfigError: the three do not agree, or do not divide; all values are shown.
    """
    shown = f"train_batch_size={total}, train_micro_batch_size_per_gpu={micro}, gradient_accumulation_steps={steps}, world size {world_size}"
    for key, value in zip(_BATCH, (total, micro, steps), strict=True):
        if value is not None and value < 1:
            raise ConfigError(f"{key}: {value} is no batch size; use 1 or more", key=key, value=value)
    if total is None:
        micro, steps = micro or 1, steps or 1
        return micro * steps * world_size, micro, steps
    if micro is None and steps is None:
        steps = 1
    if micro is None:
        micro, rest = divmod(total, (steps or 1) * world_size)
        if rest or not micro:
            raise ConfigError(f"{shown}: {total} cannot be split evenly", key="train_batch_size", value=total)
    if steps is None:
        steps, rest = divmod(total, micro * world_size)
        if rest or not steps:
            raise ConfigError(f"{shown}: {total} cannot be split evenly", key="train_batch_size", value=total)
    if micro * steps * world_size != total:
        raise ConfigError(f"{shown}: {micro} x {steps} x {world_size} is {micro * steps * world_size}, not {total}", key="train_batch_size", value=total)
    return total, micro, steps


def _number(value: Any, key: str) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f'{key}: {value!r} is no whole number; write for example 8, or "auto"', key=key, value=value)
    return value


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(f"config: {type(config).__name__} is neither a dict nor the path of a JSON file", key="config", value=config)
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read: {error.strerror}", key="config", value=str(path)) from error

    def no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twins = [k for i, (k, _) in enumerate(pairs) if k in [name for name, _ in pairs[:i]]]
        if twins:
            raise ConfigError(f"config: {path} has the key {twins[0]!r} twice in one section", key=twins[0])
        return dict(pairs)

    try:
        loaded = json.loads(text, object_pairs_hook=no_twins)
    except json.JSONDecodeError as error:
        raise ConfigError(f"config: {path}, line {error.lineno}: {error.msg}", key="config", value=str(path)) from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"config: {path} holds a {type(loaded).__name__}, not an object", key="config", value=str(path))
    return loaded


def _copy(value: Any) -> Any:
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, Mapping) else value


def _at(tree: dict[str, Any], dotted: str) -> tuple[dict[str, Any] | None, str]:
    *path, name = dotted.split(".")
    for part in path:
        inner = tree.get(part)
        if not isinstance(inner, dict):
            return None, name
        tree = inner
    return tree, name


def _translate(given: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    tree: dict[str, Any] = _copy(given)
    for old, (new, values) in DEPRECATED.items():
        section, name = _at(tree, old)
        if section is None or name not in section:
            continue
        value = section.pop(name)
        if values is not None:
            if value is not None and value not in values:
                raise ConfigError(f"{old}: {value!r} is neither true nor false", key=old, value=value)
            value = values.get(value)
        if value is None:
            continue
        target, last = _at(tree, new)
        if target is not None:
            if last in target:
                raise ConfigError(f"{old}: {new} is given too; keep only {new}", key=old, value=value)
            target[last] = value
            sources[new] = f"given as {old} (an old spelling)"
    return tree


def _drop_known(tree: dict[str, Any], prefix: str, without_effect: dict[str, str]) -> None:
    for name, value in list(tree.items()):
        key = f"{prefix}{name}"
        if key in NO_EFFECT:
            without_effect[key] = NO_EFFECT[key]
            del tree[name]
        elif key in NOT_YET:
            if not _off(key, value):
                off = ", ".join(json.dumps(v) for v in NOT_YET[key])
                raise ConfigError(f"{key}: {value!r} is not supported yet; leave it out, or use {off}", key=key, value=value)
            without_effect[key] = "off"
            del tree[name]
        elif isinstance(value, dict) and key != "optimizer.params":
            _drop_known(value, key + ".", without_effect)
        elif value == "auto" and key not in (*_BATCH, "swapio.host_memory", "swapio.device", "swapio.backend", "swapio.optimizer_step"):
            del tree[name]  # the default, which resolved() shows


def _off(key: str, value: Any) -> bool:
    allowed = NOT_YET[key]
    if isinstance(value, dict):  # a section that is switched off may say what it would do
        return not value or value.get("enabled", None) is False
    return value == "auto" or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in allowed)


def _keys(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, Mapping) and f"{prefix}{name}" != "optimizer.params":
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _known(model: type[pydantic.BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        for inner in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel) and inner is not OptimizerConfig:
                yield from _known(inner, f"{prefix}{name}.")


def _explain(error: pydantic.ValidationError) -> ConfigError:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if part not in ("str", "int", "list[str]"))
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        known = [*_known(SwapioConfig), "optimizer.type", "optimizer.params", *NO_EFFECT, *NOT_YET]
        section = key.rpartition(".")[0]
        siblings = [k for k in known if k.rpartition(".")[0] == section]
        near = difflib.get_close_matches(key, siblings, n=1, cutoff=0.5) or difflib.get_close_matches(key, known, n=1, cutoff=0)
        return ConfigError(f"{key}: unknown key; did you mean {near[0]!r}?", key=key, value=value)
    message = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key}: {message[0].lower() + message[1:]} (got {value!r})", key=key, value=value)
