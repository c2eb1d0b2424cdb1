"""Weights and optimizer state by parameter, whatever the layout, the slices and the places here: what checkpoints hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self

import torch

from ..memory import copy_to
from ..optim import split_
from ..swap import Kept, Prefetcher, Record, RecordLease
from ._layout import Slot
from ._partition import Partition, Piece
from ._quiet import quiet
from ._step import CHUNK_NUMEL, Chunk
from ._unit import Unit
from ._units import UnitSet

__all__ = ["PortableState", "Portion"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Elements `start` to `stop` of one parameter, in the order in which they lie in memory.

    Attributes:
        field: of the optimizer's state; None: the fp32 master of a trained parameter, the weight of another.
        offset: byte of its weights in the unit's record.
        chunk, begin: where its state is; None where this rank has none.
    """

    unit: Unit
    slot: Slot
    field: str | None
    start: int
    stop: int
    offset: int
    chunk: Chunk | None
    begin: int

    @property
    def name(self) -> str:
        return self.unit.names[self.slot.index]

    @property
    def dtype(self) -> torch.dtype:
        """Of what `read` gives and `write` takes."""
        return torch.float32 if self.slot.trained else self.slot.dtype

    def weight(self) -> Portion:
        """In place of a master the weight that it rounds to, in the weight's own dtype. For `read` alone: nothing else is brought."""
        return dataclasses.replace(self, chunk=None)


