"""`Engine`: a model whose weights, gradients and optimizer state rest where the config says and come when they are used."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from ..config import SwapioConfig
from ..errors import ClosedError, ConfigError, RankError, StorageError, TransferTimeoutError, UsageError
from ..spec import format_nbytes
from ..swap import SwapManager
from ..zero import ChunkedStep, UnitSet, managed, uninterrupted
from ._export import save_model
from ._load import load_checkpoint
from ._memory import memory
from ._monitor import Monitor
from ._optimizer import EngineOptimizer
from ._save import Saving
from ._scaler import LossScaler

__all__ = ["Engine"]

logger = logging.getLogger("swapio")
_BROKEN = (StorageError, TransferTimeoutError, RankError)  # after these the store may have lost weights


class Engine(nn.Module):
    """What `swapio.initialize` returns. Call it like the model; then `backward(loss)` and `step()`.

    Attributes:
        module: the user's model; usable by itself too, inside the engine's life.
        optimizer: its `param_groups` are live: a changed `lr` counts from the next step.
        global_steps: steps made or skipped; skipped_steps: those left out because of a gradient that is not finite.
        micro_steps: calls of `step`; global_samples: samples of all ranks in the steps so far.
        global_rank, world_size: this process among the ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: SwapioConfig,
        manager: SwapManager,
        owns_manager: bool,
        zero: UnitSet,
        stepper: ChunkedStep | None,
        inner_optimizer: torch.optim.Optimizer | None,
        restore_nbytes: int,
        scaler: LossScaler | None,
        monitor: Monitor,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.manager = manager
        self.zero = zero
        self.global_rank, self.world_size = zero.ranks.rank, zero.ranks.size
        self.dp_world_size = self.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.monitor = monitor
        self.checkpoint_engine: Any = None  # nothing is saved through one
        self._scaler = scaler
        zero.loss_scale = scaler.scale if scaler is not None else 1.0
        zero.last_micro_batch = config.gradient_accumulation_steps == 1
        self._boundary: bool | None = None  # as the user set it
        self._backwards = 0  # since the last step of the optimizer
        self._norm: torch.Tensor | None = None
        self._loss: torch.Tensor | None = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self._stepper = stepper
        self._restore_nbytes = restore_nbytes
        self._step_applied = False
        self._stepping = False  # within `step`
        self._saving: Saving | None = None  # in the background
        self._failed = False
        self._abandoned = False
        self.optimizer: EngineOptimizer | None = None
        if inner_optimizer is not None:
            me = weakref.ref(self)
            self.optimizer = EngineOptimizer(
                inner_optimizer, step=lambda: _alive(me)._optimizer_step(), zero_grad=lambda: _alive(me)._zero_grad()
            )
        self._finalizer = weakref.finalize(self, _abandon, zero, manager if owns_manager else None)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.manager.device.torch_device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward.

        Raises:
            UsageError: PyTorch refused an input whose dtype is not that of the 16-bit weights.
        """
        self._check()
        depth = self.zero.depth
        try:
            return self.module(*args, **kwargs)
        except _BROKEN:
            self._failed = True
            raise
        except RuntimeError as error:
            if "type" in str(error):  # PyTorch words it in many ways
                self._check_inputs([*args, *kwargs.values()], error)
            raise
        finally:
            self.zero.close_windows(depth)  # an interrupt skips the hooks that would

    def _check_inputs(self, inputs: list[Any], error: RuntimeError) -> None:
        """After an `error` about dtypes: say which one the inputs must have."""
        weights, _ = self.get_data_types()
        found = next((t.dtype for t in inputs if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype is not weights), None)
        if found is not None and weights is not torch.float32:
            raise UsageError(f"an input is {found}, but the weights are {weights}: convert it, x.to({weights}) ({error})") from error

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call `backward()` on instead of `engine.backward(loss)`: the mean over micro-batches, times the loss scale."""
        steps = self.gradient_accumulation_steps()
        scaled = loss / steps if steps > 1 else loss
        return scaled * self._scaler.scale if self._scaler is not None else scaled

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Gradients of `loss` into the engine's buffers; returns the loss.

        Args:
            scale_wrt_gas: divide the loss by the number of accumulated micro-batches, so that the step sees their mean.
        """
        self._check()
        depth = self.zero.depth
        scaled = self.scale(loss)
        if not scale_wrt_gas:
            scaled = scaled * self.gradient_accumulation_steps()
        self._loss = loss.detach()
        self._backwards += 1
        self.zero.last_micro_batch = self.is_gradient_accumulation_boundary()
        try:
            scaled.backward(retain_graph=retain_graph)
            self.zero.backward_ended()
        except _BROKEN:
            self._failed = True
            raise
        finally:
            self.zero.close_windows(depth)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-batch; at the last one of a step: step the optimizer, drop the gradients, then step the scheduler.

        With 16-bit weights a gradient that is not finite skips the step: weights and state stay as they are to the bit, `skipped_steps`
        counts, the scheduler waits, the loss scale of fp16 falls, and the parameter is named in a warning of the logger `swapio`.

        Args:
            lr_kwargs: for the scheduler's `step`.
        """
        self._check()
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self.zero.last_micro_batch = self.is_gradient_accumulation_boundary()
        if not boundary:
            self._step_applied = False
            return
        self._stepping = True
        try:
            self._own_optimizer().step()  # which runs its hooks
        finally:
            self._stepping = False
        if self._step_applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self._report()
        self._poll_saving()  # the step is whole when this raises: training goes on with the next batch

    def _optimizer_step(self) -> None:
        self._check()
        optimizer, stepper = self._own_optimizer(), self._stepper
        if stepper is None:
            raise RuntimeError("an optimizer comes with its stepper")
        self._check_membership()
        self.zero.close_windows()
        try:
            with uninterrupted(), self.zero.lock:
                stepper.check()
                limit = self.gradient_clipping()
                found = stepper.gradients(any_dtype=self._scaler is not None, clips=bool(limit))
                self._step_applied = found.bad is None
                scale = self.world_size * (self._scaler.scale if self._scaler is not None else 1.0)
                self._norm = found.norm / scale if found.norm is not None else None
                if found.bad is None:
                    factor = float(torch.clamp(limit / (self._norm + 1e-6), max=1.0)) if limit and self._norm is not None else 1.0
                    stepper.step(optimizer.param_groups, scale=scale, factor=factor)
                    self._norm = stepper.norm if self._norm is None else self._norm
                    optimizer.stepped()
                else:
                    self.skipped_steps += 1
                    skipped = f"{self.skipped_steps} steps skipped so far"
                    logger.warning("step skipped: the gradient of %r is not finite (%s)", found.bad, skipped)
                    self._drop_grads()
                if self.zero.sums is not None:
                    self.zero.sums.reset()
                self._backwards = 0
                self.global_steps += 1
                self.global_samples += self.train_batch_size()
                self.zero.step_ended()
            if self._scaler is not None:
                self._scaler.update(found.bad is not None)
                self.zero.loss_scale = self._scaler.scale
        except _BROKEN:
            self._failed = True
            raise
        if not self._stepping:
            self._poll_saving()

    def _poll_saving(self) -> None:
        """Raise what failed in the background, and end what has ended."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            if not saving.poll():
                self._saving = saving

    def wait_for_checkpoint(self) -> None:
        """Return when what `save_checkpoint(async_save=True)` began is whole on the drive, or raise what failed; on all ranks together."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def _own_optimizer(self) -> EngineOptimizer:
        if self.optimizer is not None:
            return self.optimizer
        if self.config.optimizer is not None:
            raise UsageError("nothing is trained: no parameter required a gradient at swapio.initialize; call requires_grad_() before it")
        raise UsageError("this engine has no optimizer: give swapio.initialize one, or name it in the config")

    def _check_membership(self) -> None:
        """Parameters that came into the model after `initialize` get gradients that the optimizer would never see."""
        new = [name for name, param in self.module.named_parameters() if param.requires_grad and managed(param) is None]
        if new:
            names = " ... ".join(repr(name) for name in dict.fromkeys((new[0], new[-1])))
            raise UsageError(
                f"{names} ({len(new)} parameters) came into the model after swapio.initialize and would never be trained: close the engine "
                "and initialize again, or keep them outside the model; load weights with load_state_dict(assign=False)"
            )

    def _report(self) -> None:
        """Tell the monitor and the log what a step was."""
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            loss = f", loss {float(self._loss):.4g}" if self._loss is not None and self._loss.numel() == 1 else ""
            logger.info("step %d: lr %s%s, %d skipped", self.global_steps, self.get_lr(), loss, self.skipped_steps)
        if not self.monitor.enabled:
            return
        events = [("Train/Samples/lr", rate, self.global_samples) for rate in self.get_lr()[:1]]
        if self._loss is not None and self._loss.numel() == 1:
            events.append(("Train/Samples/train_loss", float(self._loss), self.global_samples))
        if self._scaler is not None:
            events.append(("Train/Samples/loss_scale", self._scaler.scale, self.global_samples))
        self.monitor.write(events)

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._step_applied

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the coming `step` steps the optimizer."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Decide by yourself, from now on, which `step` steps the optimizer; the loss is still divided by `gradient_accumulation_steps`."""
        segments = [s for u in self.zero.units for s in u.layout.segments if s.num_trained]
        if not self.zero.partitions_grads and any(s.grad_dtype is not torch.float32 for s in segments):
            raise UsageError(
                'micro-batches would add up in 16 bits: give "data_types": {"grad_accum_dtype": "fp32"}, or gradient_accumulation_steps > 1'
            )
        self._boundary = is_boundary
        self.zero.last_micro_batch = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep their gradients on this rank.

        Raises:
            UsageError: gradients are partitioned (stages 2 and 3), so no rank has room for them.
        """
        if self.zero.stage >= 2 and self.world_size > 1:
            raise UsageError(
                f"no_sync keeps whole gradients on each rank, but ZeRO stage {self.zero.stage} partitions them: use stage 1 or no no_sync"
            )
        yield

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backward passes inside work as outside: gradients that stay on their rank are summed once, in `step`, in any case."""
        yield

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, over all ranks, before clipping; None before the first step."""
        return None if self._norm is None else float(self._norm)

    def _drop_grads(self) -> None:
        for unit in self.zero.units:
            unit.drop_grads()

    def _zero_grad(self) -> None:
        with self.zero.lock:
            if self.zero.partitions_grads and self.zero.sums is not None:  # on all ranks, whatever each of them has
                self.zero.send_grads()
                self.zero.sums.finish()
                self.zero.sums.reset()
            self._backwards = 0
            self._drop_grads()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients; `step` does it too. With partitioned gradients all ranks must call it."""
        self._zero_grad()

    # --- changed on the way ---

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """From the next step on, samples per step; the number of accumulated micro-batches follows.

        Raises:
            ConfigError: it is no multiple of the micro-batches of all ranks.
            UsageError: gradients that had no room to be accumulated exactly would be.
        """
        each = self.train_micro_batch_size_per_gpu() * self.world_size
        steps, rest = divmod(train_batch_size, each)
        if rest or steps < 1:
            raise ConfigError(
                f"train_batch_size: {train_batch_size} is no multiple of the micro-batches of all ranks, {each}; use for example "
                f"{each * max(steps, 1)}",
                key="train_batch_size", value=train_batch_size,
            )  # fmt: skip
        kept = self.zero.stage < 2 or self.world_size == 1
        if steps > 1 and kept and any(s.grad_dtype.itemsize < 4 for u in self.zero.units for s in u.layout.segments if s.num_trained):
            raise UsageError(
                "gradients of 16-bit weights are kept in 16 bits when there is one micro-batch per step; to accumulate more, initialize "
                "with gradient_accumulation_steps of 2 or more"
            )
        self._set_batch(train_batch_size=train_batch_size, gradient_accumulation_steps=steps)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Samples per forward from now on; samples per step follow, the number of micro-batches stays."""
        if micro_batch_size < 1:
            raise ConfigError(
                f"train_micro_batch_size_per_gpu: {micro_batch_size} is no number of samples; use 1 or more",
                key="train_micro_batch_size_per_gpu", value=micro_batch_size,
            )  # fmt: skip
        total = micro_batch_size * self.gradient_accumulation_steps() * self.world_size
        self._set_batch(train_batch_size=total, train_micro_batch_size_per_gpu=micro_batch_size)

    def _set_batch(self, **sizes: int) -> None:
        self.config = self.config.model_copy(update=sizes)

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None) -> None:
        """Compile the modules that are units, each by itself: what lies between them brings the next unit, and stays as it is.

        Args:
            backend, compile_kwargs: of `torch.compile`.
        """
        for module in self.zero.windows:
            module.compile(backend=backend, **(compile_kwargs or {}))

    def offload_states(self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False) -> None:
        """Make room on the accelerator: let go of all weights that nobody uses. They come back when they are used.

        Args:
            include, device, pin_memory, non_blocking: accepted, without effect: tensors go where they rest.

        Raises:
            UsageError: weights or optimizer state rest on the accelerator.
        """
        for name in ("offload_param", "offload_optimizer") if self.manager.device.has_memory else ():
            if getattr(self.config.zero_optimization, name).device == "none":
                raise UsageError(f'zero_optimization.{name}.device is "none": it rests on the accelerator; use "cpu" or "nvme"')
        self.empty_partition_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Do nothing: what `offload_states` let go comes back when it is used."""

    # --- what DeepSpeed's engine tells ---

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        return self.config.zero_optimization.stage > 0

    def zero_offload_optimizer(self) -> Any:
        return self.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> Any:
        return self.config.zero_optimization.offload_param

    def aio_config(self) -> Any:
        return self.config.aio

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def loss_scale(self) -> float:
        """What the loss is multiplied by; 1 without fp16."""
        return self._scaler.scale if self._scaler is not None else 1.0

    def dynamic_loss_scale(self) -> bool:
        return self.config.fp16.enabled and self.config.fp16.loss_scale == 0

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def get_mom(self) -> list[Any]:
        """The betas, or the momentum, of each param group."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum")) for group in groups]

    def get_type(self) -> list[str]:
        return [type(self.optimizer.inner).__name__] if self.optimizer is not None else []

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the weights, and of accumulated gradients."""
        weights = torch.bfloat16 if self.config.bf16.enabled else torch.float16 if self.config.fp16.enabled else torch.float32
        return weights, torch.float32

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """`module.state_dict()`, whole on every rank."""
        state: dict[str, Any] = self.module.state_dict()
        frozen = {n for n, p in self.module.named_parameters() if not p.requires_grad} if exclude_frozen_parameters else set()
        return {name: value for name, value in state.items() if name not in frozen}

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """`module.load_state_dict`, by all ranks."""
        self.module.load_state_dict(state_dict, strict=strict)

    def empty_partition_cache(self) -> None:
        """Let go of weights that nobody uses now."""
        with self.zero.lock:
            self.zero.detach_idle()

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, num_workers: int = 0) -> Any:
        """A DataLoader over this rank's share of `dataset`, in batches of `train_micro_batch_size_per_gpu`."""
        ordered = isinstance(dataset, torch.utils.data.IterableDataset)
        several = self.world_size > 1 and not ordered
        sampler: Any = torch.utils.data.DistributedSampler(dataset, self.world_size, self.global_rank) if several else None
        return torch.utils.data.DataLoader(
            dataset, batch_size=batch_size or self.train_micro_batch_size_per_gpu(), shuffle=not (several or ordered), sampler=sampler,
            collate_fn=collate_fn, num_workers=num_workers, drop_last=self.config.dataloader_drop_last,
        )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """The manager's counters, and the engine's: gradients, units, steps."""
        grads = sum(unit.layout.grad_nbytes for unit, _ in self.zero.grad_buffers())
        return self.manager.stats() | {
            "gradient_bytes": grads,
            "units": len(self.zero.units),
            "step": self.global_steps,
            "skipped_steps": self.skipped_steps,
        }

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes of this rank now: `{"weights": {"nvme": ..., "host": ..., "device": ...}, ...}`.

        Kinds: `weights` with their copies, `gathered` (whole while they are used, where ranks keep slices), `gradients` with the sums of
        those of all ranks, `optimizer`, `buffers`. Activations are not the engine's.
        """
        with self.zero.lock:
            return memory(self.zero, self._stepper, self.module)

    def describe_units(self) -> list[dict[str, Any]]:
        """The units in order: name, parameters, bytes, dtypes, and whether a module's forward is their window."""
        return [
            {
                "name": u.name,
                "params": list(u.names),
                "nbytes": u.layout.nbytes,
                "trained_numel": sum(s.num_trained for s in u.layout.segments),
                "dtypes": list(dict.fromkeys(str(s.dtype) for s in u.layout.segments)),
            }
            for u in self.zero.units
        ]

    def close(self) -> None:
        """End the engine, close its store and remove its files. Idempotent.

        The module gets ordinary parameters back if they fit in `host_memory`, and no transfer failed before; else any use of its
        weights raises `ClosedError`. Copy what you need (`engine.module.state_dict()`) before closing.
        """
        if not self._finalizer.alive:
            return
        budget = self.manager.arena.capacity
        restore = (
            not self._failed and not self._abandoned and not self.manager.closed and (budget is None or self._restore_nbytes <= budget)
        )
        reason = (
            "the engine is closed and its weights are gone; copy them before (engine.module.state_dict()), or train with more host_memory"
        )
        if not restore and not self._abandoned:
            logger.warning(
                "the weights (%s) are not given back to the module: %s", format_nbytes(self._restore_nbytes),
                "a transfer failed" if self._failed else "they do not fit in host_memory; copy engine.module.state_dict() before closing",
            )  # fmt: skip
        saving, self._saving = self._saving, None
        with contextlib.ExitStack() as end:
            end.callback(self.monitor.close)
            end.callback(self._finalizer)
            end.callback(self.zero.close, reason, restore=restore, wait=not self._failed)
            if saving is not None:
                saving.abandon() if self._failed else saving.wait()

    def abandon(self) -> None:
        """Close without giving the weights back to the module."""
        self._abandoned = True
        self.close()

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        async_save: bool = False,
        keep_last: int | None = None,
    ) -> bool:
        """Save all that training goes on from into the folder `save_dir/tag`; all ranks call it together, between steps.

        Weights (of trained parameters the fp32 masters), optimizer state and buffers are stored under their names and shapes, with the
        loss scale, the scheduler, the counters and the random state of each rank. What one configuration saved any other loads: other
        numbers of ranks, stages, places, budgets and dtypes. The folder appears whole or not at all; a tag that exists is replaced.
        Buffers are those of rank 0. One unit and one chunk of state are in memory at a time.

        Saving in the background, what a step is about to change is saved before, so the checkpoint is that of this call. It gets its name
        at the first step that finds it written, in `wait_for_checkpoint`, in the next save or load, or in `close`; there too a failure is
        raised, by a step when it is whole. Writes to weights by yourself must wait for it.

        Args:
            tag: default `global_step{N}`.
            client_state: anything that `torch.save` takes; `load_checkpoint` returns it.
            save_latest: name the tag in the file `latest`, which `load_checkpoint` looks for.
            exclude_frozen_parameters: leave them out.
            async_save: write while training goes on.
            keep_last: then remove older checkpoints in `save_dir` but for so many, and but for that which `latest` names.

        Returns:
            True, as DeepSpeed's does.

        Raises:
            UsageError: a tag that is no name, another one on another rank, or that of something that is no checkpoint; `client_state` that
                cannot be pickled. StorageError: no room, or another fault of the drive.
        """
        self._check()
        self.wait_for_checkpoint()
        saving = Saving(
            self, save_dir, tag, {} if client_state is None else client_state,
            save_latest=save_latest, exclude_frozen=exclude_frozen_parameters, keep_last=keep_last,
        )  # fmt: skip
        if async_save:
            saving.start()
            self._saving = saving
        else:
            saving.write()
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from what `save_checkpoint` saved; all ranks call it together. Load from folders that you trust: objects are unpickled.

        Names and shapes are compared, and every byte is checked: a load that fails there leaves the engine as it is. On one rank, before
        the first step, bytes are checked as they are read, and weights that rest on NVMe are kept there till the end; else all is read
        twice, checked before the first change. Gradients are dropped. A checkpoint of DeepSpeed's ZeRO (stages 1 to 3, any number of ranks)
        is loaded too; it has no checksums and no random state.

        Args:
            tag: default: what the file `latest` names.
            load_module_strict: names that the model or the checkpoint lacks are an error, else a warning.
            load_optimizer_states: else the optimizer's state and param groups stay as they are.
            load_lr_scheduler_states: else the scheduler stays as it is.
            load_module_only: only weights and buffers.

        Returns:
            The folder and the `client_state`; `(None, None)`, and a warning, when no tag is given and there is no file `latest`.

        Raises:
            UsageError: there is no such checkpoint, or it does not fit; StorageError: a file is damaged, missing or cannot be read.
        """
        self._check()
        self.wait_for_checkpoint()
        return load_checkpoint(self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        *,
        dtype: torch.dtype | str | None = None,
        max_shard_size: int | str = "5GB",
    ) -> bool:
        """Save the weights alone as safetensors into the folder `save_dir`; all ranks call it together.

        As `swapio export` does from a checkpoint: one file, or several with an index, tensors with several names under the first, and a
        `config.json` where `transformers` can load the model. Each rank writes what it has; some MiB are in memory at a time.

        Args:
            save_filename: of a model that fits in one file; a name with another ending becomes `model.safetensors`.
            exclude_frozen_parameters: only what is trained, as of an adapter.
            dtype: `"fp32"` (the masters), `"bf16"`, `"fp16"` or a `torch.dtype`, of what is floating; default: as it is trained.
            max_shard_size: bytes of a file.

        Raises:
            ConfigError: another dtype; StorageError: no room, or another fault of the drive.
        """
        self._check()
        save_model(self, save_dir, save_filename, exclude_frozen_parameters, dtype, max_shard_size)
        return True

    save_fp16_model = save_16bit_model

    def destroy(self) -> None:
        """The same as `close`, by DeepSpeed's name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, _BROKEN):
            self._failed = True
        self.close()

    def _check(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("the engine is closed; call swapio.initialize again")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError("an engine holds files and threads and cannot be copied or pickled; copy engine.module, or its state_dict()")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def _alive(reference: weakref.ref[Engine]) -> Engine:
    engine = reference()
    if engine is None:
        raise ClosedError("the engine of this optimizer is gone")
    return engine


def _abandon(zero: UnitSet, manager: SwapManager | None) -> None:
    if zero.snapshot is not None:
        zero.snapshot.stop()
    zero.closed = zero.closed or "the engine of this model was deleted without close(), and its weights with it"
    zero.ranks.close(wait=False)
    if manager is not None:
        manager.close()
