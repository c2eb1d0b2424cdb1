"""The three batch sizes: any one or two give the rest."""

from __future__ import annotations

from ..errors import ConfigError

__all__ = ["BATCH_KEYS", "batch_sources", "batch_triple"]

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_triple(
    total: int | None, micro: int | None, steps: int | None, *, world_size: int = 1, world_size_source: str = ""
) -> tuple[int, int, int]:
    """Infer what is missing (`None`) of `train_batch_size = micro batch x accumulation steps x world size`.

    Accumulation is 1 unless both others are given, the micro batch 1 unless the total is given.

    Raises:
        ConfigError: a value below 1, or the three do not agree or do not divide; all values are shown, and where each came from.
    """
    if world_size < 1:
        raise ConfigError(f"world_size: {world_size} ({world_size_source}) is no number of ranks; use 1 or more", key="world_size")
    given = (total, micro, steps)
    for key, value in zip(BATCH_KEYS, given, strict=True):
        if value is not None and value < 1:
            raise ConfigError(f"{key}: {value} is no batch size; use 1 or more", key=key, value=value)
    if total is None:
        micro, steps = micro or 1, steps or 1
        return micro * steps * world_size, micro, steps
    if micro is None:
        steps = steps or 1
        micro = total // (steps * world_size)
    elif steps is None:
        steps = total // (micro * world_size)
    if micro * steps * world_size != total:
        values = zip(BATCH_KEYS, given, strict=True)
        shown = ", ".join(f"{key} (not given)" if value is None else f"{key}={value} (given)" for key, value in values)
        world = f"world size {world_size}" + (f" ({world_size_source})" if world_size_source else "")
        product = f"{micro} x {steps} x {world_size} is {micro * steps * world_size}, not {total}"
        wrong = f"{total} cannot be split evenly" if None in given else product
        raise ConfigError(f"train_batch_size: {shown}, {world}: {wrong}", key="train_batch_size", value=total)
    return total, micro, steps


def batch_sources(total: int | None, micro: int | None, steps: int | None) -> tuple[str, str, str]:
    """Where `batch_triple` takes each of the three from, as `SwapioConfig.sources` says it."""
    names = [key for key, value in zip(BATCH_KEYS, (total, micro, steps), strict=True) if value is not None]
    inferred = f"inferred from {', '.join(names)} and the world size"
    return (
        "given" if total is not None else inferred if names else "default",
        "given" if micro is not None else inferred if total is not None else "default",
        "given" if steps is not None else inferred if total is not None and micro is not None else "default",
    )
