"""What a drive means for training: seconds per step and bytes written, with all state on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

__all__ = ["STATES", "Forecast", "forecast"]

STATES = {
    "fp32, fp32 moments": (16, 12),
    "bf16, fp32 moments": (14, 12),
    "bf16, bf16 moments": (10, 8),
    "bf16, 8-bit moments": (8, 6),
}
"""By dtype of weights and moments: bytes read and written per parameter and step, weights being read in forward and in backward."""

MODELS = {"1B": 10**9, "7B": 7 * 10**9, "70B": 70 * 10**9}


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """For one model and one kind of state: what the drive alone allows; compute that takes longer than that is not in it."""

    model: str
    state: str
    seconds_per_step: float
    bytes_on_drive: int
    terabytes_per_1000_steps: float


def forecast(mix_bytes_per_s: float, models: Mapping[str, int] = MODELS) -> list[Forecast]:
    """From the bandwidth of the mix, in bytes per second, for each model (name and number of parameters) and state."""
    return [
        Forecast(model, state, numel * (reads + writes) / mix_bytes_per_s, numel * writes, numel * writes * 1000 / 1e12)
        for state, (reads, writes) in STATES.items()
        for model, numel in models.items()
    ]
