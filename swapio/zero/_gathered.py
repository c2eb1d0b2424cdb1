"""`GatheredParameters`: whole weights for a while, and what was written into them on all ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..errors import UsageError
from ._away import managed
from ._quiet import quiet

if TYPE_CHECKING:
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["GatheredParameters", "register_external_parameter", "unregister_external_parameter"]

logger = logging.getLogger("swapio")


@contextlib.contextmanager
def GatheredParameters(  # noqa: N802  (DeepSpeed's name)
    params: torch.Tensor | nn.Module | Iterable[torch.Tensor],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Inside, `params` are here and stay here, and may be written. With several ranks, all of them enter and leave it together.

    A written parameter's fp32 master becomes the weight that was written, on all ranks.
    After an error inside nothing is shared: the ranks may hold different weights.

    Args:
        params: a parameter, several, or a module's; those that no engine manages are passed by.
        modifier_rank: the rank whose writes all ranks get, whatever the others wrote. None: all ranks write the same.
        fwd_module: accepted, without effect.
        enabled: False: do nothing.

    Raises:
        UsageError: there is no rank `modifier_rank`; or it is None, and the ranks wrote different values.
    """
    found = [] if not enabled else [entry for p in _each(params) if (entry := managed(p)) is not None]
    by_engine: dict[UnitSet, list[tuple[Unit, int]]] = {}
    for unit, index in found:
        by_engine.setdefault(unit.zero, []).append((unit, index))
    for zero in by_engine:
        if modifier_rank is not None and not 0 <= modifier_rank < zero.ranks.size:
            raise UsageError(f"modifier_rank={modifier_rank}: there are {zero.ranks.size} ranks; use 0 to {zero.ranks.size - 1}")
    with contextlib.ExitStack() as stack:
        for zero, entries in by_engine.items():
            stack.enter_context(zero.written_together())
            for unit in dict.fromkeys(unit for unit, _ in entries):
                zero.open_window(unit)
                stack.callback(zero.leave_window, unit)
        yield
        for zero, entries in by_engine.items():
            if not zero.ranks.alone:
                _share(zero, entries, modifier_rank)


def _each(params: torch.Tensor | nn.Module | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        return [params]
    return params.parameters() if isinstance(params, nn.Module) else params


def _share(zero: UnitSet, entries: Sequence[tuple[Unit, int]], modifier_rank: int | None) -> None:
    """Tell all ranks what was written. They meet here before any of them keeps its slice, so none gathers a mix of old and new."""
    with zero.lock, quiet():
        for unit in {unit for unit, _ in entries}:
            unit.find_writes()
        written = [unit.digest(index) >> 1 | 1 if index in unit.stale_masters else 0 for unit, index in entries]
        told = zero.ranks.all_gather(torch.tensor(written, dtype=torch.int64), what="leaving GatheredParameters")
        for (unit, index), *digests in zip(entries, *(t.tolist() for t in told), strict=True):
            if modifier_rank is not None and any(digests):
                _send(unit, index, modifier_rank)
            elif any(a != b for a, b in itertools.pairwise(digests)):
                raise UsageError(
                    f"{unit.names[index]!r} was not written alike on all ranks: pass modifier_rank=0 to GatheredParameters to give all "
                    "ranks what rank 0 wrote"
                )


def _send(unit: Unit, index: int, source: int) -> None:
    if unit.lease is None:
        raise RuntimeError(f"{unit.name!r} went away while it was written")
    ranks = unit.zero.ranks
    slot = unit.layout.slots[index]
    part = unit.lease.raw[slot.offset : slot.offset + slot.span * slot.dtype.itemsize]
    host = part if part.device.type == "cpu" else part.cpu()
    ranks.broadcast(host, source=source, what=f"sharing what rank {source} wrote into {unit.names[index]!r}")
    unit.stale_masters.add(index)
    if ranks.rank != source:
        if host is not part:
            part.copy_(host)
        unit.weights_written(index)


def register_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Do nothing: a parameter that another module uses comes by itself."""
    _say_not_needed()


def unregister_external_parameter(module: nn.Module, parameter: torch.Tensor) -> None:
    """Do nothing, as `register_external_parameter`."""
    _say_not_needed()


@functools.cache
def _say_not_needed() -> None:
    logger.info("register_external_parameter is not needed: a parameter that another module uses comes by itself")
