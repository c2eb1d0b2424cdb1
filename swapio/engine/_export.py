"""`save_16bit_model`: the weights of an engine as safetensors."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import SafetensorsWriter, as_weight, export_dtype, exported, write_model_config
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
        max_nbytes = parse_nbytes(max_shard_nbytes, key="max_shard_size")
        writer = SafetensorsWriter(out, wanted, ties=ties(engine.module), filename=filename, max_shard_nbytes=max_nbytes)
    try:
        with ranks.together(what):
            if ranks.rank == 0:
                writer.create()
        with PortableState(engine.zero) as state, ranks.together(what):
            state.settle()
            for portion in state.owned():
                if portion.field is None and portion.name in dtypes:
                    own, target = portion.slot.dtype, dtypes[portion.name]
                    values = state.read(portion, weight=target.itemsize <= own.itemsize)
                    values = as_weight(values, target, trained_as=own)
                    writer.write(portion.name, values, portion.start, stride=portion.slot.stride)
            for name, buffer in buffers(engine.module) if ranks.rank == 0 else ():
                if name in dtypes:
                    writer.write(name, buffer.detach().cpu().contiguous().view(-1).to(dtypes[name]))
            writer.sync()
        with ranks.together(what):
            if ranks.rank == 0:
                writer.publish()
                config = model_config(engine.module)
                if config is not None and not trainable_only:
                    write_model_config(out, config, wanted)
                generation: Any = getattr(engine.module, "generation_config", None)
                if config is not None and generation is not None:
                    generation.save_pretrained(out)
    except BaseException:
        if ranks.rank == 0:
            writer.abandon()
        raise
    logger.info("saved the weights in %s", out)
