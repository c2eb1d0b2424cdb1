"""What comes next: the order in which records were used in the last step is the guess for this one.

[Note: A guess costs time only] The schedule says when each record is expected again. The manager drops the one expected last (Belady's
rule, optimal for a known order; the accesses of a training step are cyclic, where dropping the least recently used would miss
every time), and a prefetch never drops what is expected sooner than itself. A step that goes another way is never wrong, only slower.

Source: L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..swap import Place, Record, SwapManager

__all__ = ["Schedule", "next_uses"]

_AHEAD_NBYTES = 64 << 20
_AHEAD_RECORDS = 2  # at least


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
    """Follows one engine's use of its records. Called under the engine's lock."""

    def __init__(self, manager: SwapManager) -> None:
        self._manager = manager
        self._expected: list[tuple[Record, Place]] = []
        self._next: list[int] = []
        self._seen: list[tuple[Record, Place]] = []
        self._position = 0
        self._base = 0  # uses in the turns before this one

    def used(self, record: Record, place: Place) -> None:
        """`record` is used in `place` now: say when it comes again, and prefetch what comes next."""
        place = self._manager.place(place)
        self._seen.append((record, place))
        expected = self._expected
        at = next((i for i in range(self._position, len(expected)) if expected[i][0] is record), None)
        if at is None:
            record.next_use = None
            return
        self._position = at + 1
        record.next_use = self._base + self._next[at]
        where = self._manager.place(expected[self._position][1]) if self._position < len(expected) else place
        room = self._manager.spare_nbytes(where)
        nbytes = self._manager.cost(record) if place is where else 0
        ahead: list[Record] = []
        window = {record}
        for index in range(self._position, self._position + len(expected)):
            coming, its_place = expected[index % len(expected)]
            if coming in window:
                continue
            window.add(coming)
            # all that is used until then must fit beside it: else it would have to go again before its use
            nbytes += self._manager.cost(coming)
            if its_place is not where or (room is not None and nbytes > room):
                break
            if nbytes > _AHEAD_NBYTES and index - self._position >= _AHEAD_RECORDS:
                break
            if not coming.current[where] and not coming.busy.locked():
                coming.next_use = self._base + index
                ahead.append(coming)
        if ahead:
            self._manager.prefetch_records(ahead, place=where)

    def announce(self, order: Sequence[tuple[Record, Place]]) -> None:
        """From here on the order is known for certain until the turn ends."""
        self._expected = self._seen + [(r, self._manager.place(p)) for r, p in order]
        self._next = next_uses([r for r, _ in self._expected])
        self._position = len(self._seen)

    def end_turn(self) -> None:
        """A step is over."""
        self._base += len(self._expected)
        if self._seen:
            self._expected, self._seen = self._seen, []
            self._next = next_uses([r for r, _ in self._expected])
        self._position = 0
