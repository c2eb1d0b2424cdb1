"""DeepSpeed's learning rate schedules, as PyTorch schedulers.

The numbers are DeepSpeed's, quirks included. A schedule counts `last_batch_iteration` from -1: making it sets the rate of the first
optimizer step, and each `step()` after an optimizer step sets that of the next. The warm-ups start their curve at index 0, mostly with
the rate that they had at -1: the first two optimizer steps have the same rate then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from ..config import scheduler_params
from ..errors import ConfigError

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR", "scheduler_from_config"]

logger = logging.getLogger("swapio")

Rates = float | list[float]
"""One for all param groups, or one for each."""
Growth = Literal["log", "linear"]


class _Schedule(LRScheduler):
    """A closed formula of the number of steps, so that its state is that number."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int) -> None:
        super().__init__(optimizer)
        if last_batch_iteration >= 0:
            self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def _rates(self, index: int) -> list[float]:
        """The rate of each param group after the step `index`."""
        raise NotImplementedError

    @property
    def last_batch_iteration(self) -> int:
        """Index of the last step; -1 before the first."""
        return self.last_epoch - 1

    def get_lr(self) -> list[float | torch.Tensor]:
        """The rates in force now, by the formula; `get_last_lr()` is what was set last."""
        return [*self._rates(self.last_batch_iteration)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next optimizer step; call it after each one. With an index, go there instead."""
        if last_batch_iteration is None:
            super().step()
        else:
            self.load_state_dict({"last_batch_iteration": last_batch_iteration})

    def state_dict(self) -> dict[str, Any]:
        """As DeepSpeed saves it: `last_batch_iteration`."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there; the rates of the optimizer are set to the formula's."""
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = self.get_lr()


class LRRangeTest(_Schedule):
    """Grows without end, to find the largest rate that trains (Smith 2018, https://arxiv.org/abs/1803.09820)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self._start = _each(optimizer, lr_range_test_min_lr, "lr_range_test_min_lr")
        self._step_size = lr_range_test_step_size
        self._step_rate = lr_range_test_step_rate
        self._staircase = lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, index: int) -> list[float]:
        steps = (index + 1) / self._step_size
        return [rate * (1 + self._step_rate * (math.floor(steps) if self._staircase else steps)) for rate in self._start]


class OneCycle(_Schedule):
    """One cycle from `cycle_min_lr` to `cycle_max_lr` and back, then decay (Smith 2018, https://arxiv.org/abs/1803.09820).

    With `cycle_momentum`, the first of an Adam's betas goes the other way and the second is 0.99; an optimizer without betas is left alone.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: float,
        cycle_max_lr: float,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        self._lrs = (cycle_min_lr, cycle_max_lr)
        self._moms = (cycle_min_mom, cycle_max_mom)
        self._decay_rates = (decay_lr_rate, decay_mom_rate)
        self._decay_step_size = decay_step_size
        self._sizes = (cycle_first_step_size, cycle_second_step_size or cycle_first_step_size)
        self._stairs = (cycle_first_stair_count, cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count)
        self._cycles_momentum = cycle_momentum and all("betas" in group for group in optimizer.param_groups)
        if cycle_momentum and not self._cycles_momentum:
            logger.warning("scheduler.params.cycle_momentum has no effect: %s has no betas", type(optimizer).__name__)
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, index: int) -> list[float]:
        low, high = self._lrs
        after = self._intervals_after(index)
        rate = low + (high - low) * self._height(index + 1) if after is None else low / (1 + self._decay_rates[0] * after)
        return [rate] * len(self.optimizer.param_groups)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each param group, by the formula; None when they are left alone."""
        if not self._cycles_momentum:
            return None
        low, high = self._moms
        after = self._intervals_after(self.last_batch_iteration)
        beta = (
            high - (high - low) * self._height(self.last_batch_iteration + 1)
            if after is None
            else high * (1 + self._decay_rates[1] * after)
        )
        if self.last_batch_iteration == -1:
            beta = low
        if beta >= 1:
            raise ConfigError(
                f"scheduler.params.decay_mom_rate: {self._decay_rates[1]} has brought the first beta to {beta:.3g} at step "
                f"{self.last_batch_iteration}, and it must stay below 1; use 0",
                key="scheduler.params.decay_mom_rate", value=self._decay_rates[1],
            )  # fmt: skip
        return [(beta, 0.99)] * len(self.optimizer.param_groups)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        self._set_betas()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._set_betas()

    def _set_betas(self) -> None:
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def _height(self, step: int) -> float:
        """How far up the cycle, 0 to 1."""
        down = step > self._sizes[0]
        size, stairs = self._sizes[down], self._stairs[down]
        steps = sum(self._sizes) - step if down else step
        return math.floor(steps * stairs / size) / stairs if stairs else steps / size

    def _intervals_after(self, index: int) -> float | None:
        """Decay intervals since the cycle ended; None within it."""
        after = index + 1 - sum(self._sizes)
        return None if after <= 0 else after / self._decay_step_size if self._decay_step_size else 0.0


class WarmupLR(_Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` (default: the rate that each group has) in `warmup_num_steps`, then flat."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Growth = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        full = [float(group["lr"]) for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self._low = _each(optimizer, warmup_min_lr, "warmup_min_lr")
        self._high = _each(optimizer, full, "warmup_max_lr")
        self._warmup_steps, self._growth = max(warmup_num_steps, 2), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, index: int) -> list[float]:
        share = _warmed(max(index, 0), self._warmup_steps, self._growth) if index < self._warmup_steps else self._after(index)
        return [low + (high - low) * share for low, high in zip(self._low, self._high, strict=True)]

    def _after(self, index: int) -> float:
        """Share of the way from low to high, once the warm-up is over."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """The same, then down to `warmup_min_lr` on a line that ends at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 1e-3,
        warmup_num_steps: int = 1000,
        warmup_type: Growth = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total_steps = total_num_steps
        _check_total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, index: int) -> float:
        return max(0.0, (self._total_steps - index) / max(1, self._total_steps - self._warmup_steps))


