"""`Init`: construct a model larger than memory; its parameters leave as they are made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

from ..config import SwapioConfig, load_config
from ..errors import ConfigError
from ..swap import Place, manager_arguments, open_manager
from ._away import ManagedParameter
from ._construct import ConstructionSet, end_unused
from ._world import world

__all__ = ["Init", "constructing_dtype"]


class Init:
    """`with swapio.zero.Init(config_dict_or_path=config): model = Model()`, then `swapio.initialize(model=model, config=config)`.

    The model gets the values that the same seed gives without it, while only some MiB, or the largest module's own parameters, are in
    memory: they rest where `zero_optimization.offload_param` says and come when an operation uses them. So weight init, tying and
    in-place writes work as usual, and so does the finished model without an engine. Buffers, and parameters on other devices, stay where
    they are. The files go when the last parameter does, or with the engine that took them over.

    An `Init` inside another (of the same thread) joins it. If the block raises, nothing is left but parameters that raise `ClosedError`.

    Args:
        module: a module that exists, to be taken over at once.
        mem_efficient_linear, pin_memory, remote_device: accepted; what they tune in DeepSpeed does not exist here.
        config_dict_or_path: as for `swapio.initialize`; `config` is its old name.
        enabled: False: nothing happens.
        dtype: what the floating-point parameters and buffers are cast to at the end; default: they stay as constructed, so that a config
            with `bf16` keeps fp32 masters of them. What rests on NVMe is rounded to `torch.bfloat16` each time it leaves memory, which is
            not before the next module registers parameters: whoever computes with such a weight afterwards (`w.mul_(0.3)`, not
            `normal_(w)`) begins with the rounded one.

    Raises:
        ConfigError: no config, one that cannot work, or an argument that would change results.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        self.enabled = enabled
        self._entered: list[_Construction | None] = []  # None: joined the one around
        if not enabled:
            return
        refused = {
            "data_parallel_group": data_parallel_group,
            "mpu": mpu,
            "zero_param_parallel_group": zero_param_parallel_group,
            "zero_quantized_weights": zero_quantized_weights or None,
            "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights or None,
            "sequence_data_parallel_group": sequence_data_parallel_group,
            "param_swapper": param_swapper,
        }
        for key, value in refused.items():
            if value is not None:
                raise ConfigError(f"zero.Init: {key} is not supported; leave it out", key=key, value=value)
        if remote_device is not None:
            Place.parse(remote_device, key="remote_device")
        if dtype is not None and not dtype.is_floating_point:
            raise ConfigError(f"zero.Init: dtype {dtype} is no float; use for example torch.bfloat16", key="dtype", value=dtype)
        self._dtype = dtype
        self._settings = _load(config_dict_or_path, config)
        if module is not None:
            with self:
                for owner in module.modules():
                    for name, param in owner.named_parameters(recurse=False):
                        _on_parameter(owner, name, param)
                    for name, _ in owner.named_buffers(recurse=False):
                        _on_buffer(owner, name)

    def __enter__(self) -> Self:
        if self.enabled:
            around = _here.construction
            if around is not None and self._dtype not in (None, around.dtype):
                raise ConfigError(
                    f"zero.Init: dtype {self._dtype} inside an Init with dtype {around.dtype}; give it to the outer one",
                    key="dtype",
                    value=self._dtype,
                )
            self._entered.append(self._begin() if around is None else None)
        return self

    def _begin(self) -> _Construction:
        if self._settings is None:
            raise ConfigError("zero.Init: no config; give config_dict_or_path", key="config_dict_or_path")
        end_unused()
        home = Place.parse(self._settings.zero_optimization.offload_param.device, key="zero_optimization.offload_param.device")
        splits = self._dtype in (None, torch.float32) and self._settings.bf16.enabled
        store = ConstructionSet(
            open_manager(self._settings), home=home, dtype=self._dtype, splits=splits, arguments=manager_arguments(self._settings)
        )
        _here.construction = _Construction(store, [])
        _hooks.add()
        return _here.construction

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        construction = self._entered.pop() if self.enabled else None
        if construction is None:
            return
        _here.construction = None
        _hooks.remove()
        finished = False
        try:
            if error is None:
                construction.finish()
                finished = True
        finally:
            if not finished:
                construction.store.end("the construction under swapio.zero.Init failed; construct the model again")


def _load(config_dict_or_path: Any, config: Any) -> SwapioConfig | None:
    given = [c for c in (config_dict_or_path, config) if c is not None]
    if not given and _here.construction is not None:
        return None  # the one around has a config
    if len(given) != 1:
        raise ConfigError("zero.Init: give exactly one of config_dict_or_path and config", key="config_dict_or_path")
    world_size, source = world()
    return load_config(given[0], world_size=world_size, world_size_source=source)


@dataclasses.dataclass
class _Construction:
    store: ConstructionSet
    buffers: list[tuple[weakref.ref[nn.Module], str]]

    @property
    def dtype(self) -> torch.dtype | None:
        return self.store.dtype

    def finish(self) -> None:
        if self.dtype is not None:
            self.store.convert(self.dtype)
            for ref, name in self.buffers:
                module = ref()
                buffer = None if module is None else module._buffers.get(name)
                if module is not None and buffer is not None and buffer.is_floating_point():
                    module._buffers[name] = buffer.to(self.dtype)
        self.store.finish()


class _Here(threading.local):
    construction: _Construction | None = None


_here = _Here()  # what this thread constructs


def constructing_dtype() -> torch.dtype | None:
    """To what the `Init` around casts floating parameters at its end."""
    return _here.construction.dtype if _here.construction is not None else None


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter) -> None:
    if _here.construction is not None:
        _here.construction.store.register(module, name, param)


def _on_buffer(module: nn.Module, name: str, _: Any = None) -> None:
    if _here.construction is not None and _here.construction.dtype is not None:
        _here.construction.buffers.append((weakref.ref(module), name))


def _noting(deepcopy: Callable[..., nn.Parameter]) -> Callable[..., nn.Parameter]:
    """A `__deepcopy__` whose result may leave: copies of modules register nothing."""

    @functools.wraps(deepcopy)
    def noted(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied = deepcopy(self, memo)
        if _here.construction is not None:
            _here.construction.store.copied(copied)
        return copied

    return noted


class _Hooks:
    """What PyTorch calls while any thread constructs, and not a moment longer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._installed = contextlib.ExitStack()

    def add(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._installed.callback(register_module_parameter_registration_hook(_on_parameter).remove)
                self._installed.callback(register_module_buffer_registration_hook(_on_buffer).remove)
                for cls in (nn.Parameter, ManagedParameter):
                    self._patch(cls)

    def _patch(self, cls: type[nn.Parameter]) -> None:
        original = cls.__dict__["__deepcopy__"]
        cls.__deepcopy__ = _noting(original)  # type: ignore[method-assign]
        self._installed.callback(setattr, cls, "__deepcopy__", original)

    def remove(self) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._installed.close()


_hooks = _Hooks()
