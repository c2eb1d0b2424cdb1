"""Parameters that leave memory while their model is constructed.

[Note: Weak] An engine keeps its parameters; here nobody is kept. What a constructor throws away (the weight of a tied head) frees its
record, and the store ends with the last of its parameters, or with the interpreter.

[Note: When a parameter leaves] At its registration it is mostly still uninitialized, and it would come straight back to be initialized. So
it waits until another module registers, and until some MiB are together: writes are large, and what waits is bounded.

[Note: Stored as it will be used] Where fp32 parameters become bfloat16, by the argument `dtype` or in the engine, they are written once, as
that: rounded, or with `split_`, which keeps every bit, as the engine's weights and the lower halves of its masters. Operations go on seeing
what was constructed. The engine's units then begin with these bytes (`SwapManager.lend`): until they are stepped nothing is written again.
Until then the drive has room for both, so that it cannot be full in the first step.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..memory import trim_heap
from ..optim import merge_, split_
from ..swap import FilePart, Place, Record, RecordLease, SwapManager, Transfer, file_part
from ._away import forget, managed, placeholder, raw_grad
from ._layout import Slot, UnitLayout
from ._partition import Partition
from ._quiet import quiet, uninterrupted
from ._ranks import Ranks
from ._unit import Unit, slot_view
from ._units import UnitSet

__all__ = ["ConstructedUnit", "ConstructionSet", "Lent", "constructed", "end_unused", "give_back", "lend", "let_go", "shares_constructed"]

_GATHER_NBYTES = 16 << 20
"""Parameters leave in units of this size, and larger ones alone."""

_OPEN: set[ConstructionSet] = set()  # a set lives as long as one of its parameters, which hold nothing themselves
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GRAD: Any = torch.Tensor.grad
_use_count = torch._C._storage_Use_Count


class Lent(NamedTuple):
    """Where the bytes of a parameter are that an engine takes over: its weights as `slot` says, and the lower halves if it was split."""

    slot: Slot
    weights: FilePart
    lower: FilePart | None


class ConstructedUnit(Unit):
    """A unit whose parameters may die, become another dtype or shape, or be given back, one by one.

    Attributes:
        stored: how they lie in the record, if not as they are shown; lower halves lie behind it.
    """

    zero: ConstructionSet
    stored: UnitLayout

    def load(self, raw: torch.Tensor, shown: torch.Tensor) -> None:
        """From the bytes of the record to those that are shown."""
        for index, slot in enumerate(self.stored.slots):
            view, lower = self.layout_view(shown, index), self._lower(index)
            if lower is None:
                view.copy_(slot_view(raw, slot))
            else:
                merge_(_flat(slot_view(raw, slot)), raw[lower].view(torch.int16), _flat(view))

    def store(self, values: Sequence[torch.Tensor], raw: torch.Tensor) -> None:
        """The values of all parameters into the bytes of the record."""
        for index, (slot, value) in enumerate(zip(self.stored.slots, values, strict=True)):
            view, lower = slot_view(raw, slot), self._lower(index)
            if lower is None:
                view.copy_(value)
            else:
                dense = value.detach()
                if tuple(value.stride()) != slot.stride:
                    dense = torch.empty_strided(slot.shape, slot.stride, dtype=value.dtype, device="cpu").copy_(value)
                split_(_flat(dense), _flat(view), raw[lower].view(torch.int16))

    def _lower(self, index: int) -> slice | None:
        """Bytes of the record that hold the lower halves of a parameter."""
        slot = self.stored.slots[index]
        if not self.zero.splits or slot.dtype is self.layout.slots[index].dtype:
            return None
        start = self.stored.nbytes + slot.offset
        return slice(start, start + slot.span * slot.dtype.itemsize)

    def show_stored(self) -> None:
        """Let parameters that are away be as they were rounded from now on."""
        if self.lease is not None or self.stored is self.layout or self.zero.splits:
            return
        self.layout = self.stored
        self._stand_ins.clear()
        for index, ref in enumerate(self._refs):
            param, slot = ref(), self.layout.slots[index]
            if param is not None:
                _SET_DATA(param, placeholder(slot.dtype, self.device, slot.shape))

    def lend(self, index: int) -> Lent:
        """Where a parameter's bytes are. The unit is on the drive."""
        slot, lower = self.stored.slots[index], self._lower(index)
        weights, *halves = (
            self.zero.manager.lend(self.record, part.start, part.stop - part.start)
            for part in (slice(slot.offset, slot.offset + slot.span * slot.dtype.itemsize), lower)
            if part is not None
        )
        return Lent(slot, weights, halves[0] if halves else None)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters; in the place of one that is gone, one that shows nothing."""
        return [self._stand_in(i) if (p := ref()) is None else p for i, ref in enumerate(self._refs)]

    @params.setter
    def params(self, params: list[nn.Parameter]) -> None:
        me = weakref.ref(self)
        self._refs: list[Callable[[], nn.Parameter | None]] = [
            weakref.ref(p, functools.partial(_died, me, i)) for i, p in enumerate(params)
        ]
        self._stand_ins: dict[int, nn.Parameter] = {}

    def _stand_in(self, index: int) -> nn.Parameter:
        if index not in self._stand_ins:
            slot = self.layout.slots[index]
            with quiet():
                self._stand_ins[index] = nn.Parameter(placeholder(slot.dtype, self.device, slot.shape), requires_grad=False)
        return self._stand_ins[index]

    def live(self) -> list[nn.Parameter]:
        """The parameters that are still here."""
        return [p for ref in self._refs if (p := ref()) is not None]

    def is_live(self, index: int) -> bool:
        return self._refs[index]() is not None

    def lost(self, index: int) -> None:
        """A parameter is not of this unit any more."""
        self._refs[index] = _nobody
        self.zero.alive.discard((self, index))

    def attach(self) -> None:
        if self.lease is None:
            with quiet():
                self._part_with_converted(self._foreign(placeholder_is_ours=True))
        super().attach()

    def detach(self) -> bool:
        if self.lease is not None and not self.pins:
            with quiet():
                self._part_with_converted(self._foreign())
            if not self.live():
                self.zero.drop(self)
                return True
        return super().detach()

    def _part_with_converted(self, foreign: Iterable[int]) -> None:
        """Parameters whose data is of another dtype, shape or device now (`model.half()`) are new ones."""
        for index in foreign:
            slot, param = self.layout.slots[index], self.params[index]
            if (param.dtype, tuple(param.shape), param.device) != (slot.dtype, slot.shape, self.device):
                param.__class__ = nn.Parameter
                forget(param)
                self.lost(index)
                self.zero.add(self.names[index], param)

    def give_back(self, indices: Iterable[int]) -> None:
        """Make some parameters ordinary again, in memory of their own."""
        with quiet():
            self.attach()
            self.find_writes()
            if self.lease is None:
                raise RuntimeError(f"{self.name!r} went away while it was given back")
            for index in indices:
                param = self.params[index]
                _SET_DATA(param, self.layout_view(self.lease.raw, index).clone())
                param.__class__ = nn.Parameter
                forget(param)
                self.lost(index)
            self.detach()

    def get_grad(self, index: int) -> torch.Tensor | None:
        """There is no gradient buffer: what autograd left is the gradient."""
        return raw_grad(self.params[index])

    def set_grad(self, index: int, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self.params[index], value)


def _nobody() -> None:
    return None


def _died(unit_ref: weakref.ref[ConstructedUnit], index: int, _: Any) -> None:
    unit = unit_ref()
    if unit is not None:
        unit.lost(index)
        unit.zero.end_if_unused()


class _ShownLease:
    """What `stored` stands for, in ordinary memory, as before it left."""

    def __init__(self, unit: ConstructedUnit) -> None:
        self._unit = unit
        self._dirty = False
        self.raw = torch.empty(unit.layout.nbytes, dtype=torch.uint8, device="cpu")
        with unit.zero.pin(unit.record, Place.HOST) as lease:
            unit.load(lease.raw, self.raw)

    def mark_dirty(self, *, span: slice | None = None) -> None:
        self._dirty = True

    def publish(self) -> None:
        if self._dirty:
            self._dirty = False
            unit = self._unit
            with unit.zero.pin(unit.record, Place.HOST) as lease:
                unit.store([unit.layout_view(self.raw, slot.index) for slot in unit.layout.slots], lease.raw)
                lease.mark_dirty()

    def release(self) -> None:
        self.publish()
        if hasattr(self, "raw"):
            del self.raw


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
                unit.store([p for _, p in params], lease.raw)
                lease.mark_dirty()
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
            return _ShownLease(unit)
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


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


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