class WarmupCosineLR(_Schedule):
    """From `warmup_min_ratio` of the optimizer's rates to all of them, then down a cosine to `cos_min_ratio` at `total_num_steps`.

    The very first optimizer step has the rate 0, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 1e-4,
        warmup_type: Growth = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._full = [float(group["lr"]) for group in optimizer.param_groups]
        self._warmup_steps, self._growth = max(warmup_num_steps, 2), warmup_type
        self._total_steps = total_num_steps
        self._ratios = (warmup_min_ratio, cos_min_ratio)
        _check_total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, last_batch_iteration)

    def _rates(self, index: int) -> list[float]:
        start, end = self._ratios
        if index < 0:
            ratio = 0.0
        elif index < self._warmup_steps:
            ratio = start + (1 - start) * _warmed(index, self._warmup_steps, self._growth)
        else:
            progress = min(1.0, (index - self._warmup_steps + 1) / max(1, self._total_steps - self._warmup_steps))
            ratio = max(0.0, end + (1 - end) * (1 + math.cos(math.pi * progress)) / 2)
        return [rate * ratio for rate in self._full]


_CLASSES: dict[str, type[_Schedule]] = {c.__name__: c for c in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)}


def scheduler_from_config(optimizer: torch.optim.Optimizer, type_name: str, params: Mapping[str, Any]) -> LRScheduler:
    """The scheduler of the section `scheduler` of a config in DeepSpeed's format; it sets the optimizer's rates at once.

    Args:
        optimizer: its `param_groups` are changed, now and at each `step()` of the scheduler.
        type_name: DeepSpeed's name, in any case.
        params: by DeepSpeed's names; what is null, `"auto"` or not there has DeepSpeed's default.

    Raises:
        ConfigError: unknown type or key, a value that cannot work, or rates for another number of param groups.
    """
    name, complete = scheduler_params(type_name, params)
    return _CLASSES[name](optimizer, **complete)


def _each(optimizer: torch.optim.Optimizer, rates: Rates, name: str) -> list[float]:
    """A rate for each param group."""
    num_groups = len(optimizer.param_groups)
    if not isinstance(rates, list):
        return [rates] * num_groups
    if len(rates) != num_groups:
        raise ConfigError(
            f"scheduler.params.{name}: {len(rates)} rates for {num_groups} param groups; write one for each, or one number",
            key=f"scheduler.params.{name}", value=rates,
        )  # fmt: skip
    return rates


def _warmed(index: int, num_steps: int, growth: Growth) -> float:
    """Share of the warm-up that is over after the step `index`."""
    return math.log(index + 1) / math.log(num_steps) if growth == "log" else index / num_steps


def _check_total(total_num_steps: int, warmup_num_steps: int) -> None:
    if total_num_steps < warmup_num_steps:
        logger.warning("scheduler.params.total_num_steps %d ends before warmup_num_steps %d", total_num_steps, warmup_num_steps)
