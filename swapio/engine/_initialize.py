"""`swapio.initialize`: from a model and a config to an engine."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..activation import configure
from ..config import SwapioConfig, load_config
from ..errors import ConfigError
from ..memory import trim_heap
from ..optim import CUT_NUMEL, OptimizerSpec, from_config, from_torch, round_bf16, with_state_dtype
from ..spec import format_nbytes
from ..swap import FilePart, Place, SwapManager, TensorSpec, open_manager
from ..zero import (
    CHUNK_NUMEL,
    ChunkedStep,
    Kept,
    Lent,
    Partition,
    Ranks,
    StepTiming,
    Unit,
    UnitLayout,
    UnitSet,
    UnitSpec,
    constructed,
    find_units,
    let_go,
    shares_constructed,
    world,
)
from ._adopt import Adoption
from ._budget import Setting, plan_host
from ._distributed import init_distributed
from ._engine import Engine
from ._in_file import in_file, parts_in_files, same_bytes
from ._monitor import Monitor
from ._originals import Originals
from ._scaler import LossScaler
from ._schedulers import scheduler_from_config

__all__ = ["initialize"]

logger = logging.getLogger("swapio")

_CHUNK_NUMELS = (4 * CHUNK_NUMEL, 2 * CHUNK_NUMEL, CHUNK_NUMEL)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    manager: SwapManager | None = None,
) -> tuple[Engine, Any, Any, Any]:
    """Take a model over: its weights and optimizer state go where the config says.

    Args:
        model: any `nn.Module` with ordinary dense parameters. Its identity and that of its parameters stay.
        optimizer: a fresh `torch.optim.AdamW`, `Adam` or `SGD`, or a function from parameters to one; default: what the config names.
            With neither, `.grad` is as in PyTorch, for an optimizer of your own, which steps what fits in `host_memory` at once.
        dist_init_required: join the ranks with `init_distributed`; default: where `WORLD_SIZE` says that there are several.
        model_parameters: what the config's optimizer trains (parameters or groups); default: all that require a gradient.
        config: a dict or the path of a JSON file in DeepSpeed's format, with a section `swapio`; `config_params` is its old name.
        manager: a `SwapManager` to live in, which stays open after the engine; default: one of its own, from the config.

    Returns:
        `(engine, optimizer, dataloader, lr_scheduler)`; the last three are None where nothing was given.

    Raises:
        ConfigError: a setting, an optimizer or a parameter that cannot work; BudgetError: `host_memory` is below what the model needs;
        StorageError: no room on the drive, or a path that cannot be used.
    """
    if model is None:
        raise ConfigError("model: none given; call swapio.initialize(model=...)", key="model")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu, mesh_param: model parallelism is not supported; leave them out", key="mpu")
    given = [c for c in (config, config_params, getattr(args, "deepspeed_config", None)) if c is not None]
    if len(given) != 1:
        raise ConfigError("config: give exactly one of config, config_params and args.deepspeed_config", key="config")
    world_size, source = world()
    settings = load_config(given[0], world_size=world_size, world_size_source=source)
    _check_model(model)
    if dist_init_required or (dist_init_required is None and world_size > 1):
        init_distributed(distributed_port=distributed_port)
    inner, spec = _optimizer(model, optimizer, model_parameters, settings)
    with Adoption(model) as adoption, contextlib.ExitStack() as undo:
        owns = manager is None
        if manager is None:
            manager = adoption.lend_manager(settings, undo) or undo.enter_context(open_manager(settings))
        engine = _engine(model, settings, manager, owns, inner, spec, undo, adoption)
        kept = settings.activation_checkpointing
        if kept.model_fields_set:
            configure(num_checkpoints=kept.number_checkpoints, checkpoint_in_cpu=kept.cpu_checkpointing, device=manager.device)
        engine.lr_scheduler = _scheduler(engine, lr_scheduler)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        adoption.finish(manager)
        undo.pop_all()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _scheduler(engine: Engine, given: Any) -> Any:
    """The user's scheduler, or what the config names."""
    section = engine.config.scheduler
    if given is not None:
        scheduler = given(engine.optimizer) if callable(given) else given
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ConfigError(
                "lr_scheduler: ReduceLROnPlateau needs a measure at each step, which engine.step() has not; make it from engine.optimizer "
                "after swapio.initialize, and call its step(measure)",
                key="lr_scheduler",
                value=scheduler,
            )
        return scheduler
    if section is None:
        return None
    if engine.optimizer is None:
        raise ConfigError("scheduler: there is no optimizer whose learning rate it could set; name one in the config", key="scheduler")
    return scheduler_from_config(engine.optimizer, section.type, section.params)


