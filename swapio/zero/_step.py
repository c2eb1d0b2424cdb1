"""The optimizer step over all units, chunk by chunk: state comes, is stepped next to its weights, and goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import torch

from ..errors import UsageError
from ..optim import ChunkLayout, ChunkStepper, Group, OptimizerSpec, StepRange, chunk_layout, merge_
from ..spec import round_up
from ..swap import FilePart, Place, Record
from ._grads import flat_grad
from ._layout import UnitLayout
from ._norms import Gradients, look_at, measure
from ._partition import Partition, Piece
from ._quiet import quiet
from ._unit import Unit
from ._units import UnitSet
from ._update import StepTiming, Update

__all__ = ["CHUNK_NUMEL", "Chunk", "ChunkedStep", "chunk_layouts"]

CHUNK_NUMEL = 1 << 20
"""Elements whose state moves in one piece: 10 MiB with a split master and two moments."""

_CANNOT_SKIP = (
    'the gradient of {!r} is not finite. With optimizer_step="in_backward" other weights have been stepped already, so this step cannot be '
    'skipped: load a checkpoint, and use "in_forward", which skips such steps'
)


def chunk_layouts(
    layout: UnitLayout, pieces: Sequence[Piece], spec: OptimizerSpec, chunk_numel: int
) -> Iterator[tuple[Piece, int, ChunkLayout]]:
    """Each chunk of the trained elements in `pieces`: (piece, first element in the segment, layout)."""
    for piece in pieces:
        if piece.trained:
            for start in range(piece.start, piece.stop, chunk_numel):
                dtype, numel = layout.segments[piece.segment].dtype, min(chunk_numel, piece.stop - start)
                yield piece, start, chunk_layout(spec, numel, dtype)


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """State that moves in one piece."""

    record: Record
    layout: ChunkLayout
    segment: int
    start: int  # element in the segment
    offset: int  # byte of its weights in the unit's record
    sum_start: int  # element of its gradients among this rank's sums
    pieces: list[
        tuple[int, int, int, int]
    ]  # of each trained parameter: index, first and past-the-last element here, first in the parameter

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
        timing: when a unit is stepped.
        live_groups: the param groups as they are now, for steps in backward.
        chunk_numel: elements per chunk.
    """

    def __init__(
        self,
        zero: UnitSet,
        spec: OptimizerSpec,
        *,
        home: Place,
        timing: StepTiming,
        live_groups: Callable[[], Sequence[Group]],
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        self.zero = zero
        self.timing = timing
        self.live_groups = live_groups
        self.due: dict[Unit, Update] = {}
        self._stepped: set[Unit] = set()  # in this backward
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

    def add_unit(self, unit: Unit, *, kept: Container[int] = ()) -> None:
        """Reserve the state of a unit; it is zeros until the first step.

        Args:
            kept: chunks that stay in host memory instead of resting on NVMe.

        [Note: Whole masters] State that is always in memory keeps fp32 masters whole: splitting them saves traffic there is none of, and
        costs about 1 ns per element and step. The weights are rounded as the split rounds them, so the bits are the same.
        """
        chunks = self.chunks[unit] = []
        for number, (piece, start, layout) in enumerate(chunk_layouts(unit.layout, self.pieces(unit), self.spec, self.chunk_numel)):
            home = Place.HOST if number in kept else self.home
            if home is not Place.NVME:
                layout = layout.whole
            record = self.zero.create(f"{unit.name}#{piece.segment}.{start}", layout.nbytes, home)
            itemsize = unit.layout.segments[piece.segment].dtype.itemsize
            offset = self.zero.record_offset(piece) + (start - piece.start) * itemsize
            pieces = list(_pieces(unit, piece.segment, start, start + layout.numel))
            chunks.append(Chunk(record, layout, piece.segment, start, offset, piece.sum_start + start - piece.start, pieces))
        self.num_updates[unit] = [0] * len(unit.params)
        self._frozen += [
            (name, param)
            for name, param, group, slot in zip(unit.names, unit.params, unit.groups, unit.layout.slots, strict=True)
            if group is not None and not slot.trained
        ]

    def has_whole_masters(self, unit: Unit) -> bool:
        return any(chunk.layout.head_nbytes and not chunk.layout.split for chunk in self.chunks[unit])

    def store_masters(self, unit: Unit, masters: Mapping[int, torch.Tensor], weights: torch.Tensor) -> None:
        """Store fp32 masters by parameter index: in the state, and rounded in the weights in the bytes of the unit's record.

        The weights of other parameters become their own masters.
        """
        for chunk in self.chunks[unit]:
            known = any(index in masters for index, *_ in chunk.pieces)
            if not chunk.layout.head_nbytes or (chunk.layout.split and not known):  # zeros in `lo` say it already
                continue
            with self.zero.pin(chunk.record, self.zero.step_place) as lease:
                views, flat_weights = chunk.layout.views(lease.raw), chunk.weights(unit, weights)
                for index, begin, end, source in chunk.pieces:
                    if index in masters:
                        flat = masters[index].as_strided((unit.layout.slots[index].span,), (1,))
                        part = flat[source : source + end - begin].to(lease.raw.device)
                        views.store_master(part, flat_weights, start=begin)
                    else:
                        views.adopt_weights(flat_weights, start=begin, stop=end)
                lease.mark_dirty(nbytes=chunk.layout.head_nbytes)

    def borrow_masters(self, unit: Unit, lower: Mapping[int, FilePart]) -> bool:
        """Let split masters begin with lower halves on the drive, by parameter index; others are zeros. False: some are whole."""
        chunks = self.chunks[unit]
        if lower and not all(chunk.layout.split for chunk in chunks):
            return False
        for chunk in chunks:
            pieces = (
                (2 * begin, lower[index].slice(2 * source, 2 * (end - begin)))
                for index, begin, end, source in chunk.pieces
                if index in lower
            )
            chunk.record.borrowed = list(pieces)
        return True

    def state(self, unit: Unit, index: int, field: str | None, *, write: bool = False) -> Iterator[tuple[slice, torch.Tensor]]:
        """This rank's pieces of one parameter's state: which of its elements, and their values, until the next piece.

        Args:
            field: one of the spec's, fp32; None: what makes masters of 16-bit weights, in each chunk lower halves, int16, or masters, fp32.
            write: the values are going to be changed.
        """
        self.apply_due(unit)
        for chunk in self.chunks[unit]:
            for begin, end, source in [p[1:] for p in chunk.pieces if p[0] == index]:
                with self.zero.pin(chunk.record, self.zero.step_place) as lease:
                    views = chunk.layout.views(lease.raw)
                    if field is not None:
                        values = torch.empty(end - begin, dtype=torch.float32, device=lease.raw.device)
                        views.read_field(field, values, start=begin)
                    else:
                        head = views.lo if views.lo is not None else views.master
                        if head is None:
                            raise RuntimeError("fp32 weights are their own masters")
                        values = head[begin:end]
                    yield slice(source, source + end - begin), values
                    if write:
                        lease.mark_dirty()
                        if field is not None:
                            views.store_field(field, values, start=begin)

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

    def gradients(self, *, any_dtype: bool = False, clips: bool = True) -> Gradients:
        """See `look_at`.

        Args:
            clips: the norm must be known before the step. Else, with everything in memory, it may be left to `step`: see `norm`.

        Raises:
            UsageError: the step must be skipped, but units have been stepped in backward.
        """
        at_hand = self.zero.ranks.alone and self.zero.keep_attached and self.zero.step_place is Place.HOST
        lazily = at_hand and self.timing is StepTiming.AT_STEP and not (clips or any_dtype)
        found = look_at(self.zero, any_dtype=any_dtype, lazily=lazily)
        self._stepper.squares = 0.0 if found.norm is None else None
        if found.bad is not None and self.timing is StepTiming.IN_BACKWARD:
            raise UsageError(_CANNOT_SKIP.format(found.bad))
        return found

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

        `in_forward`, an update is put off until its unit is needed next; what it does is fixed now.

        Args:
            scale: gradients are divided by it: the loss scale, times the number of ranks.
            factor: and multiplied by it, to clip them.
        """
        zero = self.zero
        zero.make_room(None)  # for staging
        zero.shut_grads()
        zero.leave_room_for_gradients(stepping=True)
        groups = [dict(group) for group in groups]  # as they are now
        try:
            with quiet():
                for unit in list(self.due):
                    self.apply_due(unit)
                if self._stepper.squares:  # of a step that failed
                    self._stepper.squares = 0.0
                work = [u for u in zero.units if any(u.has_grad)]  # the same on all ranks
                if zero.schedule is not None and self.timing is not StepTiming.IN_FORWARD:
                    zero.schedule.announce((use for u in work for use in self.uses(u)), last=True)
                for unit in work:
                    self.due[unit] = update = self._update(unit, groups, scale, factor)
                    held = update.grads is not None and update.grads.held()  # who has a view may write other values later
                    if self.timing is not StepTiming.IN_FORWARD or unit.lease is not None or held:
                        self.apply_due(unit)
                    unit.record_changed(update.indices)
                for unit in zero.units:
                    unit.norms = [None] * len(unit.params)
                self._stepped.clear()
        finally:
            zero.leave_room_for_gradients()

    @property
    def norm(self) -> torch.Tensor:
        """fp32 []: of all gradients of the last step, where `gradients` has left it out."""
        return torch.tensor(self._stepper.squares or 0.0, dtype=torch.float64).sqrt().float()

    def uses(self, unit: Unit) -> Iterator[tuple[Record, Place]]:
        """What an update of a unit uses, in order."""
        spilled = [unit.spill] if unit.spill is not None else []
        return ((record, self.zero.step_place) for record in (unit.record, *spilled, *(c.record for c in self.chunks[unit])))

    def grads_complete(self, unit: Unit) -> None:
        """All gradients of a unit came in this backward, on the only rank: step it now if that is when, else let them rest."""
        if self.timing is not StepTiming.IN_BACKWARD or not self.zero.last_micro_batch:
            unit.shut_grads()
            return
        self.zero.grads_landed()
        measure(unit)
        for name, norm, slot in zip(unit.names, unit.norms, unit.layout.slots, strict=True):
            if norm is not None and norm.bad and slot.dtype is not torch.float32:
                raise UsageError(_CANNOT_SKIP.format(name))
        norms = unit.norms
        self.due[unit] = update = self._update(unit, [dict(group) for group in self.live_groups()], 1.0, 1.0)
        self.apply_due(unit)
        unit.record_changed(update.indices)
        unit.norms = norms
        self._stepped.add(unit)

    def check_can_add(self, unit: Unit, index: int) -> None:
        """
        Raises:
            UsageError: the gradient comes after its update.
        """
        if unit in self._stepped:
            raise UsageError(
                f"a gradient of {unit.names[index]!r} came after its unit was stepped: it comes in parts (a weight used in several "
                'checkpointed regions, several backward passes per step). With optimizer_step="in_backward" each unit gets all its '
                'gradients in the last backward before step(): use "in_forward", and load a checkpoint, since the first part was stepped'
            )

    def apply_due(self, unit: Unit) -> None:
        """Make the update that was put off, if there is one."""
        update = self.due.get(unit)
        if update is not None:
            if self.zero.schedule is not None:  # the weights of an attached unit are here
                self.zero.schedule.announce(use for use in self.uses(unit) if unit.lease is None or use[0] is not unit.record)
            with quiet():
                self._make(unit, update)
            del self.due[unit]

    def apply_all_due(self) -> None:
        """Before anybody looks at all weights or state."""
        with self.zero.lock:
            for unit in list(self.due):
                self.apply_due(unit)

    def forget_due(self) -> None:
        """At the end."""
        for unit, update in self.due.items():
            if update.grads is not None and not self.zero.manager.closed:
                self.zero.drop_grads(unit, update.grads)
        self.due.clear()

    def _update(self, unit: Unit, groups: Sequence[Group], scale: float, factor: float) -> Update:
        """Fix what happens to a unit, and take its gradients."""
        unit.publish_writes()
        grads, has_grad = unit.take_grads()
        counts = self.num_updates[unit]
        for index, has in enumerate(has_grad):
            counts[index] += has
        numbers = [count if has else 0 for count, has in zip(counts, has_grad, strict=True)]
        return Update(groups, None if scale == 1 else scale, None if factor == 1 else factor, numbers, grads)

    def _make(self, unit: Unit, update: Update) -> None:
        """Step a unit; where that failed before, go on after the chunks that were stepped."""
        zero = self.zero
        if zero.sums is not None and not zero.stage:
            self._share_sums(unit, update)
        with zero.pin(unit.record, zero.step_place) as weights:
            zero.note(unit.record, zero.step_place)
            if update.num_done == 0 and update.grads is not None and not update.grads.here:
                update.grads.tensor  # noqa: B018  (bring them)
            for chunk in self.chunks[unit][update.num_done :]:
                self._step_chunk(unit, chunk, weights.raw, update)
                update.num_done += 1
            if zero.stage in (1, 2):
                self._share_weights(unit, weights.raw)
            weights.mark_dirty(span=self._stepped_bytes(unit))
        unit.stale_masters.clear()
        if update.grads is not None:
            zero.drop_grads(unit, update.grads)
            update.grads = None

    def _step_chunk(self, unit: Unit, chunk: Chunk, weights: torch.Tensor, update: Update) -> None:
        zero = self.zero
        ranges = list(self._ranges(unit, chunk, update))
        stale = [p for p in chunk.pieces if p[0] in unit.stale_masters] if chunk.layout.head_nbytes else []
        if not ranges and not stale:
            return
        with zero.pin(chunk.record, zero.step_place) as lease:
            zero.note(chunk.record, zero.step_place)
            zero.changing(unit, chunk)
            views = chunk.layout.views(lease.raw)
            for _, begin, end, _ in stale:
                views.adopt_weights(chunk.weights(unit, weights), start=begin, stop=end)
            if ranges:
                self._stepper.step(
                    chunk.weights(unit, weights), self._grads(unit, chunk, update), views, ranges,
                    grad_scale=update.scale, grad_factor=update.factor, place=chunk.start,
                )  # fmt: skip
            del views
            lease.mark_dirty()

    def _stepped_bytes(self, unit: Unit) -> slice:
        """Around all trained weights in the unit's record: frozen ones beside them need not be written back."""
        zero = self.zero
        if zero.partitions_weights:
            spans = [(p.shard_offset, p.nbytes) for p in unit.partition.pieces[zero.ranks.rank] if p.trained]
        else:
            spans = [(p.offset, p.nbytes) for owned in unit.partition.pieces for p in owned if p.trained]
        return slice(min((first for first, _ in spans), default=0), max((first + nbytes for first, nbytes in spans), default=0))

    def _ranges(self, unit: Unit, chunk: Chunk, update: Update) -> Iterator[StepRange]:
        for index, begin, end, _ in chunk.pieces:
            group = unit.groups[index]
            if update.numbers[index] and group is not None:
                padded = min(round_up(end, unit.layout.align_numel), chunk.layout.numel)
                yield StepRange(begin, padded, update.groups[group], update.numbers[index])

    def _share_sums(self, unit: Unit, update: Update) -> None:
        """Put the sums of all ranks into the gradient buffer of each (stage 0)."""
        zero = self.zero
        if zero.sums is None:
            raise RuntimeError("one rank has no sums")
        if update.grads is None:
            update.grads = zero.grad_buffer(unit)
        buffer = update.grads.tensor
        for rank, pieces in enumerate(unit.partition.pieces):
            for piece in pieces:
                if not piece.trained:
                    continue
                begin = unit.layout.segments[piece.segment].grad_offset + 4 * piece.start
                target = buffer[begin : begin + 4 * (piece.stop - piece.start)]
                if rank == zero.ranks.rank:
                    host = zero.sums.total(unit)[piece.sum_start : piece.sum_start + piece.stop - piece.start]
                else:
                    host = torch.empty(piece.stop - piece.start, dtype=torch.float32)
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

    def _grads(self, unit: Unit, chunk: Chunk, update: Update) -> torch.Tensor | list[tuple[int, torch.Tensor]]:
        zero = self.zero
        if zero.sums is not None and zero.stage:
            total = zero.sums.total(unit)[chunk.sum_start : chunk.sum_start + chunk.layout.numel]
            return total if zero.step_place is Place.HOST else total.to(zero.manager.device.torch_device)
        if update.grads is None:
            raise RuntimeError(f"{unit.name!r} has no gradients")
        slots = unit.layout.slots
        if any(update.grads.kept(slots[index]) is not None for index, *_ in chunk.pieces):
            stepped = [p for p in chunk.pieces if update.numbers[p[0]]]
            return [(b, flat_grad(update.grads, unit.layout, slots[i])[at : at + e - b]) for i, b, e, at in stepped]
        segment = unit.layout.segments[chunk.segment]
        itemsize = segment.grad_dtype.itemsize
        begin = segment.grad_offset + chunk.start * itemsize
        return update.grads.tensor[begin : begin + chunk.layout.numel * itemsize].view(segment.grad_dtype)


def _pieces(unit: Unit, segment: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """See `Chunk.pieces`."""
    for slot in sorted(unit.layout.slots, key=lambda s: s.start):
        if slot.segment == segment and slot.trained and slot.span:
            begin, end = max(slot.start, start), min(slot.start + slot.span, stop)
            if begin < end:
                yield slot.index, begin - start, end - start, begin - slot.start
