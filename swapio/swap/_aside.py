"""What records held, kept on the drive while other bytes take their place: to be given back if those turn out wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import StorageError
from ..spec import Extent
from ._in_file import FilePart
from ._record import Place, Record

if TYPE_CHECKING:
    from ._mover import Mover

__all__ = ["Kept", "forget", "restore", "set_aside"]


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """The bytes of a record on the drive, as they were."""

    extent: Extent
    borrowed: Sequence[tuple[int, FilePart]]
    content_nbytes: int
    stored_nbytes: int


async def set_aside(mover: Mover, record: Record, owner: object) -> Kept | None:
    """Let the record be zeros, with room of its own for what comes.

    None, and it is as it was, where its bytes are not on the drive alone, it is in use, or there is no room.
    """
    await mover.evict([record], owner)
    async with record.busy:
        extent = record.extent
        elsewhere = record.home is not Place.NVME or record.in_file or record.lent is not None or record.current != [True, False, False]
        if extent is None or elsewhere or record.removed:
            return None
        room = [extent]
        if record.stored_nbytes:
            try:
                await mover.loop.in_thread(lambda: room.append(mover.storage.reserve(record.nbytes, name=record.key)), "swapio-reserve")
            except StorageError:
                return None
        with record.lock:
            kept = Kept(extent, record.borrowed, record.content_nbytes, record.stored_nbytes)
            record.reset()
            record.extent = room[-1]
    return kept


async def restore(mover: Mover, record: Record, kept: Kept) -> None:
    """Let a record that nobody uses have its bytes again."""
    async with record.busy:  # in one go: else a prefetch that waits for it would bring zeros
        mover.forget_bytes(record)
        if record.pins:
            raise RuntimeError(f"{record.key!r} is in use: it cannot have its bytes back")
        with record.lock:
            extent, record.extent = record.extent, kept.extent
            record.borrowed, record.content_nbytes, record.stored_nbytes = kept.borrowed, kept.content_nbytes, kept.stored_nbytes
        if extent is not None and extent != kept.extent:
            mover.storage.free(extent)
    mover.room.wake_now()


def forget(mover: Mover, record: Record, kept: Kept) -> None:
    """The bytes are not needed any more."""
    if record.extent != kept.extent:
        mover.storage.free(kept.extent)
