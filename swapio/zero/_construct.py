"""Parameters that leave memory while their model is constructed.

[Note: Weak] An engine keeps its parameters; here nobody is kept. What a constructor throws away (the weight of a tied head) frees its
record, and the store ends with the last of its parameters, or with the interpreter.

[Note: When a parameter leaves] At its registration it is mostly still uninitialized, and it would come straight back to be initialized. So
it waits until another module registers, and until some MiB are together: writes are large, and what waits is bounded.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..memory import trim_heap
from ..swap import Place, Record, RecordLease, SwapManager, Transfer, file_part
from ._away import forget, managed
from ._constructed import ConstructedUnit, Lent, ShownLease
from ._layout import UnitLayout
from ._partition import Partition
from ._quiet import quiet, uninterrupted
from ._ranks import Ranks
from ._unit import Unit
from ._units import UnitSet

__all__ = ["ConstructionSet", "Lent", "constructed", "end_unused", "give_back", "lend", "let_go", "shares_constructed"]

_GATHER_NBYTES = 16 << 20
"""Parameters leave in units of this size, and larger ones alone."""

_OPEN: set[ConstructionSet] = set()  # a set lives as long as one of its parameters, which hold nothing themselves
_use_count = torch._C._storage_Use_Count


class _Waiting(NamedTuple):
    name: str
    ref: weakref.ref[nn.Parameter]


class ConstructionSet(UnitSet):
    """The units of parameters under construction. It owns its manager until `hand_over`; computing is the host's.

    Args:
        home: where the parameters rest.
        dtype: as what floating-point parameters end.
        splits: they stay fp32, and the engine will split them.
        arguments: of the manager, to compare with those of another config.
    """

    def __init__(self, manager: SwapManager, *, home: Place, dtype: torch.dtype | None, splits: bool, arguments: dict[str, Any]) -> None:
        ranks = Ranks(timeout_s=manager.timeout_s, alone=True)
        super().__init__(manager, owns_manager=False, step_place=Place.HOST, keep_attached=False, ranks=ranks, stage=0)
        self._prefix = self._prefix.replace("engine", "construction")
        self.schedule = None  # constructors and `apply` keep no order worth following
        self.arguments = arguments
        self.constructing = True
        self.alive: set[tuple[ConstructedUnit, int]] = set()  # who is still here; finalizers of any thread take from it
        self._home = home
        self.dtype = dtype
        self.splits = splits
        self._waiting: dict[int, _Waiting] = {}  # by id
        self._num_waiting_nbytes = 0  # since the last flush
        self._registering: Callable[[], nn.Module | None] = lambda: None
        self._leaving: Transfer[None] | None = None
        self._count = 0
        capacity = manager.arena.capacity
        self._gather_nbytes = _GATHER_NBYTES if capacity is None else min(_GATHER_NBYTES, capacity // 8)
        self._end_manager = weakref.finalize(self, manager.close)
        _OPEN.add(self)

    # --- what arrives ---

    def register(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """`module` gets a parameter: those of other modules may leave now."""
        if module is not self._registering():
            self._leave_if_many()
            self._registering = weakref.ref(module)
        self.add(f"{type(module).__name__}.{name}", param)

    def copied(self, param: nn.Parameter) -> None:
        """`param` is a finished copy of another."""
        self._leave_if_many()
        self.add("copy", param)

    def _leave_if_many(self) -> None:
        if self._num_waiting_nbytes >= self._gather_nbytes:
            self.flush()

    def add(self, name: str, param: nn.Parameter) -> None:
        """Let an ordinary parameter wait."""
        known = self._waiting.get(id(param))
        if type(param) is nn.Parameter and (known is None or known.ref() is not param):
            self._waiting[id(param)] = _Waiting(name, weakref.ref(param))
            if _can_leave(param):
                self._num_waiting_nbytes += param.nbytes

    def flush(self) -> None:
        """Move what waits into records; what is not in host memory, or in a view that somebody else has too, waits on."""
        with uninterrupted(), self.lock, quiet():
            self._tidy()
            self._num_waiting_nbytes = 0
            waiting, self._waiting = self._waiting, {}
            for unit in self._cut(waiting):
                try:
                    self._take(unit)
                except BaseException:
                    self._waiting |= waiting
                    raise
            trim_heap()

    def _cut(self, waiting: dict[int, _Waiting]) -> Iterator[list[tuple[str, nn.Parameter]]]:
        group: list[tuple[str, nn.Parameter]] = []
        nbytes = 0
        for key, (name, ref) in waiting.items():
            param = ref()
            if param is None or type(param) is not nn.Parameter:
                continue
            if not _can_leave(param) or _held(param):
                self._waiting[key] = _Waiting(name, ref)
                continue
            if group and nbytes + param.nbytes > self._gather_nbytes:
                yield group
                group, nbytes = [], 0
            group.append((name, param))
            nbytes += param.nbytes
        if group:
            yield group

    def _take(self, params: list[tuple[str, nn.Parameter]]) -> None:
        self.detach_idle()
        self.manager.arena.trim()
        frozen = [False] * len(params)
        layout = stored = UnitLayout([p for _, p in params], frozen)
        if self._converts and any(p.dtype is torch.float32 for _, p in params):
            stored = UnitLayout([_as_stored(p) for _, p in params], frozen)
        self._count += 1
        lower_nbytes = stored.nbytes if self.splits and stored is not layout else 0
        record = self.create(f"{self._count} {params[0][0]}", stored.nbytes + lower_nbytes, self._home)
        try:
            unit = ConstructedUnit(self, record.key, params, [None] * len(params), record, layout, Partition(layout, 1))
            unit.stored = stored
            with self.pin(record, Place.HOST) as lease:
                lease.mark_dirty(nbytes=unit.store([p for _, p in params], lease.raw))
        except BaseException:
            self._forget_record(record)
            raise
        unit.manage()
        self.units.append(unit)
        self.alive.update((unit, index) for index in range(len(params)))
        self._leave(record)

    @property
    def _converts(self) -> bool:
        """See [Note: Stored as it will be used]."""
        return self._home is Place.NVME and (self.splits or self.dtype is torch.bfloat16)

    def convert(self, dtype: torch.dtype) -> None:
        """Make all floating-point parameters of one dtype, unit by unit; nothing is attached or waits for long."""
        self.flush()
        with uninterrupted(), self.lock, quiet():
            self.detach_idle()
            for unit in self._constructed():
                unit.show_stored()
        waiting = [p for w in self._waiting.values() if (p := w.ref()) is not None]
        with torch.no_grad():
            for params in itertools.chain([waiting], (unit.live() for unit in self._constructed())):
                for param in params:
                    if param.is_floating_point() and param.dtype is not dtype:
                        param.data = param.to(dtype)

    def finish(self) -> None:
        """Nothing more is constructed: what can leave has left when this returns."""
        with self.lock:
            self.flush()
            self.detach_idle()
            self.flush()  # what was converted last
            self._wait_for_leaving()
            self.manager.arena.trim()
        self.constructing = False
        self.end_if_unused()

    # --- what goes ---

    def pin(self, record: Record, place: Place, *, patient: bool = False) -> RecordLease:
        return super().pin(record, Place.HOST, patient=patient)

    def bring(self, unit: Unit) -> Any:
        if isinstance(unit, ConstructedUnit) and unit.stored is not unit.layout:
            return ShownLease(unit)
        return super().bring(unit)

    def make_room(self, wanted: Unit | None) -> None:
        super().make_room(wanted)
        self._leave_if_many()

    def detached(self, unit: Unit) -> None:
        super().detached(unit)
        if self.constructing:
            self._leave(unit.record)

    def _leave(self, record: Record) -> None:
        """Give the host memory of a record up; the one before may take until now to be written."""
        self._wait_for_leaving()
        self._leaving = self.manager.evict([record.key])

    def _wait_for_leaving(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.wait()

    def _tidy(self) -> None:
        """Forget units without parameters."""
        for unit in self._constructed():
            if not unit.live():
                self.drop(unit)

    def drop(self, unit: ConstructedUnit) -> None:
        """Forget a unit, and its bytes."""
        self._wait_for_leaving()
        self.units.remove(unit)
        self._attached.pop(unit, None)
        unit.abandon()
        self._forget_record(unit.record)

    def _forget_record(self, record: Record) -> None:
        self.records.remove(record)
        self._remove([record])

    # --- who is there ---

    def _constructed(self) -> list[ConstructedUnit]:
        return [unit for unit in self.units if isinstance(unit, ConstructedUnit)]

    def live(self) -> list[nn.Parameter]:
        """The parameters whose bytes are here."""
        return [param for unit in self._constructed() for param in unit.live()]

    # --- the end ---

    def hand_over(self) -> None:
        """Leave the manager to the caller, who closes it."""
        self._end_manager.detach()

    def end(self, reason: str) -> None:
        """Close, and the manager too unless it was handed over; use of what is still here raises `reason`."""
        _OPEN.discard(self)
        self.constructing = False
        self.owns_manager = self._end_manager.alive  # its end is the end of the records too
        self.close(reason, restore=False)
        self.alive.clear()
        self._end_manager()

    def end_if_unused(self) -> None:
        """End if no parameter is left. A thread of the manager, which cannot wait for itself, leaves it to the next `Init`."""
        if not self.constructing and not self.alive and not threading.current_thread().name.startswith("swapio"):
            self.end("the parameters of this store are gone")


def constructed(param: object) -> ConstructedUnit | None:
    """The unit of a parameter that was constructed here, and is not an engine's."""
    entry = managed(param)
    return entry[0] if entry is not None and isinstance(entry[0], ConstructedUnit) else None


