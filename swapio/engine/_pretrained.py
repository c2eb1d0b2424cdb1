"""`load_pretrained`: weights from safetensors to where they rest, one tensor at a time."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..checkpoint import SafetensorsFolder
from ..errors import ConfigError, UsageError
from ..zero import GatheredParameters, Init, constructed, constructing_dtype, managed, world
from ._contents import entries, ties
from ._load import kind, some

__all__ = ["load_pretrained"]

logger = logging.getLogger("swapio")


def load_pretrained(
    model_or_config: nn.Module | Callable[[], nn.Module] | Any,
    safetensors_dir: str | os.PathLike[str],
    config: Any = None,
    *,
    strict: bool = True,
    dtype: torch.dtype | None = None,
    keep_frozen_in_file: bool = False,
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
        keep_frozen_in_file: parameters that are made are not copied but mapped from the files, and `initialize` leaves those that are not
            trained there: for adapters on a large model, which may be added before it. What is converted to another dtype, or written, is
            copied, and so is everything on several ranks and with weights at home in memory. From then on the files must stay as they
            are; replacing or removing them is allowed, changing them is a StorageError in training.

    Raises:
        UsageError: names or shapes that do not match, before anything is loaded; StorageError: a file is damaged or missing.
        ConfigError: nothing to make a model from.
    """
    folder = SafetensorsFolder(Path(safetensors_dir))
    model = model_or_config if isinstance(model_or_config, nn.Module) else _made(model_or_config)
    found = _matched(model, folder, strict)
    with torch.no_grad(), Init(config_dict_or_path=config) if config is not None else contextlib.nullcontext():
        _load_parameters(_Reader(folder, dtype, maps=keep_frozen_in_file), model, found)
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


class _Reader:
    """Makes parameters from a folder.

    Args:
        dtype: of floating ones; None: as it is.
        maps: over their bytes in the files, where nothing stands against it.
    """

    def __init__(self, folder: SafetensorsFolder, dtype: torch.dtype | None, *, maps: bool) -> None:
        self.folder = folder
        self._dtype = dtype
        self._maps = maps
        if maps and world()[0] > 1:
            logger.warning("on several ranks no weights stay in %s: they are copied", folder.path)
            self._maps = False
        self._copied: list[str] = []

    def make(self, param: nn.Parameter, stored: str) -> nn.Parameter:
        """What takes the place of `param`, which is on the meta device."""
        dtype = self._dtype if self._dtype is not None and param.is_floating_point() else param.dtype
        tensor = self._mapped(param, stored, dtype) if self._maps else None
        if tensor is None:
            tensor = self.folder.read(stored).to(dtype)
            if tensor.stride() != param.stride():
                tensor = torch.empty_strided(param.shape, param.stride(), dtype=tensor.dtype).copy_(tensor)
        made = nn.Parameter(tensor, requires_grad=param.requires_grad)
        made.__dict__.update(param.__dict__)
        return made

    def _mapped(self, param: nn.Parameter, stored: str, dtype: torch.dtype) -> torch.Tensor | None:
        last = constructing_dtype() if param.is_floating_point() else None
        fits = self.folder.entries[stored].dtype is dtype and last in (None, dtype) and param.is_contiguous()
        tensor = self.folder.map(stored) if fits else None
        if tensor is None and param.numel():
            self._copied.append(stored)
        return tensor

    def finish(self) -> None:
        """Say what was copied that should not be."""
        if self._copied:
            logger.warning(
                "copied from %s, as they become another dtype (the argument dtype may help), have other strides or are not aligned: %s",
                self.folder.path, some(self._copied),
            )  # fmt: skip


def _load_parameters(reader: _Reader, model: nn.Module, found: dict[str, str]) -> None:
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the id of what was there, which is kept so that its id is its own
    for path, module in model.named_modules():
        for own, param in list(module._parameters.items()):
            name = f"{path}.{own}" if path else own
            if param is None:
                continue
            if id(param) in made:
                setattr(module, own, made[id(param)][1])
            elif param.is_meta:
                made[id(param)] = param, reader.make(param, found[name])
                setattr(module, own, made[id(param)][1])
            elif name in found:
                together = managed(param) is not None and not constructed(param)
                with GatheredParameters(param, enabled=together):
                    param.copy_(reader.folder.read(found[name]))
    reader.finish()
