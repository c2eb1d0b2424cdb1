"""How the parameters of a unit lie in its extent, and which modules are units. Pure functions."""

from __future__ import annotations

import bisect
import collections
import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..errors import ConfigError
from ..spec import PAGE_NBYTES, round_up

__all__ = ["Segment", "Slot", "UnitLayout", "UnitSpec", "find_units"]

ALIGN_NUMEL = 64
"""Parameters start at multiples of 64 elements, and are stepped with the padding after them: a kernel sees whole vectors wherever a unit is
cut. PyTorch steps each parameter by itself, the last few elements without vectors, which may differ in the last bit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place: `span` elements at `start` of its segment."""

    index: int  # in the unit
    segment: int
    start: int  # element in the segment, a multiple of the layout's `align_numel`
    offset: int  # byte in the unit
    span: int  # elements from the first to the last in memory
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Parameters of one dtype: `numel` elements from byte `offset`; the first `num_trained` belong to trained parameters."""

    dtype: torch.dtype
    offset: int
    numel: int
    num_trained: int
    grad_offset: int  # byte of the gradients in the unit's gradient buffer
    grad_dtype: torch.dtype


class UnitLayout:
    """Segments by dtype, trained parameters first, each parameter back to back at a multiple of `align_numel` elements.

    Args:
        in_file: which of the frozen parameters stay in files: they have segments of their own, the last ones.
        align_numel: 64 or a multiple of it, as the optimizer's state needs (`OptimizerSpec.cut_numel`).
        grad_dtype: of gathered gradients; None: that of the weights.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        trained: Sequence[bool],
        *,
        in_file: Sequence[bool] = (),
        grad_dtype: torch.dtype | None = None,
        align_numel: int = ALIGN_NUMEL,
    ) -> None:
        self.align_numel = align_numel
        kinds = list(zip(in_file or [False] * len(params), (p.dtype for p in params), strict=True))
        slots: dict[int, Slot] = {}
        segments: list[Segment] = []
        offset = grad_offset = 0
        for number, kind in enumerate(sorted(dict.fromkeys(kinds), key=lambda k: k[0])):
            dtype = kind[1]
            start = num_trained = 0
            members = [i for i, each in enumerate(kinds) if each == kind]
            for i in sorted(members, key=lambda i: not trained[i]):
                shape, stride, span = _dense(params[i])
                slots[i] = Slot(i, number, start, offset + start * dtype.itemsize, span, shape, stride, dtype, trained[i])
                start += round_up(span, align_numel)
                if trained[i]:
                    num_trained = start
            segments.append(Segment(dtype, offset, start, num_trained, grad_offset, grad_dtype or dtype))
            offset = round_up(offset + start * dtype.itemsize, PAGE_NBYTES)
            grad_offset = round_up(grad_offset + num_trained * (grad_dtype or dtype).itemsize, PAGE_NBYTES)
        self.slots = [slots[i] for i in range(len(params))]
        self.segments = segments
        self.nbytes = offset
        self.grad_nbytes = grad_offset
        self._by_offset = sorted(self.slots, key=lambda s: (s.offset, s.span))
        self._offsets = [s.offset for s in self._by_offset]

    def grad_bytes(self, slot: Slot) -> slice:
        """Where the gradient of a trained parameter lies in the gradient buffer, in bytes."""
        segment = self.segments[slot.segment]
        start = segment.grad_offset + slot.start * segment.grad_dtype.itemsize
        return slice(start, start + slot.span * segment.grad_dtype.itemsize)

    def grad_view(self, buffer: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The gradient of a trained parameter in the gradient buffer, uint8 `[grad_nbytes]`."""
        flat = buffer[self.grad_bytes(slot)].view(self.segments[slot.segment].grad_dtype)
        return flat.as_strided(slot.shape, slot.stride)

    def zero_grad_padding(self, buffer: torch.Tensor) -> None:
        """What lies between parameters is stepped with them."""
        for slot in self.slots:
            if slot.trained:
                end = self.grad_bytes(slot).stop
                itemsize = self.segments[slot.segment].grad_dtype.itemsize
                buffer[end : end + (round_up(slot.span, self.align_numel) - slot.span) * itemsize].zero_()

    def slot_at(self, offset: int) -> Slot:
        """The parameter that byte `offset` of the unit belongs to."""
        return self._by_offset[max(bisect.bisect_right(self._offsets, offset) - 1, 0)]


def _dense(param: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Shape, strides and span; strides that leave gaps or overlap become contiguous ones."""
    shape, stride = tuple(param.shape), tuple(param.stride())
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if span != param.numel():
        stride, span = tuple(torch.empty(shape, device="meta").stride()), param.numel()
    return shape, stride, span


@dataclasses.dataclass(frozen=True, slots=True)
class UnitSpec:
    """A unit before it is made: the module whose forward is its window (None: fetched per use), and its parameters by name."""

    name: str
    module: nn.Module | None
    params: tuple[tuple[str, nn.Parameter], ...]


def find_units(model: nn.Module, patterns: Sequence[str] = ()) -> list[UnitSpec]:
    """Cut a model into units; every parameter is in exactly one.

    With `patterns` (as in `fnmatch`, against module names) the matching modules are units. Without, the members of a `ModuleList` or
    `Sequential` with at least two children of one type are: the outermost such list on each path. What is left is grouped by the module
    that owns it. A parameter that several units would own is a unit of its own, fetched on each use.

    Raises:
        ConfigError: a pattern matches nothing, or one match contains another.
    """
    chosen = _match(model, patterns) if patterns else _repeated(model)
    owners: dict[int, list[str]] = collections.defaultdict(list)
    tops = {id(m) for m in chosen.values()}
    members: dict[str, list[tuple[str, nn.Parameter]]] = collections.defaultdict(list)
    modules: dict[str, nn.Module] = {}

    for prefix, module in _owners(model, "", tops):
        unit = prefix or "model"
        modules.setdefault(unit, module)
        for name, param in module.named_parameters(prefix=prefix, recurse=id(module) in tops):
            if unit not in owners[id(param)]:
                owners[id(param)].append(unit)
                members[unit].append((name, param))
    units: list[UnitSpec] = []
    shared: set[int] = set()
    for unit, params in members.items():
        own = tuple((n, p) for n, p in params if len(owners[id(p)]) == 1)
        for name, param in params:
            if len(owners[id(param)]) > 1 and id(param) not in shared:
                shared.add(id(param))
                units.append(UnitSpec(name, None, ((name, param),)))
        if own:
            module = modules[unit]
            leaf = id(module) in tops or not any(True for c in module.children() for _ in c.parameters())
            units.append(UnitSpec(unit, module if leaf else None, own))
    return units


def _owners(module: nn.Module, prefix: str, tops: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """All modules that are not inside one of `tops`, in order. (A function that calls itself from a closure would keep the model alive.)"""
    yield prefix, module
    if id(module) not in tops:
        for name, child in module.named_children():
            yield from _owners(child, f"{prefix}.{name}" if prefix else name, tops)


def _match(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    every = dict(model.named_modules())
    for pattern in patterns:
        hits = {n: m for n, m in every.items() if n and fnmatch.fnmatchcase(n, pattern)}
        if not hits:
            raise ConfigError(
                f"swapio.units: {pattern!r} matches no module; names look like {', '.join(list(every)[1:6])}",
                key="swapio.units",
                value=pattern,
            )
        chosen.update(hits)
    for name in chosen:
        inner = next((n for n in chosen if n.startswith(name + ".")), None)
        if inner is not None:
            raise ConfigError(f"swapio.units: {name!r} contains {inner!r}; a unit cannot lie in another", key="swapio.units", value=inner)
    return chosen


def _repeated(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    children = list(model.named_children())
    counts = collections.Counter(type(c) for _, c in children) if isinstance(model, nn.ModuleList | nn.Sequential) else {}
    for name, child in children:
        path = f"{prefix}.{name}" if prefix else name
        if counts.get(type(child), 0) > 1 and any(True for _ in child.children()):
            chosen[path] = child
        else:
            chosen |= _repeated(child, path)
    return chosen
