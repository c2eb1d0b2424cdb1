"""Checkpointing the blocks of a model without a change to its code.

[Note: forward] A block's `forward` is replaced on the instance, where `nn.Module.__call__` finds it: its hooks run once, around the first
run. The replacement knows its module weakly, so that a dropped model is freed at once and not by a garbage collection, and a copy or a
pickle of the module makes one for itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from ..errors import ConfigError, UsageError
from ..zero import find_units
from ._checkpoint import checkpoint_call
from ._configure import configure, current, parse_section

__all__ = ["CheckpointedBlocks", "checkpoint_blocks"]

logger = logging.getLogger("swapio")


def checkpoint_blocks(
    model: nn.Module,
    blocks: Iterable[nn.Module] | None = None,
    *,
    number_checkpoints: int | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> CheckpointedBlocks:
    """Checkpoint every call of the model's blocks that is in training mode and has gradients. All other calls stay as they are.

    Of a checkpointed block, its inputs are kept from forward to backward instead of all that autograd saves in it, and its forward runs a
    second time in backward. Loss and gradients are the same to the bit. Works before and after `swapio.initialize`. Another call for the
    same blocks replaces this one.

    With `number_checkpoints` fewer inputs are kept, for up to one more run of each forward: blocks in a row become a segment, of which only
    the first input is kept, and backward gets those of the others by running the segment. About the square root of the number of blocks
    keeps least. A segment is made only where the order of calls is known: when an `nn.Sequential` with the `forward` of that class is
    called. All other blocks, as in a `ModuleList`, or in a `Sequential` that is iterated over instead, are checkpointed one by one.

    Args:
        model: any; an engine too.
        blocks: modules in it, for example `model.layers`. Default: the members of each `ModuleList` or `Sequential` that move as a unit.
        number_checkpoints: how many inputs are kept at most, and one more for each further `Sequential`. Default: what was configured, else
            the input of every block.
        config: a config in DeepSpeed's format; it is given to `configure` first.

    Returns:
        A handle with the names of the blocks; its `remove()` takes all back.

    Raises:
        ConfigError: a value that cannot work, no blocks found, or a block that is not in the model.
    """
    if config is not None:
        configure(deepspeed_config=config)
    wanted = current().number_checkpoints if number_checkpoints is None else number_checkpoints
    number = parse_section(number_checkpoints=wanted).number_checkpoints
    names = _find(model) if blocks is None else _name(model, blocks)
    if not names:
        raise ConfigError(
            f"blocks: none in the {type(model).__name__}, which has no ModuleList or Sequential of them; name some, as in "
            "blocks=[model.encoder]",
            key="blocks",
        )
    rows = [m for m in model.modules() if _runs_in_order(m) and m not in names and any(child in names for child in m.children())]
    if number is not None:
        in_rows = {child for row in rows for child in row.children()}
        alone = [name for block, name in names.items() if block not in in_rows]
        if alone:
            logger.info("number_checkpoints: %d blocks (%s ...) are in no nn.Sequential, and kept one by one", len(alone), alone[0])
    for module in (*names, *rows):
        _unwrap(module)
    forwards = [_wrap(block) for block in names]
    if number is not None:
        forwards += [_wrap(row, segment=math.ceil(len(names) / number)) for row in rows]
    return CheckpointedBlocks(tuple(names.values()), forwards)


class CheckpointedBlocks:
    """What `checkpoint_blocks` did; as a context manager it takes that back at its end.

    Attributes:
        names: of the checkpointed blocks in the model, in order.
    """

    def __init__(self, names: tuple[str, ...], forwards: Sequence[_Forward]) -> None:
        self.names = names
        self._forwards = forwards

    def remove(self) -> None:
        """Give the blocks their own `forward` back, unless another call replaced this one. Idempotent; graphs that exist stay as they are.

        Raises:
            UsageError: somebody else replaced the `forward` of a block since; nothing is changed then.
        """
        modules = [m for forward in self._forwards if (m := forward.module()) is not None]
        for module in modules:
            if not isinstance(vars(module).get("forward"), _Forward | None):
                raise UsageError(f"the forward of a {type(module).__name__} was replaced since; undo that before remove()")
        for module in modules:
            if vars(module).get("forward") in self._forwards:
                _unwrap(module)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class _Forward:
    """The `forward` of a wrapped module: of a block, or of a `Sequential` that runs its blocks in segments of `segment`."""

    def __init__(self, module: nn.Module, replaced: Callable[..., Any] | None, segment: int) -> None:
        self.module = weakref.ref(module)
        self.replaced = replaced  # what somebody else had put on the instance before
        self.segment = segment

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, plain = self._plain()
        if not (module.training and torch.is_grad_enabled()):
            return plain(*args, **kwargs)
        return self._run_segments(module, *args, **kwargs) if self.segment else checkpoint_call(plain, args, kwargs)

    def _plain(self) -> tuple[nn.Module, Callable[..., Any]]:
        module = self.module()
        if module is None:
            raise UsageError("the module of this forward is gone; call the module itself, and copy it with copy.deepcopy")
        return module, self.replaced or MethodType(type(module).forward, module)

    def _run_segments(self, module: Any, input: Any) -> Any:
        for wrapped, group in itertools.groupby(module, key=lambda m: isinstance(vars(m).get("forward"), _Forward)):
            row = list(group)
            for start in range(0, len(row), self.segment):
                run = functools.partial(_run_row, row[start : start + self.segment])
                input = checkpoint_call(run, (input,), {}) if wrapped else run(input)
        return input

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._plain()[1])

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forward:
        return _Forward(copy.deepcopy(self._plain()[0], memo), copy.deepcopy(self.replaced, memo), self.segment)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Forward, (self._plain()[0], self.replaced, self.segment)


def _run_row(row: Sequence[nn.Module], input: Any) -> Any:
    for module in row:
        input = module(input)
    return input


def _wrap(module: nn.Module, *, segment: int = 0) -> _Forward:
    forward = vars(module)["forward"] = _Forward(module, vars(module).get("forward"), segment)
    return forward


def _unwrap(module: nn.Module) -> None:
    forward = vars(module).get("forward")
    if isinstance(forward, _Forward):
        del vars(module)["forward"]
        if forward.replaced is not None:
            vars(module)["forward"] = forward.replaced


def _runs_in_order(module: nn.Module) -> bool:
    """Whether calling `module` is calling its children in a row."""
    return type(module).forward is nn.Sequential.forward and isinstance(vars(module).get("forward"), _Forward | None)


def _find(model: nn.Module) -> dict[nn.Module, str]:
    """The units that are blocks: members of a list that have parts."""
    found: dict[nn.Module, str] = {}
    for unit in find_units(model):
        inside = isinstance(model.get_submodule(unit.name.rpartition(".")[0]), nn.ModuleList | nn.Sequential)
        if inside and unit.module not in (None, model) and any(True for _ in unit.module.children()):
            found[unit.module] = unit.name
    return found


def _name(model: nn.Module, blocks: Iterable[nn.Module]) -> dict[nn.Module, str]:
    known = {module: name for name, module in model.named_modules()}
    named: dict[nn.Module, str] = {}
    for block in blocks:
        if block not in known:
            raise ConfigError(
                f"blocks: {type(block).__name__} is not in the {type(model).__name__}; name modules that are, as in blocks=[model.encoder]",
                key="blocks",
                value=block,
            )
        named[block] = known[block]
    return named