def _check_model(model: nn.Module) -> None:
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError("model: DataParallel copies weights past the engine; pass the bare module", key="model")
    for name, param in model.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ConfigError(f"model: {name!r} is lazy; run one batch through the model before swapio.initialize", key="model")
        if type(param) is not nn.Parameter and not constructed(param):
            raise ConfigError(
                f"model: {name!r} is a {type(param).__name__}; only plain nn.Parameter can be managed (is it in another engine?)",
                key="model",
            )
        if param.is_meta:
            raise ConfigError(f"model: {name!r} is on the meta device and has no values; materialise the model first", key="model")
    _check_memory_is_its_own(model)


def _check_memory_is_its_own(model: nn.Module) -> None:
    """Two parameters over the same bytes are one to PyTorch; each would get a copy of its own here."""
    ordinary = [(name, t) for name, t in (*model.named_parameters(), *model.named_buffers()) if not constructed(t)]
    tensors = [(name, t.detach()) for name, t in ordinary if t.numel() and not t.is_sparse]
    for name, tensor in tensors:
        if (shared := shares_constructed(tensor)) is not None:
            raise ConfigError(f"model: {name!r} shares memory with {shared!r}; assign the same nn.Parameter to both", key="model")
    spans = sorted((t.data_ptr(), t.data_ptr() + TensorSpec.of(t).nbytes, name) for name, t in tensors if t.data_ptr())
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            raise ConfigError(
                f"model: {first!r} and {second!r} share memory without being one tensor; assign the same nn.Parameter to both",
                key="model",
            )


def _optimizer(
    model: nn.Module, optimizer: Any, model_parameters: Iterable[Any] | None, settings: SwapioConfig
) -> tuple[torch.optim.Optimizer | None, OptimizerSpec | None]:
    params = list(model_parameters) if model_parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if optimizer is None and settings.optimizer is not None and params:
        section = from_config(settings.optimizer.type, settings.optimizer.params)
        optimizer = section.torch_class(params, **section.groups[0])
    elif callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(params)
    if optimizer is None:
        return None, None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer", key="optimizer", value=optimizer)
    spec, groups = from_torch(optimizer)
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for p in groups):
        raise ConfigError("optimizer: it holds parameters that are not in the model; make it from model.parameters()", key="optimizer")
    return optimizer, with_state_dtype(spec, settings.swapio.optimizer_state_dtype, key="swapio.optimizer_state_dtype")


