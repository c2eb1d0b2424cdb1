"""`save_checkpoint`: all that training goes on from, at once or while training goes on."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from ..checkpoint import (
    CLIENT_STATE,
    ENGINE,
    RANDOM,
    Stretch,
    StretchWriter,
    check_free,
    check_tag,
    finish_folder,
    leftovers,
    publish,
    remove_old,
    set_latest,
    temporary_folder,
)
from ..errors import StorageError, UsageError
from ..zero import PortableState, Portion, Ranks, Snapshot
from ._contents import buffer_stretch, buffers, engine_object, random_state, stretch

if TYPE_CHECKING:
    from ._engine import Engine

__all__ = ["Saving", "report_leftovers"]

logger = logging.getLogger("swapio")

_WHAT = "saving a checkpoint"


class Saving:
    """One checkpoint on its way to the drive. All ranks make the same calls.

    Raises:
        UsageError: a tag that is no name, or another one on another rank; StorageError: no room, or another fault of the drive.
    """

    def __init__(
        self,
        engine: Engine,
        save_dir: Any,
        tag: Any,
        client_state: Mapping[str, Any],
        *,
        save_latest: bool,
        exclude_frozen: bool,
        keep_last: int | None,
    ) -> None:
        self._zero = engine.zero
        self._ranks = ranks = engine.zero.ranks
        self._directory = Path(save_dir).absolute()  # the folder of now, wherever a save in the background ends
        self._save_latest = save_latest
        self._keep_last = keep_last
        self._snapshot: Snapshot | None = None
        self._writer: StretchWriter | None = None
        self._ended = False
        with ranks.together(_WHAT):
            if not isinstance(client_state, Mapping):
                raise UsageError(f"client_state: a {type(client_state).__name__} is no dict; pass for example {{'epoch': 3}}")
            if keep_last is not None and keep_last < 1:
                raise UsageError(f"keep_last={keep_last} would keep no checkpoint; use 1 or more, or None to keep all")
            self._tag = check_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
            if ranks.rank == 0:
                with _named(self._directory):
                    self._directory.mkdir(parents=True, exist_ok=True)
                report_leftovers(self._directory)
                check_free(self._directory / self._tag)
        self._token = _same_token(ranks, self._tag)
        self._temporary = temporary_folder(self._directory, self._tag, self._token)
        try:
            with ranks.together(_WHAT), _named(self._temporary):
                if ranks.rank == 0:
                    self._temporary.mkdir()
            with ranks.together(_WHAT):
                self._portions = self._begin(engine, client_state, exclude_frozen)
        except BaseException:
            self.abandon()
            raise

    def _begin(self, engine: Engine, client_state: Mapping[str, Any], exclude_frozen: bool) -> list[Portion]:
        """Write what is not in units."""
        if engine._backwards:
            logger.warning("a checkpoint is saved between backward and step: the gradients so far are not in it")
        self._writer = writer = StretchWriter(self._temporary, engine.global_rank)
        with PortableState(engine.zero) as state:
            state.settle()
            left_out = {n for u, s, n in state.params() if exclude_frozen and not u.params[s.index].requires_grad and not s.trained}
            objects: dict[str, Any] = {f"{RANDOM}.{engine.global_rank}": random_state(engine.device)}
            if engine.global_rank == 0:
                objects[CLIENT_STATE] = dict(client_state)
                objects[ENGINE] = engine_object(engine, state, client_state, left_out)
            writer.write_objects(objects)
            if engine.global_rank == 0:
                for name, buffer in buffers(engine.module):
                    found = buffer_stretch(name, buffer)
                    writer.write(found, _read(found))
            return [p for p in state.owned() if p.name not in left_out]

    def write(self) -> None:
        """Write everything, and give the checkpoint its name."""
        try:
            with self._ranks.together(_WHAT), PortableState(self._zero) as state:
                state.expect(self._portions)
                for portion in self._portions:
                    self._write(portion, state.read(portion))
            self._finish()
        except BaseException:
            self.abandon()
            raise

    def start(self) -> None:
        """Write it while training goes on; `poll` and `wait` see to its end."""
        at_end = self._finish if self._ranks.alone else lambda: None  # else where all ranks meet
        self._snapshot = Snapshot(self._zero, self._portions, self._write, at_end=at_end, at_stop=self._discard)

    def _write(self, portion: Portion, values: torch.Tensor) -> None:
        if self._writer is None:
            raise RuntimeError("nothing is written before the file is open")
        self._writer.write(stretch(portion), values)

    def poll(self) -> bool:
        """Whether it has ended, on all ranks. Raises what failed in the background."""
        if self._snapshot is None or self._ended:
            return True
        if self._ranks.alone:
            ended = self._snapshot.ended
        else:
            told = self._ranks.all_gather(torch.tensor([self._snapshot.ended]), what=_WHAT)
            ended = all(bool(t) for t in told)
        return self._end(self._snapshot) if ended else False

    def wait(self) -> None:
        """Write what is left, as fast as it goes. Raises what failed in the background."""
        if self._snapshot is not None and not self._ended:
            try:
                self._snapshot.take_rest()
            except BaseException:
                self.abandon()
                raise
            self._end(self._snapshot)

    def _end(self, snapshot: Snapshot) -> bool:
        self._ended = True
        try:
            with self._ranks.together(_WHAT):
                snapshot.raise_error()
            if not self._ranks.alone:
                self._finish()
        except BaseException:
            self.abandon()
            raise
        return True

    def abandon(self) -> None:
        """Stop, and remove what was written. Idempotent."""
        if self._snapshot is not None:
            self._snapshot.stop()
        self._discard()

    def _discard(self) -> None:
        if self._writer is not None:
            self._writer.abandon()
        if self._ranks.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _finish(self) -> None:
        """Give what is written its name."""
        with self._ranks.together(_WHAT):
            if self._writer is None:
                raise RuntimeError("nothing is finished before it began")
            own = self._writer.name, self._writer.finish()
        written = dict(self._ranks.gather(own, what=_WHAT))
        with self._ranks.together(_WHAT), _named(self._directory / self._tag):
            if self._ranks.rank == 0:
                publish(self._temporary, self._directory / self._tag, finish_folder(self._temporary, written))
                if self._save_latest:
                    set_latest(self._directory, self._tag)
                if self._keep_last is not None and (removed := remove_old(self._directory, keep_last=self._keep_last, token=self._token)):
                    logger.info("removed older checkpoints: %s", ", ".join(removed))
        logger.info("saved %s", self._directory / self._tag)


def _read(whole: Stretch) -> torch.Tensor:
    if whole.read is None:
        raise RuntimeError(f"{whole} has nothing to read it with")
    return whole.read()


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """What the drive refuses, as an error of ours."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        code, where = error.errno or errno.EIO, str(error.filename or path)
        raise StorageError("write", name=path.name, path=where, offset=0, wanted=0, got=0, errno=code, why=os.strerror(code)) from error


def _same_token(ranks: Ranks, tag: str) -> int:
    """Rank 0's random number."""
    mine = torch.tensor([secrets.randbits(32), xxhash.xxh3_64_intdigest(tag.encode()) >> 1])
    told = [t.tolist() for t in ranks.all_gather(mine, what=_WHAT)]
    if any(digest != told[0][1] for _, digest in told):
        raise UsageError(f"save_checkpoint: the ranks give different tags, this one {tag!r}; all of them must give the same")
    return int(told[0][0])


def report_leftovers(directory: Path) -> None:
    """Say what is skipped."""
    if found := leftovers(directory):
        logger.warning("%s holds what saves that did not end have left, which is skipped; delete it: %s", directory, ", ".join(found))
