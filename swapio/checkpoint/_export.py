"""From a checkpoint to a model alone: safetensors, or a state dict in memory."""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, UsageError
from ..optim import round_
from ._folder import Progress, checker, resolve
from ._names import ENGINE, key
from ._pipeline import WriteBehind
from ._safetensors import Entry, SafetensorsWriter
from ._tensors import Stored, Stretch

__all__ = ["DTYPES", "as_weight", "export", "export_dtype", "exported", "get_fp32_state_dict", "model_config_text"]

logger = logging.getLogger("swapio")

_ALONE_NUMEL = 32 * 1024
"""Elements that PyTorch works on in the calling thread: waiting for others, beside threads that read and write, takes longer."""

DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
    "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip


def get_fp32_state_dict(checkpoint: str | os.PathLike[str], tag: str | None = None) -> dict[str, torch.Tensor]:
    """The model of a checkpoint, whole, in host memory: fp32 masters and whatever else is floating in fp32, the rest as it is.

    `model.load_state_dict` takes it. A tensor with several names is one tensor. Load from folders that you trust: objects are unpickled.

    Args:
        checkpoint: the folder of a checkpoint, or the one that `save_checkpoint` was given.
        tag: default: what the file `latest` names.

    Raises:
        UsageError: no checkpoint, or one that was saved without frozen parameters; StorageError: it is damaged.
    """
    model = _Model(resolve(Path(checkpoint), tag))
    wanted = model.entries(torch.float32)
    found = {e.name: torch.empty(e.shape, dtype=e.dtype) for e in wanted}

    def put(entry: Entry, start: int, numel: int, values: Callable[[], torch.Tensor]) -> None:
        found[entry.name].view(-1)[start : start + numel].copy_(values())

    model.load(wanted, put)
    return found | {other: found[kept] for other, kept in model.ties.items()}


def export(
    checkpoint: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | str | None = None,
    trainable_only: bool = False,
    max_shard_nbytes: int = 5_000_000_000,
    progress: Progress = None,
) -> int:
    """Write the model of a checkpoint as safetensors into the folder `out`; returns their bytes.

    One file, or several with an index; with a `config.json` where `transformers` can load it. A tensor with several names is stored under
    the first, as `transformers` does. Some MiB are in memory at a time. What is needed is read once; if it is damaged, nothing appears.

    Args:
        checkpoint, tag: as for `get_fp32_state_dict`.
        dtype: of what is floating; default: each as it was trained.
        trainable_only: only parameters that were trained, as of an adapter.
        progress: is told the bytes that are done, and those that there are.

    Raises:
        UsageError, StorageError: as `get_fp32_state_dict`; ConfigError: a dtype that is none of fp32, fp16 and bf16.
    """
    wanted_dtype = export_dtype(dtype)
    model = _Model(resolve(Path(checkpoint), tag))
    wanted = model.entries(wanted_dtype, trainable_only=trainable_only)
    texts = {} if model.config is None or trainable_only else {"config.json": model_config_text(model.config, wanted)}
    writer = SafetensorsWriter(Path(out), wanted, ties=model.ties, texts=texts, max_shard_nbytes=max_shard_nbytes)
    behind = WriteBehind()
    done = 0

    def put(entry: Entry, start: int, numel: int, values: Callable[[], torch.Tensor]) -> None:
        nonlocal done
        behind.call(lambda: writer.write(entry.name, values(), start))
        done += numel * entry.dtype.itemsize
        if progress is not None:
            progress(done, writer.nbytes)

    try:
        writer.create()
        model.load(wanted, put)
        behind.wait()
        writer.sync()
    except BaseException:
        behind.close()
        writer.abandon()
        raise
    behind.close()
    writer.publish()
    return writer.nbytes


def export_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """By name or itself.

    Raises:
        ConfigError: none that a model is exported in.
    """
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found is not None and found not in DTYPES.values():
        raise ConfigError(f"dtype: {dtype!r} is no dtype of exported weights; use fp32, fp16 or bf16", key="dtype", value=dtype)
    return found if isinstance(found, torch.dtype) else None