class PortableState:
    """Reads and writes portions one after the other; a unit and a chunk are in memory at a time, as in a step.

    Use it as a context manager, between steps, and call `settle` before the rest.

    Args:
        patient: raise `BudgetError` where only letting go of attached units would make room.
    """

    def __init__(self, zero: UnitSet, *, patient: bool = False) -> None:
        self._zero = zero
        self._patient = patient
        self._rank = zero.ranks.rank
        self._leases: list[RecordLease] = []  # of a unit, then of one of its chunks
        self._prefetcher: Prefetcher | None = None
        self._num_pinned = 0  # since `expect`
        self._kept: dict[Record, Kept] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end()
        while self._kept:
            self._zero.manager.forget(*self._kept.popitem())

    def _end(self) -> None:
        self._release(0)
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def expect(self, portions: Sequence[Portion]) -> None:
        """These are going to be read or written, in order: bring them ahead."""
        self._end()
        if self._zero.schedule is None:
            return
        order: list[Record] = []
        pinned: list[Record] = []
        for portion in portions:
            wanted = _records(portion)
            order += wanted[_num_same(pinned, wanted) :]
            pinned = wanted
        self._num_pinned = 0
        self._prefetcher = self._zero.manager.prefetcher()
        self._prefetcher.follow([(record, self._zero.step_place) for record in order], 0)

    def set_aside(self, portions: Sequence[Portion], rest: Iterable[Portion]) -> None:
        """`portions` are going to be written, and `rest` not: keep what is wholly replaced on the drive, until `take_back` or the end."""
        with self._zero.lock, quiet():
            self._end()
            for record in self._replaced(portions, rest):
                kept = self._zero.manager.set_aside(record)
                if kept is not None:
                    self._kept[record] = kept

    def is_aside(self, portion: Portion) -> bool:
        """Whether all that writing a portion changes can be taken back."""
        written = _records(portion)[portion.field is not None :]
        return all(record in self._kept for record in written)

    def take_back(self) -> None:
        """Let what was set aside be as before."""
        with self._zero.lock, quiet():
            self._end()
            while self._kept:
                record, kept = self._kept.popitem()
                self._zero.manager.restore(record, kept)

    def overwrite(self, portions: Sequence[Portion], rest: Iterable[Portion]) -> None:
        """`portions` are going to be written, in order, and `rest` not or later: what is wholly replaced is forgotten, not read."""
        with self._zero.lock, quiet():
            self._end()
            for record in self._replaced(portions, rest):
                self._zero.manager.discard(record)
        self.expect(portions)

    def _replaced(self, portions: Sequence[Portion], rest: Iterable[Portion]) -> set[Record]:
        """Records of which every byte is written."""
        partly = {r for p in rest for r in _records(p)} | {p.unit.record for p in portions if not p.slot.trained}
        records = {r for p in portions for r in _records(p)} - partly
        return {r for r in records if r.extent is not None and r.device is None and not r.in_file}

    def settle(self) -> None:
        """Make updates that are due, and take over what the user wrote into weights.

        Raises:
            UsageError: he wrote what he may not.
        """
        self._zero.close_windows()
        if self._zero.stepper is not None:
            self._zero.stepper.apply_all_due()
        for unit in self._zero.units:
            unit.settle()

    @property
    def fields(self) -> tuple[str, ...]:
        """What the optimizer keeps of each trained parameter."""
        return self._zero.stepper.spec.fields if self._zero.stepper is not None else ()

    def params(self) -> Iterator[tuple[Unit, Slot, str]]:
        """Those with elements, by name."""
        return ((u, s, u.names[s.index]) for u in self._zero.units for s in u.layout.slots if s.span)

    def owned(self) -> Iterator[Portion]:
        """What this rank saves: every element of everything on exactly one rank."""
        for unit in self._zero.units:
            yield from self._portions(unit, unit.partition.pieces[self._rank])

    def kept(self) -> Iterator[Portion]:
        """What this rank must load: all that it has."""
        for unit in self._zero.units:
            whole = Partition(unit.layout, 1).pieces
            yield from self._portions(unit, unit.partition.pieces[self._rank] if self._zero.partitions_weights else whole[0])

    def _portions(self, unit: Unit, pieces: Iterable[Piece]) -> Iterator[Portion]:
        for piece in pieces:
            base = self._zero.record_offset(piece)
            for slot in sorted(unit.layout.slots, key=lambda s: s.start):
                found = piece.overlap(slot)
                if found is None:
                    continue
                for start, stop, chunk in self._cut(unit, slot, *found):
                    offset = base + (start - piece.start) * slot.dtype.itemsize
                    for field in (None, *(self.fields if chunk is not None else ())):
                        begin = start - chunk.start if chunk is not None else 0
                        yield Portion(unit, slot, field, start - slot.start, stop - slot.start, offset, chunk, begin)

    def _cut(self, unit: Unit, slot: Slot, first: int, last: int) -> Iterator[tuple[int, int, Chunk | None]]:
        """Parts of elements of a segment: each in one chunk, or in none."""
        stepper = self._zero.stepper
        chunks = [c for c in stepper.chunks[unit] if c.segment == slot.segment] if stepper is not None and slot.trained else []
        for chunk in sorted(chunks, key=lambda c: c.start):
            start, stop = max(first, chunk.start), min(last, chunk.start + chunk.layout.numel)
            if start < stop:
                yield from _uncovered(first, start)
                yield start, stop, chunk
                first = stop
        yield from _uncovered(first, last)

    def read(self, portion: Portion) -> torch.Tensor:
        """The values, `[numel]` in host memory; good until the next call."""
        with self._zero.lock, quiet():
            numel = portion.stop - portion.start
            weights, chunk = self._pin(portion, dirty=False)
            if chunk is None or portion.chunk is None:
                return _weights(portion, weights).cpu()
            views, own_master = portion.chunk.layout.views(chunk.raw), not portion.chunk.layout.head_nbytes
            if portion.field is None and (own_master or portion.slot.index in portion.unit.stale_masters):
                return _weights(portion, weights).float().cpu()
            if portion.field is not None and views.fields[portion.field].dtype is torch.float32:
                return views.fields[portion.field][portion.begin : portion.begin + numel].cpu()
            values = torch.empty(numel, dtype=torch.float32, device=chunk.raw.device)
            if portion.field is not None:
                views.read_field(portion.field, values, start=portion.begin)
            else:
                views.read_master(values, portion.chunk.weights(portion.unit, weights.raw), start=portion.begin)
            return values.cpu()

    def write(self, portion: Portion, values: torch.Tensor) -> None:
        """Set what `read` gives, and the weight to what a master rounds to."""
        with self._zero.lock, quiet():
            weights, chunk = self._pin(portion, dirty=portion.slot.trained)
            values = values.to(weights.raw.device)
            if chunk is not None and portion.chunk is not None:
                views = portion.chunk.layout.views(chunk.raw)
                if portion.field is not None:
                    if views.fields[portion.field].dtype is torch.float32:
                        copy_to(views.fields[portion.field][portion.begin : portion.begin + values.numel()], values)
                    else:
                        views.store_field(portion.field, values, start=portion.begin)
                elif not portion.chunk.layout.head_nbytes:
                    copy_to(_weights(portion, weights), values)
                else:
                    views.store_master(values, portion.chunk.weights(portion.unit, weights.raw), start=portion.begin)
            elif portion.slot.trained and portion.slot.dtype is torch.bfloat16:
                split_(values, _weights(portion, weights), torch.empty(values.numel(), dtype=torch.int16, device=values.device))
            elif portion.slot.trained:
                copy_to(_weights(portion, weights), values)
            else:
                frozen = _weights(portion, weights)
                if not torch.equal(frozen.view(torch.uint8), values.view(torch.uint8)):  # else what rests in a file stays there
                    weights.mark_dirty(span=_span(portion))
                    copy_to(frozen, values)

    def written(self, unit: Unit, indices: Iterable[int]) -> None:
        """All of these parameters' weights and masters were written."""
        with self._zero.lock, quiet():
            self._release(0)
            indices = list(indices)
            unit.stale_masters.difference_update(indices)
            unit.record_changed(indices)

    def _pin(self, portion: Portion, *, dirty: bool) -> tuple[RecordLease, RecordLease | None]:
        wanted = _records(portion)
        same = _num_same([lease.record for lease in self._leases], wanted)
        self._release(same)
        for record in wanted[same:]:
            self._num_pinned += 1
            if self._prefetcher is not None:
                self._prefetcher.move(self._num_pinned)
            self._leases.append(self._zero.pin(record, self._zero.step_place, patient=self._patient))
        if dirty:
            if portion.field is None:
                self._leases[0].mark_dirty(span=_span(portion))
            else:
                self._leases[1].mark_dirty()
            if portion.field is None and portion.chunk is not None and portion.chunk.layout.head_nbytes:
                self._leases[1].mark_dirty()
        return self._leases[0], self._leases[1] if portion.chunk is not None else None

    def _release(self, keep: int) -> None:
        while len(self._leases) > keep:
            self._leases.pop().release()


def _records(portion: Portion) -> list[Record]:
    return [portion.unit.record, *([portion.chunk.record] if portion.chunk is not None else [])]


def _num_same(pinned: Sequence[Record], wanted: Sequence[Record]) -> int:
    """How many of those that are pinned can stay."""
    return next((i for i, (a, b) in enumerate(zip(pinned, wanted, strict=False)) if a is not b), min(len(pinned), len(wanted)))


def _uncovered(first: int, last: int) -> Iterator[tuple[int, int, None]]:
    for start in range(first, last, CHUNK_NUMEL):
        yield start, min(start + CHUNK_NUMEL, last), None


def _span(portion: Portion) -> slice:
    return slice(portion.offset, portion.offset + (portion.stop - portion.start) * portion.slot.dtype.itemsize)


def _weights(portion: Portion, lease: RecordLease) -> torch.Tensor:
    return lease.raw[_span(portion)].view(portion.slot.dtype)
