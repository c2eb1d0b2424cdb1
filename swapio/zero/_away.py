"""Parameters that can be away: any use of one brings its unit.

[Note: Three classes of one parameter] A managed parameter changes its class, never its identity. *Away* (everywhere but in its unit's own
forward, also while its bytes are here): `__torch_function__` sees every op, brings the unit first, and notices writes. *Window* (inside
its unit's forward, and as the argument of one op that *Away* runs): ops run at full speed, as on `nn.Parameter`; only what could write
behind autograd's back is watched. Its data is one NaN expanded to the true shape while it is away, so shape, dtype and numel stay true.

[Note: Writes that bump no version] `p.data.add_()`, numpy or a raw pointer change bytes unseen by the version counter. Handing out such an
alias takes a hash of the bytes; the unit compares before it lets go. A reader (an EMA, a norm) thus costs a hash and never a write.
"""

from __future__ import annotations

import collections
import contextlib
import io
import sys
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import ClosedError
from ._quiet import uninterrupted

if TYPE_CHECKING:
    from ._unit import Unit

__all__ = ["AwayParameter", "ManagedParameter", "WindowParameter", "forget", "manage", "managed", "placeholder", "raw_grad", "set_raw_grad"]

_T = torch.Tensor
_OFF = torch._C.DisableTorchFunctionSubclass
_STATE_DICT = nn.Module.state_dict.__code__
_REGISTRY: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Unit], int]] = {}  # nothing is kept on the parameter itself
_NANS: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _accessors(names: str, kind: str) -> set[Any]:
    found = (getattr(getattr(_T, n, None), kind, None) for n in names.split())
    return {f for f in found if f is not None}


_METADATA: set[Any] = (
    _accessors(
        "shape dtype device requires_grad is_leaf layout ndim is_cuda is_sparse is_meta is_quantized is_nested is_mkldnn is_cpu grad_fn "
        "itemsize nbytes _version retains_grad output_nr _backward_hooks _post_accumulate_grad_hooks names is_mps is_xpu",
        "__get__",
    )
    | _accessors("requires_grad _backward_hooks _post_accumulate_grad_hooks", "__set__")
    | {
        getattr(_T, n)
        for n in "size numel dim nelement element_size is_floating_point is_complex requires_grad_ register_hook get_device "
        "register_post_accumulate_grad_hook retain_grad __len__ __hash__ ndimension is_inference is_signed".split()
    }
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)
_GRAD: Any = _T.grad
_GRAD_GET, _GRAD_SET, _GRAD_DEL = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_DIFFERENTIATE = {_T.backward, torch.autograd.backward, torch.autograd.grad}
_ALIASES: set[Any] = _accessors("data", "__get__") | {
    _T.data_ptr, _T.numpy, _T.untyped_storage, _T.storage, _T.__array__, _T.__dlpack__, torch._C._to_dlpack, _T.set_, _T.detach,
}  # fmt: skip


def placeholder(dtype: torch.dtype, device: torch.device, shape: Iterable[int]) -> torch.Tensor:
    """What an away parameter shows: one NaN (zero for integers) expanded to the true shape."""
    scalar = _NANS.get((dtype, device))
    if scalar is None:
        value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        scalar = _NANS[dtype, device] = torch.full((), value, dtype=dtype, device=device)
    return scalar.expand(tuple(shape))


def is_placeholder(tensor: torch.Tensor) -> bool:
    scalar = _NANS.get((tensor.dtype, tensor.device))
    return scalar is not None and scalar.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def manage(param: nn.Parameter, unit: Unit, index: int) -> None:
    key = id(param)
    _REGISTRY[key] = (weakref.ref(param, lambda _: _REGISTRY.pop(key, None)), weakref.ref(unit), index)


def forget(param: nn.Parameter) -> None:
    _REGISTRY.pop(id(param), None)


def managed(param: object) -> tuple[Unit, int] | None:
    """The unit of a parameter and its index there."""
    entry = _REGISTRY.get(id(param))
    if entry is None or entry[0]() is not param:
        return None
    unit = entry[1]()
    if unit is None:
        raise ClosedError(
            "this model's engine is gone, and with it the weights; keep a reference to the engine as long as the model is used"
        )
    return unit, entry[2]


def raw_grad(param: nn.Parameter) -> torch.Tensor | None:
    """What autograd left in `.grad`, past the classes below."""
    with _OFF():
        grad: torch.Tensor | None = _GRAD_GET(param)
    return grad


def set_raw_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    with _OFF():
        _GRAD_SET(param, grad)


def _collect(value: Any, found: list[nn.Parameter]) -> None:
    if isinstance(value, _T):
        if managed(value) is not None:
            found.append(value)  # type: ignore[arg-type]
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)