def give_back(params: Iterable[nn.Parameter]) -> None:
    """Make those of `params` that were constructed here ordinary, in memory of their own, and forget their bytes."""
    found: dict[ConstructedUnit, list[int]] = {}
    for param in params:
        entry = managed(param)
        if entry is not None and isinstance(entry[0], ConstructedUnit):
            found.setdefault(entry[0], []).append(entry[1])
    for unit, indices in found.items():
        with uninterrupted(), unit.zero.lock:
            unit.give_back(indices)


def lend(params: Iterable[nn.Parameter], manager: SwapManager) -> list[Lent] | None:
    """Where the bytes of parameters that were constructed here are on the drive of `manager`; None: not all are, or in use."""
    found: list[Lent] = []
    for param in params:
        unit = constructed(param)
        if unit is None or unit.zero.manager is not manager or unit.record.home is not Place.NVME:
            return None
        with uninterrupted(), unit.zero.lock:
            unit.settle()
            if not unit.detach() or (entry := managed(param)) is None:
                return None
            if unit.record.dirty:
                manager.evict([unit.record.key]).wait()
            found.append(unit.lend(entry[1]))
    return found


def let_go(params: Iterable[nn.Parameter]) -> None:
    """Forget parameters whose bytes were lent: they show nothing until somebody manages them."""
    for param in params:
        unit, entry = constructed(param), managed(param)
        if unit is not None and entry is not None:
            with uninterrupted(), unit.zero.lock:
                param.__class__ = nn.Parameter
                forget(param)
                unit.lost(entry[1])
                if not unit.live():
                    unit.zero.drop(unit)