def _engine(
    model: nn.Module,
    settings: SwapioConfig,
    manager: SwapManager,
    owns: bool,
    inner: torch.optim.Optimizer | None,
    spec: OptimizerSpec | None,
    undo: contextlib.ExitStack,
    adoption: Adoption,
) -> Engine:
    offload = settings.zero_optimization
    param_home = Place.parse(offload.offload_param.device, key="zero_optimization.offload_param.device")
    state_home = Place.parse(offload.offload_optimizer.device, key="zero_optimization.offload_optimizer.device")
    step_place = manager.place(Place.DEVICE if state_home is Place.DEVICE else Place.HOST)
    groups = {id(p): i for i, g in enumerate(inner.param_groups if inner is not None else ()) for p in g["params"]}
    untrained = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in groups]
    if inner is not None and untrained:
        logger.warning(
            "%d parameters require a gradient but are in no param group (%s ...): theirs is dropped", len(untrained), untrained[0]
        )
    specs = find_units(model, settings.swapio.units)
    dtype = torch.bfloat16 if settings.bf16.enabled else torch.float16 if settings.fp16.enabled else None
    stage = offload.stage
    ranks = Ranks(timeout_s=settings.swapio.timeout_s)
    undo.callback(ranks.close, wait=False)
    if not ranks.alone:
        _same_values(model, ranks)
    # sums of several gradients are kept in fp32: here for micro-batches, at stage 0 for those of the ranks too
    several_parts = settings.gradient_accumulation_steps > 1 or settings.data_types.grad_accum_dtype is not None
    sums_here = several_parts if ranks.alone or stage < 2 else False
    grad_dtype = torch.float32 if sums_here or not (ranks.alone or stage) else None
    align_numel = spec.cut_numel if spec is not None else CUT_NUMEL
    stays = param_home is Place.NVME and ranks.alone
    parts = parts_in_files(specs if stays else (), {id(p) for p in model.parameters() if _is_trained(p, groups)}, dtype)
    parts = parts or [[None] * len(u.params) for u in specs]
    layouts = [_layout(u, groups, dtype, grad_dtype, align_numel, p) for u, p in zip(specs, parts, strict=True)]
    on_device = manager.device.has_memory
    timing = _timing(settings, ranks, trains=inner is not None)
    spills = ranks.alone and inner is not None and step_place is Place.HOST and Place.NVME in (param_home, state_home)
    spills = spills and (timing is not StepTiming.IN_BACKWARD or several_parts)
    setting = Setting(
        block_nbytes=manager.arena.block_nbytes, chunk_numel=0, param_home=param_home, state_home=state_home, step_place=step_place,
        has_device=on_device, timing=timing or StepTiming.IN_FORWARD, spills=spills,
        num_micro_batches=settings.gradient_accumulation_steps, stage=stage, rank=ranks.rank, num_ranks=ranks.size,
    )  # fmt: skip
    capacity = manager.arena.capacity
    plan = plan_host(layouts, spec, setting, capacity, _CHUNK_NUMELS)
    need = plan.need
    need.check(capacity, specs[plan.largest].name if specs else "")
    kept = plan.resident(capacity)
    keep = param_home is Place.DEVICE if on_device else capacity is None or need.everything <= capacity
    keep = keep and (ranks.alone or stage < 3)
    if timing is None:
        timing = StepTiming.IN_FORWARD if ranks.alone and not keep and step_place is Place.HOST else StepTiming.AT_STEP
    zero = UnitSet(
        manager, owns_manager=owns, step_place=step_place, keep_attached=keep, ranks=ranks, stage=stage, plain_grads=inner is None
    )
    stepper = None
    if spec is not None and inner is not None:
        stepper = ChunkedStep(
            zero, spec, home=state_home, timing=timing, live_groups=lambda: inner.param_groups, chunk_numel=plan.chunk_numel
        )
    originals = Originals(stepper)
    undo.callback(zero.close, "initialize failed", restore=True, value=originals.value)
    for number, (unit_spec, layout) in enumerate(zip(specs, layouts, strict=True)):
        partition = Partition(layout, ranks.size)
        home = Place.HOST if Kept("weights", number) in kept else param_home
        nbytes = partition.shard_nbytes[ranks.rank] if zero.partitions_weights else layout.nbytes
        record = zero.create(unit_spec.name, nbytes, home, in_file(layout, parts[number]) if home is Place.NVME else ())
        unit_groups = [groups.get(id(p)) for _, p in unit_spec.params]
        unit = Unit(zero, unit_spec.name, unit_spec.params, unit_groups, record, layout, partition)
        unit.device = manager.device.torch_device
        if zero.sums is not None:
            zero.sums.add_unit(unit)
        if stepper is not None:
            stepper.add_unit(unit, kept={item.chunk for item in kept if item.kind == "state" and item.unit == number})
            unit.keeps_grads = timing is not StepTiming.IN_BACKWARD
            if spills and layout.grad_nbytes and Kept("gradients", number) not in kept:
                unit.keep_grads_on_nvme()
        lent = adoption.lend(unit_spec.params, manager) if stays and home is Place.NVME else None
        if lent is None or not _borrow(unit, stepper, lent):
            adoption.prepare(unit_spec.params)
            if not adoption.active:  # a model that need not fit in memory has nothing kept there
                originals.keep(unit)
            _take_over(unit, stepper)
        trim_heap()
        adoption.put_away(zero)
        zero.units.append(unit)
        if unit_spec.module is not None:
            zero.add_window(unit_spec.module, unit)
        zero.hook_gradients(unit)
    zero.leave_room_for_gradients()
    zero.load_together(model)
    ranks.serve(zero)
    device = manager.device.torch_device
    buffers = {b: b.to(device, _target_dtype(b, dtype)) for b in model.buffers()}  # one of several modules stays one
    undo.callback(_replace_buffers, model, {new: old for old, new in buffers.items()})
    _replace_buffers(model, buffers)
    for note in settings.notes:
        logger.info("%s", note)
    weights = sum(layout.nbytes for layout in layouts)
    resident = sum(record.nbytes for record in zero.records if record.home is Place.HOST)
    logger.info(
        "%d units, weights %s on %s, optimizer state %s on %s, %s kept in host memory, at least %s needed, budget %s; optimizer_step %s",
        len(specs), format_nbytes(weights), param_home.name, format_nbytes(stepper.state_nbytes() if stepper else 0), state_home.name,
        format_nbytes(resident), format_nbytes(need.minimum), "none" if capacity is None else format_nbytes(capacity), timing.name.lower(),
    )  # fmt: skip
    return Engine(
        model,
        config=settings,
        manager=manager,
        owns_manager=owns,
        zero=zero,
        stepper=stepper,
        inner_optimizer=inner,
        restore_nbytes=weights,
        scaler=LossScaler.from_config(settings.fp16) if settings.fp16.enabled else None,
        monitor=Monitor(settings, rank=ranks.rank),
    )


