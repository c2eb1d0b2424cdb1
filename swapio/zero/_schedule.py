"""What comes next: the order in which records were used in the last step is the guess for this one.

[Note: A guess costs time only] The schedule says when each record is expected again, and the manager prefetches along it. The manager
drops the record expected last (Belady's rule, optimal for a known order; the accesses of a training step are cyclic, where dropping the
least recently used would miss every time), and a prefetch never drops what is expected sooner than itself. A step that goes another way is
never wrong, only slower.

[Note: Where we are] A use is the next one of that record in the order, if that is not far; what lies between was left out. Else it is the
one that comes soonest after a use of the record used before it: a forward without a backward, as in evaluation, begins the order again.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..swap import Place, Record, SwapManager

__all__ = ["Schedule", "next_uses"]

_LONGEST = 1 << 16  # uses in a turn: who only evaluates never ends one
_NEAR = 4  # the part of a turn that may be left out at once


def next_uses(order: Sequence[object]) -> list[int]:
    """For each position of a cyclic order, the position where the same item comes again, in this turn or the next."""
    turn = len(order)
    following: dict[int, int] = {id(item): turn + i for i, item in reversed(list(enumerate(order)))}
    result = [0] * turn
    for i in range(turn - 1, -1, -1):
        result[i] = following[id(order[i])]
        following[id(order[i])] = i
    return result


class Schedule:
    """Follows one engine's use of its records, of those that have to come and go. Called under the engine's lock."""

    def __init__(self, manager: SwapManager) -> None:
        self._manager = manager
        self._prefetcher = manager.prefetcher()
        self._expected: list[tuple[Record, Place]] = []
        self._next: list[int] = []
        self._seen: list[tuple[Record, Place]] = []
        self._position = 0
        self._base = 0  # uses in the turns before this one

    def used(self, record: Record, place: Place) -> None:
        """`record` is used in `place` now: say when it comes again, and that the next one may come."""
        place = self._manager.place(place)
        if not self._counts(record, place) or (self._seen and self._seen[-1][0] is record):
            return
        if len(self._seen) >= _LONGEST:
            self.end_turn()
        last = self._seen[-1][0] if self._seen else None
        self._seen.append((record, place))
        at = self._find(record, last)
        if at is None:
            record.next_use = None
            return
        self._position = at + 1
        record.next_use = self._base + self._next[at]
        self._prefetcher.move(self._base + self._position)

    def _find(self, record: Record, last: Record | None) -> int | None:
        """Where in the order this use is: see [Note: Where we are]."""
        order = self._expected
        near = -(-len(order) // _NEAR)
        for i in range(self._position, min(self._position + near + 1, len(order))):
            if order[i][0] is record:
                return i
        best = since = None
        for i, (each, _) in enumerate(order):
            if each is record and since is not None and i - since <= near:
                best, near = i, i - since - 1
            if each is last:
                since = i
        return best

    def _counts(self, record: Record, place: Place) -> bool:
        """Whether it comes for this use; or, on an accelerator, is changed in host memory, before which it would come in vain."""
        return record.home is not place or (place is Place.HOST and self._manager.device.has_memory)

    def announce(self, coming: Iterable[tuple[Record, Place]], *, last: bool = False) -> None:
        """These come next, before what was expected.

        Args:
            last: and nothing else in this turn.
        """
        order = [(r, p) for r, p in ((r, self._manager.place(p)) for r, p in coming) if self._counts(r, p)]
        rest = self._expected[self._position :]
        if [r for r, _ in rest[: len(order)]] != [r for r, _ in order]:
            self._expect(self._seen + order + ([] if last else rest), position=len(self._seen))

    def end_turn(self) -> None:
        """A step is over."""
        self._base += len(self._expected)
        if self._seen:
            order, self._seen = self._seen, []
            self._expect(order, position=0)
        else:
            self._position = 0

    def close(self) -> None:
        """Idempotent."""
        self._prefetcher.close()

    def _expect(self, order: list[tuple[Record, Place]], *, position: int) -> None:
        self._expected, self._position = order, position
        self._next = next_uses([r for r, _ in order])
        self._prefetcher.move(self._base + position)
        self._prefetcher.follow(order, self._base)
