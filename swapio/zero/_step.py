"""The optimizer step over all units, chunk by chunk: state comes, is stepped next to its weights, and goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..errors import UsageError
from ..optim import ChunkLayout, ChunkStepper, Group, OptimizerSpec, StepRange, chunk_layout, first_nonfinite, split_
from ..swap import Place, Record
from ._layout import ALIGN_NUMEL, UnitLayout
from ._quiet import quiet
from ._unit import Unit
from ._units import UnitSet

__all__ = ["CHUNK_NUMEL", "ChunkedStep", "chunk_layouts"]

CHUNK_NUMEL = 1 << 20
"""Elements whose state moves in one piece: 10 MiB with a split master and two moments."""


def chunk_layouts(layout: UnitLayout, spec: OptimizerSpec, chunk_numel: int) -> Iterator[tuple[int, int, ChunkLayout]]:
    """Each chunk of a unit's trained elements: (segment, first element, layout)."""
    for number, segment in enumerate(layout.segments):
        for start in range(0, segment.num_trained, chunk_numel):
            yield number, start, chunk_layout(spec, min(chunk_numel, segment.num_trained - start), segment.dtype)


@dataclasses.dataclass(slots=True)
class _Chunk:
    record: Record
    layout: ChunkLayout
    segment: int
    start: int  # element in the segment


