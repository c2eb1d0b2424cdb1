"""Kept inputs wait in host memory: `cpu_checkpointing`.

[Note: Which tensors] `torch.utils.checkpoint` gives what it keeps to the saved-tensor hooks that are active where it is called; its own
pair hides what the function saves. So a pair around the call sees exactly the kept inputs. Moving what somebody keeps anyway (parameters,
the user's own inputs) or what every block gets (masks) would cost copies and save nothing: only results of a graph move. All others are
saved as if we were not there, by whatever pair lies under ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C._autograd import (
    SavedTensor,
    _make_saved_tensor,
    _pop_saved_tensors_default_hooks,
    _push_saved_tensors_default_hooks,
)

from ..memory import Arena, Device

__all__ = ["HostOffload"]


class HostOffload:
    """Moves kept inputs to host memory when a checkpointed call saves them, and back when it is recomputed.

    Host memory comes from an arena of its own, without a limit; it does not count in `swapio.host_memory`.

    Args:
        device: where the inputs are; one that `has_memory`.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.arena = Arena(None, device=device)

    def wants(self, value: object) -> bool:
        """Whether an argument is moved: a plain tensor on the device that the graph made."""
        return (
            type(value) is torch.Tensor
            and value.requires_grad
            and not value.is_leaf
            and value.device == self.device.torch_device
            and value.layout is torch.strided
            and value.is_floating_point()
            and not value.is_neg()
            and value.numel() > 0
        )

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """The pair to have around a checkpointed call."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> MovedTensor | SavedTensor:
        if self.wants(tensor):
            return MovedTensor(self, tensor)
        _pop_saved_tensors_default_hooks()
        try:
            return _make_saved_tensor(tensor, is_output=False)  # by the pair under ours, or by PyTorch with its check of the version
        finally:
            _push_saved_tensors_default_hooks(self._pack, self._unpack)

    @staticmethod
    def _unpack(packed: MovedTensor | SavedTensor) -> Any:
        return packed.unpack()


class MovedTensor:
    """One tensor in host memory, as long as this object lives."""

    def __init__(self, offload: HostOffload, tensor: torch.Tensor) -> None:
        self._device = offload.device
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        # from the first element to the last: with the same strides kernels sum in the same order
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        source = tensor.detach().as_strided((span,), (1,)).view(torch.uint8)
        lease = offload.arena.try_lease(source.numel(), name="input of a checkpointed call")
        if lease is None:
            raise RuntimeError("an arena without a limit refused a lease")
        self._lease = lease
        self._device.download(source, lease.tensor, after=self._device.record())
        self._counter = tensor.detach()  # shares the version counter of `tensor`, and after the next line not its memory
        self._counter.data = tensor.new_empty(0)
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        """The tensor on the device again, with its strides, in memory of its own.

        Raises:
            RuntimeError: the original was written after it was saved: the copy may hold either value.
        """
        if self._counter._version != self._version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: {self._dtype} "
                f"{list(self._shape)}, an input of a checkpointed call, is at version {self._counter._version}; expected version "
                f"{self._version} instead. Write to a clone of it"
            )
        target = self._device.empty(self._lease.nbytes)
        self._device.wait(self._device.upload(self._lease.tensor, target, after=self._device.record()))
        return target.view(self._dtype).as_strided(self._shape, self._stride)