def _edges(value: Any) -> Any:
    """`value` with graph edges in place of away parameters: to be differentiated by, a parameter need not be here."""
    if isinstance(value, AwayParameter):
        return torch.autograd.graph.get_gradient_edge(value)
    if isinstance(value, list | tuple):
        return tuple(_edges(item) for item in value)
    return value


def _plain_copy(param: nn.Parameter) -> nn.Parameter:
    entry = managed(param)
    if entry is None:
        raise RuntimeError("this parameter's engine is gone; keep the engine alive, or close it, before copying the module")
    return nn.Parameter(entry[0].read(entry[1]), requires_grad=param.requires_grad)


class ManagedParameter(nn.Parameter):
    """What both classes share: gradients come from the unit's buffer, copies are plain parameters."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = _plain_copy(self)
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = _plain_copy(self)
        return torch._utils._rebuild_parameter, (plain.data, plain.requires_grad, collections.OrderedDict())


def _watch(func: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: nn.Parameter, *args: Any, **kwargs: Any) -> Any:
        entry = managed(self)
        if entry is not None:
            entry[0].watch(entry[1])
        return func(self, *args, **kwargs)

    return watched


class WindowParameter(ManagedParameter):
    """A managed parameter whose bytes are here for sure."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data = property(_watch(_T.data.__get__), _T.data.__set__)  # type: ignore[attr-defined]
    data_ptr = _watch(_T.data_ptr)
    numpy = _watch(_T.numpy)
    detach = _watch(_T.detach)
    untyped_storage = _watch(_T.untyped_storage)

    @property
    def grad(self) -> torch.Tensor | None:
        entry = managed(self)
        return raw_grad(self) if entry is None else entry[0].get_grad(entry[1])

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        entry = managed(self)
        if entry is None:
            _GRAD_SET(self, value)
        else:
            entry[0].set_grad(entry[1], value)


class AwayParameter(ManagedParameter):
    """A managed parameter: any op on it brings its unit first."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with _OFF():
                return func(*args, **kwargs)
        if func in (_GRAD_GET, _GRAD_SET, _GRAD_DEL):
            return _grad_access(func, args)
        if func is _T.stride:
            return _stride(*args, **kwargs)
        if func in _DIFFERENTIATE:
            return func(*(_edges(a) for a in args), **{k: _edges(v) for k, v in kwargs.items()})
        return _run(func, args, kwargs)


def _by_value(param: nn.Parameter) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    """For another process: PyTorch would share the memory of the plain copy, which is gone before a spawned child opens it."""
    stream = io.BytesIO()
    torch.save(_plain_copy(param), stream)
    return _from_value, (stream.getvalue(),)


def _from_value(value: bytes) -> Any:
    return torch.load(io.BytesIO(value))


for _class in (AwayParameter, WindowParameter):
    ForkingPickler.register(_class, _by_value)


def _stride(param: nn.Parameter, dim: int | None = None) -> Any:
    entry = managed(param)
    with _OFF():
        stride = entry[0].layout.slots[entry[1]].stride if entry is not None and is_placeholder(param) else param.stride()
    return stride if dim is None else stride[dim]


def _grad_access(func: Any, args: Any) -> Any:
    entry = managed(args[0])
    if entry is None:
        with _OFF():
            return func(*args)
    unit, index = entry
    if func == _GRAD_GET:
        return unit.get_grad(index)
    return unit.set_grad(index, args[1] if func == _GRAD_SET else None)


def _in_state_dict() -> bool:
    """Whether `Module.state_dict` runs in this thread; it shall get copies, for views would keep every unit attached.

    Hooks could not tell: the last one is not reached when a hook of the user raises.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _STATE_DICT:
        frame = frame.f_back
    return frame is not None


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One op with away parameters among its arguments: bring and pin all their units, run it on plain parameters."""
    params: list[nn.Parameter] = []
    _collect((args, kwargs), params)
    entries = [(p, *e) for p in params if (e := managed(p)) is not None]
    if not entries:
        with _OFF():
            return func(*args, **kwargs)
    units = {id(u): u for _, u, _ in entries}.values()
    zero = next(iter(units)).zero
    if func is _T.detach and len(entries) == 1 and _in_state_dict():
        _, unit, index = entries[0]
        return unit.read(index)
    opened: list[Unit] = []
    try:
        with uninterrupted():
            for unit in units:
                unit.open()
                opened.append(unit)
        if func in _ALIASES or "_fused" in getattr(func, "__name__", ""):
            for _, unit, index in entries:
                unit.watch(index)
        # torch function stays on: func may run user code that touches other away parameters
        with contextlib.nullcontext() if zero.keep_attached else zero.saved.around_op():
            return func(*args, **kwargs)
    finally:
        with uninterrupted():
            for unit in opened:
                unit.shut()