class ChunkedStep:
    """Owns the optimizer's state and steps it.

    [Note: One compute thread] Chunks are stepped on the caller's thread. A second thread would bring a second OpenMP team that fights
    with the first for the cores (3.9 s against 2.3 s, measured on two cores); reads and write-backs run beside in the I/O threads.

    Args:
        home: where the state rests.
        chunk_numel: elements per chunk.
    """

    def __init__(self, zero: UnitSet, spec: OptimizerSpec, *, home: Place, chunk_numel: int = CHUNK_NUMEL) -> None:
        self.zero = zero
        self.spec = spec
        self.home = home
        self.chunk_numel = chunk_numel
        self._stepper = ChunkStepper(spec)
        self._chunks: dict[Unit, list[_Chunk]] = {}
        self._frozen: list[tuple[str, torch.Tensor]] = []  # in a param group, with no state
        self.num_updates: dict[Unit, list[int]] = {}  # by parameter, as PyTorch counts its `step`

    def add_unit(self, unit: Unit) -> None:
        """Reserve the state of a unit; it is zeros until the first step."""
        self._chunks[unit] = [
            _Chunk(self.zero.create(f"{unit.name}#{segment}.{start}", layout.nbytes, self.home), layout, segment, start)
            for segment, start, layout in chunk_layouts(unit.layout, self.spec, self.chunk_numel)
        ]
        self.num_updates[unit] = [0] * len(unit.params)
        self._frozen += [
            (name, param)
            for name, param, group, slot in zip(unit.names, unit.params, unit.groups, unit.layout.slots, strict=True)
            if group is not None and not slot.trained
        ]

    def store_masters(self, unit: Unit, masters: Mapping[int, torch.Tensor], weights: torch.Tensor) -> None:
        """Split fp32 masters by parameter index into the unit's weights, uint8 `[unit nbytes]`, and the lower halves in its state."""
        for chunk in self._chunks[unit]:
            pieces = [p for p in _pieces(unit, chunk) if p[0] in masters]
            if not chunk.layout.split or not pieces:
                continue
            with self.zero.pin(chunk.record, self.zero.step_place) as lease:
                lo = chunk.layout.views(lease.raw).lo
                if lo is None:
                    raise RuntimeError("a split chunk has lower halves")
                hi = _segment(weights, unit, chunk)
                for index, begin, end, source in pieces:
                    flat = masters[index].as_strided((unit.layout.slots[index].span,), (1,))
                    part = flat[source : source + end - begin].to(lo.device)
                    split_(part, hi[begin:end], lo[begin:end])
                lease.mark_dirty(nbytes=chunk.layout.head_nbytes)

    def state_nbytes(self) -> int:
        return sum(c.layout.nbytes for chunks in self._chunks.values() for c in chunks)

    def nonfinite(self) -> str | None:
        """The first parameter with an infinite or NaN gradient, among those with split masters."""
        self.zero.grads_landed()
        for unit in self.zero.units:
            for slot in unit.layout.slots:
                if unit.grads is not None and unit.has_grad[slot.index] and slot.dtype is not torch.float32:
                    start = unit.layout.segments[slot.segment].grad_offset + slot.start * slot.dtype.itemsize
                    flat = unit.grads.tensor[start : start + slot.span * slot.dtype.itemsize].view(slot.dtype)
                    if first_nonfinite(flat) is not None:
                        return unit.names[slot.index]
        return None

    def step(self, groups: Sequence[Group]) -> None:
        """Update every parameter that has a gradient, as the live `groups` say, and drop the gradients.

        Raises:
            UsageError: a parameter was frozen when the engine was made, and is not any more.
        """
        zero = self.zero
        for name, param in self._frozen:
            if param.requires_grad:
                raise UsageError(f"{name!r} was frozen at swapio.initialize and has no optimizer state; initialize again to train it")
        zero.detach_idle()  # their memory is needed for staging
        zero.grads_landed()
        zero.leave_room_for_gradients(stepping=True)
        try:
            self._step_units(groups)
        finally:
            zero.leave_room_for_gradients()

    def _step_units(self, groups: Sequence[Group]) -> None:
        zero = self.zero
        with quiet():
            work = [u for u in zero.units if any(u.has_grad) and self._chunks.get(u)]
            if zero.schedule is not None:
                zero.schedule.announce([(r, zero.step_place) for u in work for r in (u.record, *(c.record for c in self._chunks[u]))])
            for unit in work:
                self._step_unit(unit, groups)
                unit.drop_grads()
            if zero.schedule is not None:
                zero.schedule.end_turn()

    def _step_unit(self, unit: Unit, groups: Sequence[Group]) -> None:
        zero = self.zero
        if unit.lease is not None:  # held by a view
            unit.find_writes()
            unit.lease.publish()
        stepped = [i for i, has in enumerate(unit.has_grad) if has]
        counts = self.num_updates[unit]
        for index in stepped:
            counts[index] += 1
        if unit.grads is None:
            raise RuntimeError(f"{unit.name!r} has gradients but no buffer for them")
        self._used(unit.record)
        with zero.pin(unit.record, zero.step_place) as weights:
            for chunk in self._chunks[unit]:
                ranges = list(self._ranges(unit, chunk, groups))
                stale = [p for p in _pieces(unit, chunk) if p[0] in unit.stale_masters] if chunk.layout.split else []
                self._used(chunk.record)
                if not ranges and not stale:
                    continue
                with zero.pin(chunk.record, zero.step_place) as lease:
                    views = chunk.layout.views(lease.raw)
                    for _, begin, end, _ in stale:
                        if views.lo is not None:
                            views.lo[begin:end].zero_()
                    self._stepper.step(_segment(weights.raw, unit, chunk), self._grads(unit, chunk), views, ranges)
                    del views
                    lease.mark_dirty()
            weights.mark_dirty()
        unit.stale_masters.clear()
        if unit.lease is not None:  # the view must show the new weights
            zero.pin(unit.record, Place.DEVICE).release()
            unit.weights_stepped(stepped)
        else:
            unit.weights_changed_away(stepped)

    def _used(self, record: Record) -> None:
        if self.zero.schedule is not None:
            self.zero.schedule.used(record, self.zero.step_place)

    def _ranges(self, unit: Unit, chunk: _Chunk, groups: Sequence[Group]) -> Iterator[StepRange]:
        for index, begin, end, _ in _pieces(unit, chunk):
            group = unit.groups[index]
            if unit.has_grad[index] and group is not None:
                padded = min(-(-end // ALIGN_NUMEL) * ALIGN_NUMEL, chunk.layout.numel)
                yield StepRange(begin, padded, groups[group], self.num_updates[unit][index])

    def _grads(self, unit: Unit, chunk: _Chunk) -> torch.Tensor:
        if unit.grads is None:
            raise RuntimeError(f"{unit.name!r} has no gradients")
        segment = unit.layout.segments[chunk.segment]
        itemsize = segment.dtype.itemsize
        begin = segment.grad_offset + chunk.start * itemsize
        return unit.grads.tensor[begin : begin + chunk.layout.numel * itemsize].view(segment.dtype)


def _pieces(unit: Unit, chunk: _Chunk) -> Iterator[tuple[int, int, int, int]]:
    """The trained parameters in a chunk: (index, first and past-the-last element in the chunk, first element in the parameter)."""
    stop = chunk.start + chunk.layout.numel
    for slot in sorted(unit.layout.slots, key=lambda s: s.start):
        if slot.segment == chunk.segment and slot.trained and slot.span:
            begin, end = max(slot.start, chunk.start), min(slot.start + slot.span, stop)
            if begin < end:
                yield slot.index, begin - chunk.start, end - chunk.start, begin - slot.start


def _segment(raw: torch.Tensor, unit: Unit, chunk: _Chunk) -> torch.Tensor:
    """The chunk's weights, flat, in the unit's bytes."""
    segment = unit.layout.segments[chunk.segment]
    begin = segment.offset + chunk.start * segment.dtype.itemsize
    return raw[begin : begin + chunk.layout.numel * segment.dtype.itemsize].view(segment.dtype)