def shares_constructed(tensor: torch.Tensor) -> str | None:
    """The name of a constructed parameter whose bytes `tensor` shows."""
    for store in list(_OPEN):
        unit = store.saved.units.get(tensor.untyped_storage().data_ptr())
        if isinstance(unit, ConstructedUnit):
            index = unit.layout.slot_at(int(tensor.storage_offset()) * tensor.element_size()).index
            if unit.is_live(index):
                return unit.names[index]
    return None


def end_unused() -> None:
    """End every set whose parameters are gone."""
    for store in list(_OPEN):
        store.end_if_unused()


def _as_stored(param: nn.Parameter) -> torch.Tensor:
    dtype = torch.bfloat16 if param.dtype is torch.float32 else param.dtype
    return torch.empty_strided(param.shape, param.stride(), dtype=dtype, device="meta")


def _can_leave(param: nn.Parameter) -> bool:
    return (
        param.device.type == "cpu"
        and param.layout is torch.strided
        and not param.is_quantized
        and not param.is_inference()
        and param.numel() > 0
        and file_part(param) is None  # what is mapped is not in memory
    )


def _num_uses(param: nn.Parameter) -> int:
    return int(_use_count(param.untyped_storage()._cdata))


_NUM_USES_ALONE = _num_uses(nn.Parameter(torch.empty(1, device="cpu")))


def _held(param: nn.Parameter) -> bool:
    """Whether somebody else has a view of an ordinary parameter's memory, and must go on seeing what is written to it."""
    return _num_uses(param) > _NUM_USES_ALONE
