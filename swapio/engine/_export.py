"""`save_16bit_model`: the weights of an engine as safetensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..checkpoint import Entry, SafetensorsWriter, as_weight, export_dtype, exported, model_config_text
from ..spec import parse_nbytes
from ..zero import PortableState
from ._contents import buffers, entries, model_config, ties

if TYPE_CHECKING:
    from ._engine import Engine

__all__ = ["save_model"]

logger = logging.getLogger("swapio")

_FILENAME = "model.safetensors"


def save_model(engine: Engine, save_dir: Any, filename: str, trainable_only: bool, dtype: Any, max_shard_nbytes: int | str) -> None:
    """See `Engine.save_16bit_model`."""
    what = "saving the weights"
    ranks, out = engine.zero.ranks, Path(save_dir)
    if not filename.endswith(".safetensors"):
        logger.warning("weights are saved as safetensors: in %s instead of %s", _FILENAME, filename)
        filename = _FILENAME
    with ranks.together(what):
        known = entries(engine.module)
        wanted = exported(known, export_dtype(dtype), trainable_only=trainable_only)
        dtypes = {e.name: e.dtype for e in wanted}
        texts = {} if trainable_only else _texts(engine.module, wanted)
        max_nbytes = parse_nbytes(max_shard_nbytes, key="max_shard_size")
        writer = SafetensorsWriter(
            out, wanted, ties=ties(engine.module), texts=texts, filename=filename, max_shard_nbytes=max_nbytes
        )  # fmt: skip
    try:
        with ranks.together(what):
            if ranks.rank == 0:
                writer.create()
        with PortableState(engine.zero) as state, ranks.together(what):
            state.settle()
            portions = [p for p in state.owned() if p.field is None and p.name in dtypes]
            portions = [p.weight() if dtypes[p.name].itemsize <= p.slot.dtype.itemsize else p for p in portions]
            state.expect(portions)
            for portion in portions:
                values = as_weight(state.read(portion), dtypes[portion.name], trained_as=portion.slot.dtype)
                writer.write(portion.name, values, portion.start, stride=portion.slot.stride)
            for name, buffer in buffers(engine.module) if ranks.rank == 0 else ():
                if name in dtypes:
                    writer.write(name, buffer.detach().cpu().contiguous().view(-1).to(dtypes[name]))
            writer.sync()
        with ranks.together(what):
            if ranks.rank == 0:
                writer.publish()
    except BaseException:
        if ranks.rank == 0:
            writer.abandon()
        raise
    logger.info("saved the weights in %s", out)


def _texts(module: nn.Module, entries: Iterable[Entry]) -> dict[str, str]:
    """What `transformers` wants beside the weights."""
    config, generation = model_config(module), getattr(module, "generation_config", None)
    if config is None:
        return {}
    found = {"config.json": model_config_text(config, entries)}
    return found if generation is None else found | {"generation_config.json": generation.to_json_string()}