def _timing(settings: SwapioConfig, ranks: Ranks, *, trains: bool) -> StepTiming | None:
    """When units are stepped, if the config says it.

    Raises:
        ConfigError: it cannot be done with the other settings.
    """
    given = settings.swapio.optimizer_step
    if given == "auto" or not trains:
        return None
    timing = StepTiming[given.upper()]
    why = None
    if timing is not StepTiming.AT_STEP and not ranks.alone:
        why = f'with {ranks.size} ranks only "at_step" is possible: the others ask for weights that would not be stepped yet'
    elif timing is StepTiming.IN_BACKWARD and settings.gradient_clipping:
        why = f'the norm for gradient_clipping {settings.gradient_clipping} is known only after backward; use "in_forward", or no clipping'
    elif timing is StepTiming.IN_BACKWARD and settings.fp16.enabled:
        why = 'fp16 skips steps whose gradients overflow, which is known only after backward; use "in_forward", or bf16'
    if why is not None:
        raise ConfigError(f'swapio.optimizer_step: "{given}" cannot work here: {why}', key="swapio.optimizer_step", value=given)
    return timing


def _target_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _replace_buffers(model: nn.Module, replacements: dict[torch.Tensor, torch.Tensor]) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer in replacements:
                module._buffers[name] = replacements[buffer]


def _same_values(model: nn.Module, ranks: Ranks) -> None:
    """Rank 0's weights and buffers are everybody's, as in `DistributedDataParallel`."""
    with torch.no_grad():
        for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
            flat = tensor.detach().cpu().contiguous()
            ranks.broadcast(flat, source=0, what=f"sharing the first values of {name!r}")
            if ranks.rank:
                tensor.copy_(flat)


