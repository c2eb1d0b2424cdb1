"""All units of a model: who is attached, what comes next, where gradients gather, and the windows of the modules."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import BudgetError, ClosedError, RankError, SwapioError
from ..memory import Event, Lease
from ..swap import FilePart, Place, Record, RecordLease, SwapManager
from ._gather import GatheredLease
from ._grads import DeviceGrads, GradBuffer, LeasedGrads, SpilledGrads
from ._hooks import add_window, load_together, remove_hooks, windows
from ._partition import Piece
from ._quiet import quiet, uninterrupted
from ._ranks import Ranks
from ._saved import SavedTensors
from ._schedule import Schedule
from ._sums import GradientSums
from ._unit import Unit

if TYPE_CHECKING:
    from ._snapshot import Snapshot
    from ._step import Chunk, ChunkedStep

__all__ = ["UnitSet"]

logger = logging.getLogger("swapio")
_numbers = itertools.count(1)


class UnitSet:
    """The units of one engine. One re-entrant lock guards attaching and letting go; waits for bytes happen under it.

    Args:
        manager: where the records live.
        step_place: where the optimizer runs, and so where gradients gather.
        owns_manager: the manager ends with the engine; else the records are removed from it one by one.
        keep_attached: nothing ever has to go, so units stay attached once they are here.
        stage: what the ranks partition: the optimizer's state (1), gradients too (2), weights too (3).
        plain_grads: no optimizer belongs to the engine: `.grad` is autograd's own, for one that the user has.
    """

    def __init__(
        self,
        manager: SwapManager,
        *,
        owns_manager: bool,
        step_place: Place,
        keep_attached: bool,
        ranks: Ranks,
        stage: int,
        plain_grads: bool = False,
    ) -> None:
        self.manager = manager
        self.ranks = ranks
        self.stage = stage
        self.plain_grads = plain_grads
        self.partitions_grads = stage >= 2 and not ranks.alone
        self.partitions_weights = stage == 3 and not ranks.alone
        self.sums = None if ranks.alone else GradientSums(self)
        self.sync = True  # gradients go to the ranks that sum them as they come
        self.modifying = False  # all ranks write weights together
        self.num_steps = 0
        self.loss_scale = 1.0  # of fp16: gradients are that much larger until the step
        self._stepped = threading.Condition()
        self.owns_manager = owns_manager
        self.records: list[Record] = []
        self._prefix = "" if owns_manager else f"engine {next(_numbers)}/"  # several engines may share a manager
        self.step_place = manager.place(step_place)
        self.keep_attached = keep_attached
        self.lock = threading.RLock()
        self.saved = SavedTensors()
        self.units: list[Unit] = []
        self.stepper: ChunkedStep | None = None  # as soon as there is one
        self.snapshot: Snapshot | None = None  # being saved
        self.closed: str | None = None
        self._attached: dict[Unit, None] = {}
        self._windows: list[tuple[Unit, int | None]] = []  # with the backward in which saved-tensor hooks were pushed
        self._handles: list[Any] = []
        self._landing: list[Event] = []
        self._grads_nbytes = self._grads_coming = 0  # blocks of what is kept until a step, and of what is not there yet
        self._largest_grads = 0
        self.last_micro_batch = True  # after this backward comes a step
        self._last: Unit | None = None
        self.schedule = None if keep_attached else Schedule(manager)

    def create(self, name: str, nbytes: int, home: Place, in_file: Sequence[tuple[int, FilePart]] = ()) -> Record:
        """A record of this engine's."""
        record = self.manager.create(self._prefix + name, nbytes, home=home, in_file=in_file)
        self.records.append(record)
        return record

    # --- among ranks ---

    def record_offset(self, piece: Piece) -> int:
        """Byte of a piece's weights in the record: of this rank's slice, or of the whole unit."""
        return piece.shard_offset if self.partitions_weights else piece.offset

    def bring(self, unit: Unit) -> RecordLease | GatheredLease:
        """The whole weights of a unit, where ops run."""
        return GatheredLease(self, unit) if self.partitions_weights else self.pin(unit.record, Place.DEVICE)

    def gather(self, unit: Unit, whole: torch.Tensor) -> None:
        """Fill `whole`, uint8 `[unit nbytes]` in host memory, with the slices of all ranks."""
        pieces = [[whole[p.offset : p.offset + p.nbytes] for p in owned] for owned in unit.partition.pieces]
        with self.pin(unit.record, Place.HOST) as shard:
            for piece, part in zip(unit.partition.pieces[self.ranks.rank], pieces[self.ranks.rank], strict=True):
                part.copy_(shard.raw[piece.shard_offset : piece.shard_offset + piece.nbytes])
        into = {rank: pieces[rank] for rank in self.ranks.others if pieces[rank]}
        self.ranks.get(unit.number, num_steps=self.num_steps, into=into, what=f"gathering {unit.name!r}")

    @contextlib.contextmanager
    def shard(self, unit: int, num_steps: int) -> Iterator[list[torch.Tensor]]:
        with self._stepped:
            if not self._stepped.wait_for(lambda: self.num_steps >= num_steps or self.closed is not None, self.ranks.timeout_s):
                raise RankError(f"rank {self.ranks.rank} is at step {self.num_steps}, and was asked for weights of step {num_steps}")
        wanted = self.units[unit]
        with self.manager.pin(wanted.record, Place.HOST, self._stepped) as shard:
            owned = wanted.partition.pieces[self.ranks.rank]
            yield [shard.raw[p.shard_offset : p.shard_offset + p.nbytes] for p in owned]

    def slots(self, unit: int) -> list[torch.Tensor]:
        return self._sums.slots(unit)

    def received(self, source: int, unit: int, number: int, pieces: list[torch.Tensor]) -> None:
        self._sums.received(source, unit, number, pieces)

    def failed(self, error: RankError) -> None:
        self._sums.failed(error)

    @property
    def _sums(self) -> GradientSums:
        if self.sums is None:
            raise RuntimeError("one rank has no sums")
        return self.sums

    def step_ended(self) -> None:
        """All of this rank's slices are what the step made them."""
        with self._stepped:
            self.num_steps += 1
            self._stepped.notify_all()
        if self.schedule is not None:
            self.schedule.end_turn()
        self.refresh_views()

    def refresh_views(self) -> None:
        """Let gathered weights that somebody holds show what all ranks have written into their slices."""
        if self.partitions_weights:
            for unit in self._attached:
                if isinstance(unit.lease, GatheredLease):
                    unit.lease.refresh()

    def grads_complete(self, unit: Unit) -> None:
        """All gradients of a unit came: they go to the ranks that sum them, to the drive, or into the weights."""
        if self.partitions_grads and self.sync:
            self._sums.put(unit)
        elif self.stepper is not None and self.ranks.alone:
            self.stepper.grads_complete(unit)

    def send_grads(self, *, but: Unit | None = None) -> None:
        """Send the gradients of units that got only some."""
        for unit in self.units:
            if unit is not but and unit.grads is not None:
                self._sums.put(unit, keep=self.stage == 0)

    def backward_ended(self) -> None:
        """No more gradients will come from this backward."""
        with self.lock, quiet():
            if self.partitions_grads and self.sync:
                self.send_grads()
            self.shut_grads()

    @contextlib.contextmanager
    def written_together(self) -> Iterator[None]:
        """Inside, all ranks write the same weights; each keeps its slices when it ends."""
        if not self.partitions_weights:
            yield
            return
        self.ranks.meet("waiting for all ranks to write weights")  # until then some may read the old ones
        before, self.modifying = self.modifying, True
        try:
            yield
            with self.lock:
                for unit in list(self._attached):
                    unit.publish_writes()
        finally:
            self.modifying = before
        self.ranks.meet("waiting for all ranks to have written weights")

    # --- called by units ---

    def changing(self, unit: Unit, chunk: Chunk | None = None) -> None:
        """A chunk, or all of a unit, is about to be changed: whoever saves its present state must have it."""
        if self.snapshot is not None:
            self.snapshot.changing(unit, chunk)

    def written(self, unit: Unit, indices: set[int]) -> None:
        """The user wrote these parameters."""
        if self.snapshot is not None:
            self.snapshot.written(unit, indices)

    def check_open(self) -> None:
        if self.closed is not None:
            raise ClosedError(self.closed)

    def pin(self, record: Record, place: Place, *, patient: bool = False) -> RecordLease:
        """Bring and pin a record.

        Args:
            patient: leave what is attached as it is.
        """
        try:
            return self.manager.pin(record, self.manager.place(place), self)
        except BudgetError as error:
            if patient:
                raise
            error.with_traceback(None)  # a cycle through its frames would keep the callers' views until it is collected
        self.detach_idle()  # whatever can go, before giving up
        self.shut_grads()
        return self.manager.pin(record, self.manager.place(place), self)

    def make_room(self, wanted: Unit | None) -> None:
        """Let go of units that nobody uses now, before another comes."""
        if not self.keep_attached:
            self.detach_idle(wanted)

    def detach_idle(self, wanted: Unit | None = None) -> None:
        for unit in list(self._attached):
            if unit is not wanted and not unit.pins:
                unit.detach()

    def used(self, unit: Unit) -> None:
        """An attached unit was needed again."""
        if self._last is not unit:
            self._note(unit)

    def attached(self, unit: Unit) -> None:
        self._attached[unit] = None
        self._note(unit)

    def detached(self, unit: Unit) -> None:
        self._attached.pop(unit, None)

    def _note(self, unit: Unit) -> None:
        self._last = unit
        self.note(unit.record, Place.DEVICE)

    def note(self, record: Record, place: Place) -> None:
        """A record is used in `place` now. Pin it before: from here on it is expected late, and would be the first to go."""
        if self.schedule is not None:
            self.schedule.used(record, place)

    # --- gradients ---

    def leave_room_for_gradients(self, *, stepping: bool = False) -> None:
        """Keep prefetches from taking what gradients will need before the prefetched bytes are used.

        In backward that is all that is kept and still to come; before, the largest; while the optimizer steps, nothing.
        """
        if self.step_place is Place.DEVICE:
            return
        in_backward = self._grads_coming < self._grads_nbytes and not self.partitions_grads
        coming = max(self._grads_coming, self._largest_grads) if in_backward else self._largest_grads
        self.manager.mover.room.headroom = 0 if stepping else coming

    def lease(self, name: str, nbytes: int) -> Lease:
        """Host memory inside the budget."""
        try:
            return self.manager.lease(name, nbytes, self)
        except BudgetError as error:
            error.with_traceback(None)  # as in `pin`
        self.detach_idle()
        self.shut_grads()
        return self.manager.lease(name, nbytes, self)

    def grad_buffer(self, unit: Unit) -> GradBuffer:
        """For the gradients of a unit that has none."""
        nbytes = unit.layout.grad_nbytes
        if self.step_place is Place.DEVICE:
            return DeviceGrads(self, unit.layout)
        if unit.spill is not None:
            return SpilledGrads(self, unit.spill, unit.layout)
        name = f"gradients of {unit.name}"
        try:
            lease = self.lease(name, nbytes)
        except BudgetError:
            if not self.partitions_grads or not self.sync:
                raise
            self.send_grads(but=unit)
            lease = self.lease(name, nbytes)
        self._kept(unit, 1)
        keeps = self.keep_attached and self.ranks.alone and not self.manager.device.has_memory
        return LeasedGrads(self, lease, unit.layout, keeps=keeps)

    def grad_buffers(self) -> Iterator[tuple[Unit, GradBuffer]]:
        """Gradients that wait for a step, or for the update that it has put off."""
        yield from ((unit, unit.grads) for unit in self.units if unit.grads is not None)
        if self.stepper is not None:
            yield from ((unit, update.grads) for unit, update in self.stepper.due.items() if update.grads is not None)

    def drop_grads(self, unit: Unit, grads: GradBuffer) -> None:
        """The gradients of a unit are not needed any more."""
        self.grads_landed()
        if isinstance(grads, LeasedGrads):
            self._kept(unit, -1)
        grads.drop()

    def _kept(self, unit: Unit, sign: int) -> None:
        if unit.keeps_grads:
            self._grads_coming -= sign * self.manager.arena.block_nbytes(unit.layout.grad_nbytes)
            self.leave_room_for_gradients()

    def shut_grads(self) -> None:
        """Let gradients that nobody uses now go to the drive, where there is a place for them."""
        for unit in self.units:
            unit.shut_grads()

    def store_grad(self, view: torch.Tensor, grad: torch.Tensor, *, add: bool) -> None:
        """Copy or add a gradient into its place in the buffer."""
        device = self.manager.device
        if not device.has_memory or self.step_place is Place.DEVICE:
            view.add_(grad) if add else view.copy_(grad)
        elif add:  # a second arrival in one backward: rare, and must come after the first
            self.grads_landed()
            target = torch.empty_like(view)
            self._landing.append(device.download(_raw(_laid_out(grad, view)), _raw(target), after=device.record()))
            self.grads_landed()
            view.add_(target)
        else:
            self._landing.append(device.download(_raw(_laid_out(grad, view)), _raw(view), after=device.record()))

    def grads_landed(self) -> None:
        """Wait until every gradient that was sent to the host is there."""
        landing, self._landing = self._landing, []
        for event in landing:
            if not event.synchronize(self.manager.timeout_s):
                raise TimeoutError(f"a gradient did not reach the host within {self.manager.timeout_s} s")

    # --- windows ---

    def add_window(self, module: nn.Module, unit: Unit) -> None:
        """While `module` runs its forward, its unit is here and its ops run plainly."""
        self._handles += add_window(module, self, unit)

    @property
    def windows(self) -> list[nn.Module]:
        """The modules whose forward is a window."""
        return windows(self)

    def open_window(self, unit: Unit) -> None:
        with uninterrupted():
            unit.open()
            pushed = not self.keep_attached and self.saved.push()  # what never leaves may be saved as it is
            self._windows.append((unit, torch._C._current_graph_task_id() if pushed else None))

    def leave_window(self, unit: Unit) -> None:
        """Close the window of `unit`, and those inside it that were left open."""
        with uninterrupted():
            if any(u is unit for u, _ in self._windows):
                while self._close_window() is not unit:
                    pass

    def _close_window(self) -> Unit:
        unit, backward = self._windows.pop()
        if backward == torch._C._current_graph_task_id():  # else they went with the backward that was interrupted, or there are none
            self.saved.pop()
        unit.shut()
        return unit

    def close_windows(self, depth: int = 0) -> None:
        """Close windows left open by an interrupt, down to `depth`."""
        with uninterrupted():
            while len(self._windows) > depth:
                self._close_window()

    @property
    def depth(self) -> int:
        return len(self._windows)

    def load_together(self, model: nn.Module) -> None:
        """Let `load_state_dict` write weights of which each rank keeps a slice."""
        self._handles += load_together(model, self)

    def hook_gradients(self, unit: Unit) -> None:
        block = self.manager.arena.block_nbytes(unit.layout.grad_nbytes) if unit.layout.grad_nbytes else 0
        if unit.keeps_grads:
            self._grads_nbytes += block
            self._grads_coming += block
        self._largest_grads = max(self._largest_grads, block)
        for index, param in enumerate(unit.params):
            if param.requires_grad and not (self.plain_grads and self.ranks.alone):
                hook: Callable[[Any], None] = _grad_hook(unit, index)
                with torch._C.DisableTorchFunctionSubclass():
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))

    # --- the end ---

    def close(
        self, reason: str, *, restore: bool, wait: bool = True, value: Callable[[Unit, int, torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Take the hooks off; give the parameters their data back, or leave them away with `reason` as the error of any use.

        Args:
            wait: until the other ranks close theirs; before, they may still ask for weights.
            value: makes the data of parameter `index` of a unit from its weight; default: a copy. May use the optimizer's state.
        """
        with self.lock:
            self.close_windows()
            remove_hooks(self, self._handles)
            self._handles.clear()
            for unit in self.units:
                unit.drop_grads()
            if self.schedule is not None:
                self.schedule.close()
            try:
                if restore:
                    if self.stepper is not None:
                        self.stepper.apply_all_due()
                    self._restore(value)
            except SwapioError as error:
                logger.warning("the weights could not be given back to the module: %s", error)
            finally:
                for unit in self.units:
                    unit.abandon()
                if self.stepper is not None:
                    self.stepper.forget_due()
                with self._stepped:
                    self.closed = reason
                    self._stepped.notify_all()
                self.ranks.close(wait=wait)
                if self.sums is not None:
                    self.sums.close()
                if not self.owns_manager and not self.manager.closed:
                    self._remove(self.records)

    def _restore(self, value: Callable[[Unit, int, torch.Tensor], torch.Tensor] | None) -> None:
        """Give the weights back unit by unit; what the store held of each goes before the next comes, so both never lie in memory whole."""
        weights = {unit.record for unit in self.units}
        if value is None:
            self._remove([r for r in self.records if r not in weights])
        for unit in self.units:
            unit.restore(value)
            unit.abandon()
            if not self.partitions_weights:
                self._remove([unit.record])
        if self.partitions_weights:
            self.ranks.meet("waiting for all ranks to have their weights back")

    def _remove(self, records: Sequence[Record]) -> None:
        for record in records:
            with contextlib.suppress(KeyError):  # removed before
                self.manager.remove(record)
        self.manager.arena.trim()


def _grad_hook(unit: Unit, index: int) -> Callable[[Any], None]:
    """Holds the unit weakly: a parameter keeps its hooks where the garbage collector does not see them."""
    reference = weakref.ref(unit)

    def hook(param: Any) -> None:
        alive = reference()
        if alive is not None:
            alive.take_grad(index)

    return hook


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _laid_out(grad: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """`grad` with the strides of `view`."""
    if _same(grad, view):
        return grad
    laid: torch.Tensor = torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=grad.device)
    return laid.copy_(grad)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
