"""The factor of the loss that keeps fp16 gradients in range (Micikevicius et al. 2017, https://arxiv.org/abs/1710.03740)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Self

from ..config import Fp16Config
from ..errors import UsageError

__all__ = ["LossScaler"]

logger = logging.getLogger("swapio")


class LossScaler:
    """A fixed scale, or one that moves as DeepSpeed's does: halved on overflow, doubled after a window without.

    The caller multiplies the loss by `scale`, divides the gradients by it, skips a step whose gradients are not finite, and calls
    `update` once for each step, skipped or not. All ranks must call it with the same value.

    Args:
        loss_scale: a fixed scale; 0 makes it dynamic, which the rest is for.
        initial_scale_power: the scale starts at 2 to this power.
        loss_scale_window: the step after so many without overflow doubles the scale, and so does each further window.
        hysteresis: this many overflows halve the scale; the ones before only count.
        consecutive_hysteresis: count anew after a step without overflow; otherwise only when the scale is doubled.
        min_loss_scale: the scale never falls below.
    """

    def __init__(
        self,
        *,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        self.dynamic = loss_scale == 0
        self._scale = 2.0**initial_scale_power if self.dynamic else float(loss_scale)
        self._window = loss_scale_window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._min_scale = float(min_loss_scale)
        self._patience = hysteresis  # overflows until one halves the scale, that one included
        self._stable_steps = 0  # since the last overflow

    @classmethod
    def from_config(cls, config: Fp16Config) -> Self:
        """From the section `fp16`."""
        return cls(**config.model_dump(exclude={"enabled", "auto_cast"}))

    @property
    def scale(self) -> float:
        """What the loss of this step is multiplied by."""
        return self._scale

    def update(self, overflow: bool) -> None:
        """Take note of a step: `overflow` says that its gradients were not finite. A fixed scale stays.

        Raises:
            UsageError: an overflow at `min_loss_scale`, which no smaller scale can help; nothing is changed.
        """
        if not self.dynamic:
            return
        if not overflow:
            if self._consecutive:
                self._patience = self._hysteresis
            if self._stable_steps and self._stable_steps % self._window == 0:
                self._patience = self._hysteresis
                self._scale *= 2
            self._stable_steps += 1
            return
        if self._patience > 1:
            self._patience -= 1
        elif self._scale <= self._min_scale:
            raise UsageError(
                f"fp16: the gradients overflow at a loss scale of {self._scale:g}, the smallest that fp16.min_loss_scale allows: the loss "
                "diverges or does not fit into fp16; lower the learning rate, clip the gradients, or use bf16"
            )
        else:
            halved = max(self._scale / 2, self._min_scale)
            logger.info("fp16: overflow, the loss scale goes from %g to %g", self._scale, halved)
            self._scale = halved
        self._stable_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """What changes; the settings are the config's."""
        return {"scale": self._scale, "patience": self._patience, "stable_steps": self._stable_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there. A fixed scale stays the config's."""
        if self.dynamic:
            self._scale = float(state_dict["scale"])
            self._patience = int(state_dict["patience"])
            self._stable_steps = int(state_dict["stable_steps"])