def _layout(
    spec: UnitSpec,
    groups: dict[int, int],
    weights: torch.dtype | None,
    grad_dtype: torch.dtype | None,
    align_numel: int,
    parts: Sequence[FilePart | None],
) -> UnitLayout:
    shown = []
    for name, param in spec.params:
        dtype = _target_dtype(param, weights)
        if id(param) in groups and dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ConfigError(
                f"model: {name!r} is {dtype}; only float32, bfloat16 and float16 parameters can be trained, call model.float()",
                key="model",
            )
        shown.append(torch.empty_strided(param.shape, param.stride(), dtype=dtype, device="meta"))
    trained = [_is_trained(p, groups) for _, p in spec.params]
    return UnitLayout(shown, trained, in_file=[p is not None for p in parts], grad_dtype=grad_dtype, align_numel=align_numel)


def _is_trained(param: nn.Parameter, groups: dict[int, int]) -> bool:
    return id(param) in groups and param.requires_grad


@torch.no_grad()
def _borrow(unit: Unit, stepper: ChunkedStep | None, lent: Sequence[Lent]) -> bool:
    """Let a unit and its masters begin with what is on the drive already; False where they would not be the same."""
    for part, slot in zip(lent, unit.layout.slots, strict=True):
        if (part.slot.dtype, part.slot.shape, part.slot.stride) != (slot.dtype, slot.shape, slot.stride) or (
            part.lower and not slot.trained
        ):
            return False
    lower = {slot.index: part.lower for part, slot in zip(lent, unit.layout.slots, strict=True) if part.lower is not None}
    if lower and (stepper is None or not stepper.borrow_masters(unit, lower)):
        return False
    unit.record.borrowed = [(slot.offset, part.weights) for part, slot in zip(lent, unit.layout.slots, strict=True)]
    if stepper is not None and stepper.has_whole_masters(unit):
        with unit.zero.pin(unit.record, Place.HOST) as lease:
            stepper.store_masters(unit, {}, lease.raw)
    let_go(unit.params)
    unit.manage()
    return True


@torch.no_grad()
def _take_over(unit: Unit, stepper: ChunkedStep | None) -> None:
    """Copy a unit's values into its record, and the lower halves of fp32 masters into the optimizer's state."""
    masters: dict[int, torch.Tensor] = {}
    zero = unit.zero
    with zero.pin(unit.record, Place.HOST) as lease, contextlib.ExitStack() as stack:
        whole = lease.raw
        if zero.partitions_weights:
            scratch = zero.lease(f"weights of {unit.name}", unit.layout.nbytes)
            stack.callback(zero.manager.end_lease, scratch)
            whole = scratch.tensor
        rests = {offset for offset, _ in unit.record.in_file}
        span: slice | None = slice(0, unit.record.own_nbytes)
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            view = unit.layout_view(whole, slot.index)
            if slot.offset in rests and same_bytes(view, param):
                continue
            if slot.offset in rests:  # written past PyTorch
                span = None
            view.copy_(param)
            if stepper is not None and slot.trained and slot.dtype is not torch.float32 and param.dtype is not slot.dtype:
                dense = torch.empty_strided(slot.shape, slot.stride, dtype=torch.float32)
                masters[slot.index] = param.detach().float() if tuple(param.stride()) == slot.stride else dense.copy_(param)
                if slot.dtype is torch.bfloat16 and not zero.ranks.alone:  # as each slice's owner splits it; the conversion has other ties
                    unit.layout_view(whole, slot.index).copy_(round_bf16(masters[slot.index]))
        if zero.partitions_weights:
            for piece in unit.partition.pieces[zero.ranks.rank]:
                part = whole[piece.offset : piece.offset + piece.nbytes]
                lease.raw[piece.shard_offset : piece.shard_offset + piece.nbytes].copy_(part)
        del whole, view
        if stepper is not None and any(s.trained and s.dtype is not torch.float32 for s in unit.layout.slots):
            stepper.store_masters(unit, masters, lease.raw)
        lease.mark_dirty(span=span)
    unit.manage()
