"""Several drives as one storage, each with a share of the bytes by its speed."""

from __future__ import annotations

import bisect
import dataclasses
import errno
import math
import os
import time
from collections.abc import Callable, Sequence

from ..errors import ConfigError, StorageError
from ..spec import round_up
from ._buffers import aligned_buffer
from ._storage import LocalStorage, Storage

__all__ = ["StripedStorage", "measure_speeds"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True, slots=True)
class _Region:
    """A range of the space, cut into stripes: stripe i is at `places[i]` = (member, offset there)."""

    start: int
    nbytes: int
    places: list[tuple[int, int]]


class StripedStorage(LocalStorage):
    """Cuts its space into stripes and deals them out so that every member holds, and moves, bytes in proportion to its weight.

    Each member is a lane of its own: `IOThreads` cuts transfers at the stripes and keeps every member busy with a queue of its own, so a
    slow one holds up nothing but its share. A member that is full gets no more; the others take what it cannot.

    Args:
        members: storages; owned, closed with this one.
        weights: bytes per second, or any numbers in that proportion.
        stripe_nbytes: of one stripe; rounded up to the alignment.
    """

    kind = "striped"

    def __init__(self, members: Sequence[Storage], *, weights: Sequence[float] | None = None, stripe_nbytes: int = 4 << 20) -> None:
        super().__init__()
        self.members = list(members)
        self.weights = list(weights or [1.0] * len(members))
        if not members or len(self.weights) != len(members) or not all(math.isfinite(w) and w > 0 for w in self.weights):
            raise ConfigError(f"weights: {self.weights} for {len(members)} paths; give one positive number for each", key="weights")
        self.alignment = math.lcm(*(m.alignment for m in members))
        self.stripe_nbytes = round_up(stripe_nbytes, self.alignment)
        self.path = ", ".join(m.path for m in members)
        self.num_lanes = len(members)
        self._starts: list[int] = []  # of the regions, ascending; a region is there before its start
        self._regions: list[_Region] = []

    def _deal(self, nbytes: int, among: list[int]) -> list[int]:
        """The member of each stripe: always the one that is furthest behind its share."""
        held = [m.reserved_nbytes for m in self.members]
        dealt = []
        for start in range(0, nbytes, self.stripe_nbytes):
            size = min(self.stripe_nbytes, nbytes - start)
            member = min(among, key=lambda m: (held[m] + size) / self.weights[m])
            held[member] += size
            dealt.append(member)
        return dealt

    def _grow(self, offset: int, nbytes: int, name: str) -> None:
        among = list(range(len(self.members)))
        while True:
            dealt = self._deal(nbytes, among)
            sizes = [min(self.stripe_nbytes, nbytes - i * self.stripe_nbytes) for i in range(len(dealt))]
            extents = {}
            for member in sorted(set(dealt)):
                share = sum(size for size, m in zip(sizes, dealt, strict=True) if m == member)
                try:
                    extents[member] = self.members[member].reserve(share, name=name)
                except StorageError as error:
                    for other, extent in extents.items():
                        self.members[other].free(extent)
                    among.remove(member)
                    if error.errno not in _FULL or not among:
                        raise
                    break
            else:
                break
        next_offsets = {member: extent.offset for member, extent in extents.items()}
        places = []
        for member, size in zip(dealt, sizes, strict=True):
            places.append((member, next_offsets[member]))
            next_offsets[member] += size
        self._regions.append(_Region(offset, nbytes, places))
        self._starts.append(offset)

    def _find(self, offset: int) -> tuple[int, int, int]:
        """Member, offset there, and bytes from there to the end of the stripe."""
        region = self._regions[bisect.bisect(self._starts, offset) - 1]
        stripe, within = divmod(offset - region.start, self.stripe_nbytes)
        member, start = region.places[stripe]
        return member, start + within, min(self.stripe_nbytes, region.nbytes - stripe * self.stripe_nbytes) - within

    def lane(self, offset: int) -> tuple[int, int]:
        if offset >= self.end:  # the transfer will say so
            return super().lane(offset)
        member, _, nbytes = self._find(offset)
        return member, nbytes

    def _read_some(self, offset: int, buffer: memoryview, name: str) -> int:
        member, start, nbytes = self._find(offset)
        part = buffer[:nbytes]
        self.members[member].move("read", start, part, name=name)
        return part.nbytes

    def _write_some(self, offset: int, buffer: memoryview, name: str) -> int:
        member, start, nbytes = self._find(offset)
        part = buffer[:nbytes]
        self.members[member].move("write", start, part, name=name)
        return part.nbytes

    def sync(self) -> None:
        for member in self.members:
            member.sync()

    def _release(self) -> None:
        for member in self.members:
            member.close()


def measure_speeds(
    members: Sequence[Storage], *, nbytes: int = 8 << 20, rounds: int = 3, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Bytes per second of each: written, synced and read back, the best of `rounds` in turns. Writes `rounds * nbytes` to each.

    The first round is the warm-up: it writes blocks that were only reserved, which is slower.
    """
    buffer = aligned_buffer(nbytes, os.urandom(1 << 16))
    best = [math.inf] * len(members)
    extents = [m.reserve(nbytes, name="speed test") for m in members]
    for _ in range(rounds):
        for i, (member, extent) in enumerate(zip(members, extents, strict=True)):
            start = clock()
            member.write(extent.offset, buffer, name="speed test")
            member.sync()
            member.read(extent.offset, buffer, name="speed test")
            best[i] = min(best[i], clock() - start)
    for member, extent in zip(members, extents, strict=True):
        member.free(extent)
    return [2 * nbytes / max(seconds, 1e-9) for seconds in best]
