"""A model that `swapio.zero.Init` constructed, on its way to an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Self

from torch import nn

from ..config import SwapioConfig
from ..errors import UsageError
from ..memory import trim_heap
from ..swap import SwapManager, Transfer, manager_arguments
from ..zero import ConstructionSet, Lent, UnitSet, constructed, give_back, lend

__all__ = ["Adoption"]


class Adoption:
    """Moves constructed parameters into an engine's units one unit at a time, so that about two are in memory. Does nothing for others.

    Raises:
        UsageError: the model is still being constructed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._params = {id(p) for p in model.parameters()}
        self._stores: dict[ConstructionSet, None] = {}
        self._num_away = 0  # records of the engine
        self._leaving: Transfer[None] | None = None
        for param in model.parameters():
            unit = constructed(param)
            if unit is not None:
                self._stores[unit.zero] = None
        if any(store.constructing for store in self._stores):
            raise UsageError("the model is still being constructed; call swapio.initialize after the block of swapio.zero.Init")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened: stores that are empty end."""
        for store in self._stores:
            if not store.alive:
                store.end("the parameters of this store went to an engine")

    def lend_manager(self, settings: SwapioConfig, undo: contextlib.ExitStack) -> SwapManager | None:
        """The manager that the parameters are in, if it is as `settings` say and holds no other model's: the drive need not hold both."""
        arguments = manager_arguments(settings)
        for store in self._stores:
            if store.arguments == arguments and all(id(p) in self._params for p in store.live()):
                undo.callback(_remove_others, store.manager, store.manager.keys())
                return store.manager
        return None

    @property
    def active(self) -> bool:
        """Whether there is anything to adopt."""
        return bool(self._stores)

    def prepare(self, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        """The parameters of the next unit, as ordinary ones in memory."""
        if self._stores:
            give_back(p for _, p in params)

    def lend(self, params: Iterable[tuple[str, nn.Parameter]], manager: SwapManager) -> list[Lent] | None:
        """Where the bytes of the next unit are on the drive of `manager`; None: it must be copied."""
        return lend((p for _, p in params), manager) if self._stores else None

    def put_away(self, zero: UnitSet) -> None:
        """A unit is taken over: its bytes need not stay in memory. Those of the unit before have been written when this returns."""
        if self._stores and not zero.keep_attached:
            self._wait()
            zero.manager.arena.trim()
            keys = [record.key for record in zero.records[self._num_away :]]
            self._num_away += len(keys)
            self._leaving = zero.manager.evict(keys)

    def _wait(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.wait()

    def finish(self, manager: SwapManager) -> None:
        """All units are taken over: what the parameters came from ends, but for the engine's `manager`."""
        self._wait()
        trim_heap()
        for store in self._stores:
            if store.manager is manager:
                store.hand_over()


def _remove_others(manager: SwapManager, keys: list[str]) -> None:
    """Leave only `keys` in the manager."""
    for key in set(manager.keys()) - set(keys):
        manager.delete(key)
