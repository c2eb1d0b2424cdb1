"""A unit of which each rank keeps a slice: its weights whole, while they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import UsageError
from ..memory import Lease
from ..swap import Place

if TYPE_CHECKING:
    from ._unit import Unit
    from ._units import UnitSet

__all__ = ["GatheredLease"]


class GatheredLease:
    """Stands where a `RecordLease` of the whole unit would. Its memory counts in the budget like a record's."""

    def __init__(self, zero: UnitSet, unit: Unit) -> None:
        self._zero = zero
        self._unit = unit
        self._dirty = False
        self._lease: Lease | None = zero.lease(f"weights of {unit.name}", unit.layout.nbytes)
        try:
            whole = self._lease.tensor[: unit.layout.nbytes]
            zero.gather(unit, whole)
            self.raw = self._upload(whole)
        except BaseException:
            zero.manager.end_lease(self._lease)
            raise
        if zero.manager.device.has_memory:
            zero.manager.end_lease(self._lease)
            self._lease = None

    def _upload(self, whole: torch.Tensor) -> torch.Tensor:
        device = self._zero.manager.device
        if not device.has_memory:
            return whole
        raw = device.empty(self._unit.layout.nbytes)
        if not device.upload(whole, raw).synchronize(self._zero.manager.timeout_s):  # its source goes back to the arena
            raise TimeoutError(f"{self._unit.name!r} did not reach the device within {self._zero.manager.timeout_s} s")
        return raw

    def mark_dirty(self, *, span: slice | None = None) -> None:
        """The bytes were, or will be until `release`, changed: some of those in `span`.

        Raises:
            UsageError: outside of what all ranks do together. The others would go on with the old slices.
        """
        if not self._zero.modifying:
            raise UsageError(
                f"a weight of {self._unit.name!r} was written, of which every rank keeps a slice (ZeRO stage 3): write it within "
                "swapio.zero.GatheredParameters(parameters, modifier_rank=...), or load it with load_state_dict, on all ranks"
            )
        self._dirty = True

    def publish(self) -> None:
        """Keep this rank's slice of what was changed."""
        if self._dirty:
            self._dirty = False
            with self._zero.pin(self._unit.record, Place.HOST) as shard:
                for piece in self._unit.partition.pieces[self._zero.ranks.rank]:
                    part = self.raw[piece.offset : piece.offset + piece.nbytes]
                    shard.raw[piece.shard_offset : piece.shard_offset + piece.nbytes].copy_(part)
                shard.mark_dirty()

    def refresh(self) -> None:
        """Show what the weights are now, in the same memory."""
        if self._zero.manager.device.has_memory:
            lease = self._zero.lease(f"weights of {self._unit.name}", self.raw.numel())
            try:
                self._zero.gather(self._unit, lease.tensor[: self.raw.numel()])
                self.raw.copy_(lease.tensor[: self.raw.numel()])
            finally:
                self._zero.manager.end_lease(lease)
        else:
            self._zero.gather(self._unit, self.raw)

    def release(self) -> None:
        """Give the memory back; views that are alive keep theirs. Idempotent."""
        self.publish()
        if hasattr(self, "raw"):
            del self.raw
        if self._lease is not None:
            self._zero.manager.end_lease(self._lease)
            self._lease = None
