"""The optimizer step over all units, chunk by chunk: state comes, is stepped next to its weights, and goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from ..errors import UsageError
from ..optim import ChunkLayout, ChunkStepper, Group, OptimizerSpec, StepRange, chunk_layout, first_nonfinite, merge_
from ..swap import Place, Record
from ._layout import ALIGN_NUMEL, Slot, UnitLayout
from ._partition import Partition, Piece
from ._quiet import quiet
from ._unit import Unit
from ._units import UnitSet

__all__ = ["CHUNK_NUMEL", "Chunk", "ChunkedStep", "Gradients", "chunk_layouts"]

CHUNK_NUMEL = 1 << 20
"""Elements whose state moves in one piece: 10 MiB with a split master and two moments."""


_NORM_NUMEL = 1 << 22  # elements of which an fp32 copy is made at once


def chunk_layouts(
    layout: UnitLayout, pieces: Sequence[Piece], spec: OptimizerSpec, chunk_numel: int
) -> Iterator[tuple[Piece, int, ChunkLayout]]:
    """Each chunk of the trained elements in `pieces`: (piece, first element in the segment, layout)."""
    for piece in pieces:
        if piece.trained:
            for start in range(piece.start, piece.stop, chunk_numel):
                dtype = layout.segments[piece.segment].dtype
                yield piece, start, chunk_layout(spec, min(chunk_numel, piece.stop - start), dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Gradients:
    """What all ranks know of the gradients of a step, before it is made.

    Attributes:
        norm: over all parameters, as they are: of the sum over ranks, times the loss scale.
        bad: the first parameter with a gradient that is not finite, of those that forbid a step.
    """

    norm: torch.Tensor  # fp32 []
    bad: str | None


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """State that moves in one piece."""

    record: Record
    layout: ChunkLayout
    segment: int
    start: int  # element in the segment
    offset: int  # byte of its weights in the unit's record
    sum_start: int  # element of its gradients among this rank's sums

    def weights(self, unit: Unit, raw: torch.Tensor) -> torch.Tensor:
        """Its weights, flat, in the bytes of the unit's record."""
        dtype = unit.layout.segments[self.segment].dtype
        return raw[self.offset : self.offset + self.layout.numel * dtype.itemsize].view(dtype)


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
        self.chunks: dict[Unit, list[Chunk]] = {}
        self._frozen: list[tuple[str, torch.Tensor]] = []  # in a param group, with no state
        self.num_updates: dict[Unit, list[int]] = {}  # by parameter, as PyTorch counts its `step`
        zero.stepper = self

    def pieces(self, unit: Unit) -> list[Piece]:
        """What this rank steps of a unit."""
        ranks = self.zero.ranks
        return (unit.partition.pieces if self.zero.stage else Partition(unit.layout, 1).pieces * ranks.size)[ranks.rank]

    def add_unit(self, unit: Unit) -> None:
        """Reserve the state of a unit; it is zeros until the first step."""
        chunks = self.chunks[unit] = []
        for piece, start, layout in chunk_layouts(unit.layout, self.pieces(unit), self.spec, self.chunk_numel):
            record = self.zero.create(f"{unit.name}#{piece.segment}.{start}", layout.nbytes, self.home)
            itemsize = unit.layout.segments[piece.segment].dtype.itemsize
            offset = self.zero.record_offset(piece) + (start - piece.start) * itemsize
            chunks.append(Chunk(record, layout, piece.segment, start, offset, piece.sum_start + start - piece.start))
        self.num_updates[unit] = [0] * len(unit.params)
        self._frozen += [
            (name, param)
            for name, param, group, slot in zip(unit.names, unit.params, unit.groups, unit.layout.slots, strict=True)
            if group is not None and not slot.trained
        ]

    def store_masters(self, unit: Unit, masters: Mapping[int, torch.Tensor], weights: torch.Tensor) -> None:
        """Store fp32 masters by parameter index: in the state, and rounded in the weights in the bytes of the unit's record.

        The weights of other parameters become their own masters.
        """
        for chunk in self.chunks[unit]:
            known = any(index in masters for index, *_ in _pieces(unit, chunk))
            if not chunk.layout.head_nbytes or (chunk.layout.split and not known):  # zeros in `lo` say it already
                continue
            with self.zero.pin(chunk.record, self.zero.step_place) as lease:
                views, flat_weights = chunk.layout.views(lease.raw), chunk.weights(unit, weights)
                for index, begin, end, source in _pieces(unit, chunk):
                    if index in masters:
                        flat = masters[index].as_strided((unit.layout.slots[index].span,), (1,))
                        part = flat[source : source + end - begin].to(lease.raw.device)
                        views.store_master(part, flat_weights, start=begin)
                    else:
                        views.adopt_weights(flat_weights, start=begin, stop=end)
                lease.mark_dirty(nbytes=chunk.layout.head_nbytes)

    def state(self, unit: Unit, index: int, field: str | None, *, write: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
        """This rank's pieces of one parameter's state: which of its elements, and their values, until the next piece.

        Args:
            field: one of the spec's, fp32; None: what makes masters of 16-bit weights: their lower halves, int16, or all of them, fp32.
            write: the values are going to be changed.
        """
        for chunk in self.chunks[unit]:
            for begin, end, source in [p[1:] for p in _pieces(unit, chunk) if p[0] == index]:
                with self.zero.pin(chunk.record, self.zero.step_place) as lease:
                    views = chunk.layout.views(lease.raw)
                    values = views.fields[field] if field is not None else views.lo if views.lo is not None else views.master
                    if values is None:
                        raise RuntimeError("fp32 weights are their own masters")
                    if write:
                        lease.mark_dirty()
                    yield slice(source, source + end - begin), values[begin:end]

    def master(self, unit: Unit, index: int, weight: torch.Tensor) -> torch.Tensor:
        """The fp32 master of a trained 16-bit parameter, from its present `weight`, a dense view; alone, without other ranks."""
        slot = unit.layout.slots[index]
        master = torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32, device=weight.device)
        flat, hi = master.as_strided((slot.span,), (1,)), weight.as_strided((slot.span,), (1,))
        for part, values in self.state(unit, index, None):
            if values.dtype is torch.int16:
                merge_(hi[part], values.to(weight.device), flat[part])
            else:
                flat[part].copy_(values)
        return master

    def records(self) -> Iterator[Record]:
        """The state, chunk by chunk."""
        return (c.record for chunks in self.chunks.values() for c in chunks)

    def state_nbytes(self) -> int:
        return sum(record.nbytes for record in self.records())

    def gradients(self, *, any_dtype: bool = False) -> Gradients:
        """Sum the gradients over ranks, and look at them. All ranks call it together.

        The norm is that of the norms of the parameters, as in `torch.nn.utils.clip_grad_norm_`.

        Args:
            any_dtype: a gradient that is not finite is bad for fp32 weights too.
        """
        zero = self.zero
        with quiet():
            zero.grads_landed()
            if zero.sums is not None:
                zero.send_grads()
                zero.sums.finish()
            squares: list[float] = []
            norms: list[torch.Tensor] = []
            for unit in zero.units:
                for slot in unit.layout.slots:
                    parts = list(self._flat_grads(unit, slot))
                    norms.append(_norm(parts))
                    squares.append(float(norms[-1]) ** 2)
            if not zero.ranks.alone:
                gathered = zero.ranks.all_gather(torch.tensor(squares, dtype=torch.float64), what="the norm of the gradients")
                norms = [n.float() for n in torch.stack(gathered).sum(0).sqrt()]
            norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
            return Gradients(norm, None if bool(norm.isfinite()) else self._first_bad(any_dtype))

    def _first_bad(self, any_dtype: bool) -> str | None:
        """The same on all ranks."""
        zero = self.zero
        slots = [(unit, slot) for unit in zero.units for slot in unit.layout.slots]
        bad = len(slots)
        for number, (unit, slot) in enumerate(slots):
            if (any_dtype or slot.dtype is not torch.float32) and any(first_nonfinite(p) is not None for p in self._flat_grads(unit, slot)):
                bad = number
                break
        told = zero.ranks.all_gather(torch.tensor([bad]), what="which gradient is not finite")
        bad = min(int(t) for t in told)
        return slots[bad][0].names[slots[bad][1].index] if bad < len(slots) else None

    def _flat_grads(self, unit: Unit, slot: Slot) -> Iterator[torch.Tensor]:
        """The gradient of a parameter, or this rank's slices of its sum."""
        if not slot.trained or not unit.has_grad[slot.index] or not slot.span:
            return
        if self.zero.sums is None:
            if unit.grads is not None:
                yield unit.grads.tensor[unit.layout.grad_bytes(slot)].view(unit.layout.segments[slot.segment].grad_dtype)
            return
        total = self.zero.sums.total(unit)
        for piece in unit.partition.pieces[self.zero.ranks.rank]:
            if piece.trained and (found := piece.overlap(slot)) is not None:
                first, last = found
                yield total[piece.sum_start + first - piece.start : piece.sum_start + last - piece.start]

    def check(self) -> None:
        """

        Raises:
            UsageError: a parameter was frozen when the engine was made, and is not any more.
        """
        for name, param in self._frozen:
            if param.requires_grad:
                raise UsageError(f"{name!r} was frozen at swapio.initialize and has no optimizer state; initialize again to train it")

    def step(self, groups: Sequence[Group], *, scale: float = 1.0, factor: float = 1.0) -> None:
        """Update every parameter that has a gradient, as the live `groups` say, and drop the gradients. After `gradients`.

        Args:
            scale: gradients are divided by it: the loss scale, times the number of ranks.
            factor: and multiplied by it, to clip them.
        """
        zero = self.zero
        zero.detach_idle()  # their memory is needed for staging
        zero.grads_landed()
        zero.leave_room_for_gradients(stepping=True)
        try:
            self._step_units(groups, scale, factor)
        finally:
            zero.leave_room_for_gradients()

    def _step_units(self, groups: Sequence[Group], scale: float, factor: float) -> None:
        zero = self.zero
        with quiet():
            work = [u for u in zero.units if any(u.has_grad)]  # the same on all ranks
            if zero.schedule is not None:
                zero.schedule.announce([(r, zero.step_place) for u in work for r in (u.record, *(c.record for c in self.chunks[u]))])
            for unit in work:
                self._step_unit(unit, groups, scale, factor)
                unit.drop_grads()
            if zero.schedule is not None:
                zero.schedule.end_turn()

    def _step_unit(self, unit: Unit, groups: Sequence[Group], scale: float, factor: float) -> None:
        zero = self.zero
        unit.publish_writes()
        stepped = [i for i, has in enumerate(unit.has_grad) if has]
        counts = self.num_updates[unit]
        for index in stepped:
            counts[index] += 1
        if zero.sums is not None and not zero.stage:
            self._share_sums(unit)
        self._used(unit.record)
        with zero.pin(unit.record, zero.step_place) as weights:
            for chunk in self.chunks[unit]:
                ranges = list(self._ranges(unit, chunk, groups))
                stale = [p for p in _pieces(unit, chunk) if p[0] in unit.stale_masters] if chunk.layout.head_nbytes else []
                self._used(chunk.record)
                if not ranges and not stale:
                    continue
                with zero.pin(chunk.record, zero.step_place) as lease:
                    zero.changing(unit, chunk)
                    views = chunk.layout.views(lease.raw)
                    for _, begin, end, _ in stale:
                        views.adopt_weights(chunk.weights(unit, weights.raw), start=begin, stop=end)
                    self._stepper.step(
                        chunk.weights(unit, weights.raw), self._grads(unit, chunk), views, ranges,
                        grad_scale=None if scale == 1 else scale, grad_factor=None if factor == 1 else factor,
                    )  # fmt: skip
                    del views
                    lease.mark_dirty()
            if zero.stage in (1, 2):
                self._share_weights(unit, weights.raw)
            weights.mark_dirty(span=self._stepped_bytes(unit))
        unit.stale_masters.clear()
        unit.record_changed(stepped)

    def _stepped_bytes(self, unit: Unit) -> slice:
        """Around all trained weights in the unit's record: frozen ones beside them need not be written back."""
        zero = self.zero
        if zero.partitions_weights:
            spans = [(p.shard_offset, p.nbytes) for p in unit.partition.pieces[zero.ranks.rank] if p.trained]
        else:
            spans = [(p.offset, p.nbytes) for owned in unit.partition.pieces for p in owned if p.trained]
        return slice(min((first for first, _ in spans), default=0), max((first + nbytes for first, nbytes in spans), default=0))

    def _used(self, record: Record) -> None:
        if self.zero.schedule is not None:
            self.zero.schedule.used(record, self.zero.step_place)

    def _ranges(self, unit: Unit, chunk: Chunk, groups: Sequence[Group]) -> Iterator[StepRange]:
        for index, begin, end, _ in _pieces(unit, chunk):
            group = unit.groups[index]
            if unit.has_grad[index] and group is not None:
                padded = min(-(-end // ALIGN_NUMEL) * ALIGN_NUMEL, chunk.layout.numel)
                yield StepRange(begin, padded, groups[group], self.num_updates[unit][index])

    def _share_sums(self, unit: Unit) -> None:
        """Put the sums of all ranks into the gradient buffer of each (stage 0)."""
        zero = self.zero
        if zero.sums is None:
            raise RuntimeError("one rank has no sums")
        if unit.grads is None:
            unit.grads = zero.grad_lease(unit)
        for rank, pieces in enumerate(unit.partition.pieces):
            for piece in pieces:
                if not piece.trained:
                    continue
                begin = unit.layout.segments[piece.segment].grad_offset + 4 * piece.start
                target = unit.grads.tensor[begin : begin + 4 * (piece.stop - piece.start)]
                if rank == zero.ranks.rank:
                    host = zero.sums.total(unit)[piece.sum_start : piece.sum_start + piece.stop - piece.start]
                else:
                    host = torch.empty(piece.stop - piece.start)
                zero.ranks.broadcast(host, source=rank, what=f"sharing the gradient of {unit.name!r}")
                target.copy_(host.view(torch.uint8))

    def _share_weights(self, unit: Unit, raw: torch.Tensor) -> None:
        """Give all ranks the slices that each has stepped (stages 1 and 2)."""
        for rank, pieces in enumerate(unit.partition.pieces):
            for piece in pieces:
                if piece.trained:
                    part = raw[piece.offset : piece.offset + piece.nbytes]
                    host = part if part.device.type == "cpu" else part.cpu()
                    self.zero.ranks.broadcast(host, source=rank, what=f"sharing the weights of {unit.name!r}")
                    if host is not part:
                        part.copy_(host)

    def _grads(self, unit: Unit, chunk: Chunk) -> torch.Tensor:
        zero = self.zero
        if zero.sums is not None and zero.stage:
            total = zero.sums.total(unit)[chunk.sum_start : chunk.sum_start + chunk.layout.numel]
            return total if zero.step_place is Place.HOST else total.to(zero.manager.device.torch_device)
        if unit.grads is None:
            raise RuntimeError(f"{unit.name!r} has no gradients")
        segment = unit.layout.segments[chunk.segment]
        itemsize = segment.grad_dtype.itemsize
        begin = segment.grad_offset + chunk.start * itemsize
        return unit.grads.tensor[begin : begin + chunk.layout.numel * itemsize].view(segment.grad_dtype)


def _pieces(unit: Unit, chunk: Chunk) -> Iterator[tuple[int, int, int, int]]:
    """The trained parameters in a chunk: (index, first and past-the-last element in the chunk, first element in the parameter)."""
    stop = chunk.start + chunk.layout.numel
    for slot in sorted(unit.layout.slots, key=lambda s: s.start):
        if slot.segment == chunk.segment and slot.trained and slot.span:
            begin, end = max(slot.start, chunk.start), min(slot.start + slot.span, stop)
            if begin < end:
                yield slot.index, begin - chunk.start, end - chunk.start, begin - slot.start


def _norm(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all parts together, fp32; of one fp32 part exactly as PyTorch computes it."""
    if len(parts) == 1 and (parts[0].dtype is torch.float32 or parts[0].numel() <= _NORM_NUMEL):
        norm: torch.Tensor = torch.linalg.vector_norm(parts[0].float())
        return norm.cpu()
    squares = [float(torch.linalg.vector_norm(block.float())) ** 2 for part in parts for block in part.split(_NORM_NUMEL)]
    return torch.tensor(sum(squares) ** 0.5, dtype=torch.float32)
