"""`load_pretrained`: weights from safetensors to where they rest, one tensor at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..checkpoint import SafetensorsFolder
from ..errors import ConfigError, UsageError
from ..zero import GatheredParameters, Init, constructed, managed
from ._contents import entries, ties
from ._load import kind, some

__all__ = ["load_pretrained"]


def load_pretrained(
    model_or_config: nn.Module | Callable[[], nn.Module] | Any,
    safetensors_dir: str | os.PathLike[str],
    config: Any = None,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """A model with the weights of a folder of safetensors; then `swapio.initialize(model=model, config=config)`.

    Nothing but the tensor that is read, and some MiB that wait to be written, is in memory: with `config`, or within `zero.Init`, the
    weights go where `zero_optimization.offload_param` says. Every tensor is read once, by each rank; no initial values are computed.

    Args:
        model_or_config: a function that makes the model, or a config of `transformers` with `architectures`: its parameters are made
            without memory, buffers as usual. Or a model: parameters on the meta device get memory, others are written in place.
        safetensors_dir: with `model.safetensors` or several files and their index; or a file.
        config: as for `swapio.initialize`. Without it and outside of `zero.Init` the parameters are made in memory.
        strict: names that the model or the folder lacks are an error; else what both have is loaded.
        dtype: of floating parameters that are made; default: that which the model gives them.

    Raises:
        UsageError: names or shapes that do not match, before anything is loaded; StorageError: a file is damaged or missing.
        ConfigError: nothing to make a model from.
    """
    folder = SafetensorsFolder(Path(safetensors_dir))
    model = model_or_config if isinstance(model_or_config, nn.Module) else _made(model_or_config)
    found = _matched(model, folder, strict)
    with torch.no_grad(), Init(config_dict_or_path=config) if config is not None else contextlib.nullcontext():
        _load_parameters(model, folder, found, dtype)
        buffers = dict(model.named_buffers())
        for name in buffers.keys() & found.keys():
            buffers[name].copy_(folder.read(found[name]))
    return model


def _made(maker: Any) -> nn.Module:
    """The model, its parameters on the meta device."""
    if not callable(maker):
        names = getattr(maker, "architectures", None)
        if not names:
            raise ConfigError(
                f"model_or_config: no model can be made from a {type(maker).__name__} without architectures; pass a function that makes it",
                key="model_or_config",
            )
        import transformers

        architecture, settings = getattr(transformers, names[0]), maker
        maker = lambda: architecture(settings)  # noqa: E731
    with _without_memory():
        model = maker()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model_or_config: the function gave a {type(model).__name__}, which is no module", key="model_or_config")
    return model


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Parameters go to the meta device as they are registered, before anything is written to them."""

    def move(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or param.is_meta:
            return None
        moved = param.detach().to("meta")
        made: nn.Parameter = type(param)(moved, requires_grad=param.requires_grad)
        made.__dict__.update(param.__dict__)
        return made

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may give another, as PyTorch's text says
    try:
        yield
    finally:
        handle.remove()


def _matched(model: nn.Module, folder: SafetensorsFolder, strict: bool) -> dict[str, str]:
    """Names in the folder, by names in the model.

    Raises:
        UsageError: they do not match, and must.
    """
    known, others = entries(model), ties(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."  # the folder may be of the model inside, as many of `transformers` are
    within = prefix != "." and any(n.startswith(prefix) for n in known) and not any(n.startswith(prefix) for n in folder.entries)
    found: dict[str, str] = {}
    unexpected = []
    for stored in folder.entries:
        name = next((n for n in (stored, prefix + stored) if n in known or n in others), None) if within else stored
        if name is None or name not in known | others:
            unexpected.append(stored)
        else:
            found.setdefault(others.get(name, name), stored)
    missing = known.keys() - found.keys()
    without = sorted(n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta and n not in found)
    if strict and (missing or unexpected):
        raise UsageError(
            f"{folder.path} does not fit the model. Not in the files: {some(missing)}; not in the model: {some(unexpected)}. "
            "strict=False loads what both have"
        )
    if without:
        raise UsageError(
            f"{folder.path} has no values for {some(without)}, and the model has none either, as they are on the meta device: "
            "construct the model with values, or pass a function that makes it"
        )
    for name, stored in found.items():
        here, there = known[name]["shape"], folder.entries[stored].shape
        if here != there:
            raise UsageError(f"{name!r} has the shape {here}, and {there} in {folder.path}; load into the same model")
        own, other = known[name]["dtype"], folder.entries[stored].dtype
        if kind(own) != kind(other):
            raise UsageError(f"{name!r} is {own}, and {other} in {folder.path}: it may be quantized; load weights of the same kind")
    return found


def _load_parameters(model: nn.Module, folder: SafetensorsFolder, found: dict[str, str], dtype: torch.dtype | None) -> None:
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of what was there, which is kept so that its id is its own
    for path, module in model.named_modules():
        for own, param in list(module._parameters.items()):
            name = f"{path}.{own}" if path else own
            if param is None:
                continue
            if id(param) in made:
                setattr(module, own, made[id(param)][1])
            elif param.is_meta:
                made[id(param)] = param, _materialized(param, folder, found[name], dtype)
                setattr(module, own, made[id(param)][1])
            elif name in found:
                together = managed(param) is not None and not constructed(param)
                with GatheredParameters(param, enabled=together):
                    param.copy_(folder.read(found[name]))


def _materialized(param: nn.Parameter, folder: SafetensorsFolder, stored: str, dtype: torch.dtype | None) -> nn.Parameter:
    tensor = folder.read(stored).to(dtype if dtype is not None and param.is_floating_point() else param.dtype)
    if tensor.stride() != param.stride():
        tensor = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype).copy_(tensor)
    made = nn.Parameter(tensor, requires_grad=param.requires_grad)
    made.__dict__.update(param.__dict__)
    return made