def exported(known: Mapping[str, Mapping[str, Any]], dtype: torch.dtype | None, *, trainable_only: bool = False) -> list[Entry]:
    """Which of the tensors of a module are exported, and how.

    Args:
        known: by name: its shape, dtype, and whether it is trained.

    Raises:
        UsageError: nothing is.
    """
    chosen = {n: e for n, e in known.items() if e["trained"] or not trainable_only}
    if trainable_only and not chosen:
        raise UsageError(
            "no parameter is trained, so there is nothing to export but the whole model; leave out the restriction to trained ones"
        )
    return [Entry(n, dtype if dtype is not None and e["dtype"].is_floating_point else e["dtype"], e["shape"]) for n, e in chosen.items()]


def as_weight(values: torch.Tensor, dtype: torch.dtype, *, trained_as: torch.dtype) -> torch.Tensor:
    """Masters as weights: those of a bfloat16 weight are rounded as in training."""
    if values.dtype is torch.float32 and dtype is trained_as is torch.bfloat16:
        weights = torch.empty(values.shape, dtype=dtype)
        round_(values, weights, scratch=torch.empty(_ALONE_NUMEL, dtype=torch.int32))
        return weights
    return values.to(dtype)


def model_config_text(config: str, entries: Iterable[Entry]) -> str:
    """Of `config.json`, with the dtype that most of the exported elements have."""
    content = json.loads(config)
    numels: dict[torch.dtype, int] = {}
    for entry in entries:
        numels[entry.dtype] = numels.get(entry.dtype, 0) + math.prod(entry.shape)
    floating = [d for d in numels if d.is_floating_point]
    if floating:
        content["dtype"] = str(max(floating, key=lambda d: numels[d])).removeprefix("torch.")
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


class _Model:
    """What a checkpoint has of the module.

    Raises:
        StorageError: it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._stored = Stored(path, check=checker(path))
        objects = self._stored.get(ENGINE)
        self._known: dict[str, dict[str, Any]] = objects["entries"]
        self._left_out: list[str] = objects["left_out"]
        self.ties: dict[str, str] = objects["ties"]
        self.config: str | None = objects["model_config"]
        if objects["extra_state"]:
            logger.warning("what get_extra_state gave is not exported, of: %s", ", ".join(map(repr, objects["extra_state"])))

    def entries(self, dtype: torch.dtype | None, *, trainable_only: bool = False) -> list[Entry]:
        """

        Raises:
            UsageError: some of them are not in the checkpoint.
        """
        found = exported(self._known, dtype, trainable_only=trainable_only)
        missing = [e.name for e in found if e.nbytes and key(e.name) not in self._stored.shapes]
        if missing:
            left_out = " (it was saved with exclude_frozen_parameters)" if self._left_out else ""
            raise UsageError(
                f"{self._stored.path} does not have {missing[0]!r}, and {len(missing) - 1} more{left_out}; "
                "export the trained ones alone (trainable_only, --trainable-only), or another checkpoint"
            )
        return found

    def load(self, entries: Iterable[Entry], put: Callable[[Entry, int, int, Callable[[], torch.Tensor]], None]) -> None:
        """Give `put` all elements in parts: the entry, the first one, how many, and a function that converts them, for any thread."""

        def taken(entry: Entry) -> Callable[[int, torch.Tensor], None]:
            trained_as = self._known[entry.name]["dtype"]
            convert = functools.partial(as_weight, dtype=entry.dtype, trained_as=trained_as)
            return lambda start, values: put(entry, start, values.numel(), functools.partial(convert, values))

        stretches = []
        for entry in entries:
            stride, numel = torch.empty(entry.shape, device="meta").stride(), math.prod(entry.shape)
            if numel:
                name = key(entry.name)
                stretches.append(Stretch(name, self._stored.dtypes[name], entry.shape, stride, 0, numel, put=taken(entry)))
        self._stored.load(stretches)
