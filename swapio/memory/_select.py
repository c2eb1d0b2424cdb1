"""Which device a setting names."""

from __future__ import annotations

import torch

from ..errors import ConfigError
from ._cuda import CudaDevice
from ._device import CpuDevice, Device
from ._simulated import SimulatedDevice

__all__ = ["get_device"]


def get_device(spec: str | torch.device | Device) -> Device:
    """The device that `spec` names: `"auto"` (CUDA where it works, else CPU), `"cpu"`, `"cuda"`, `"cuda:1"`, `"simulated"`, or a
    `torch.device`. A `Device` is returned as it is.

    Raises:
        ConfigError: not a device, or one that this machine does not have.
    """
    if isinstance(spec, Device):
        return spec
    if spec == "auto":
        return CudaDevice() if torch.cuda.is_available() else CpuDevice()
    if spec == "simulated":
        return SimulatedDevice()
    try:
        device = torch.device(spec)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f'device: {spec!r} is not known; use "auto", "cpu", "cuda", "cuda:N" or "simulated"', key="device", value=spec)
    if device.type == "cpu":
        return CpuDevice()
    if torch.version.cuda is None or not torch.cuda.is_available():
        why = "PyTorch is built without CUDA" if torch.version.cuda is None else "no GPU is usable"
        raise ConfigError(f'device: {str(spec)!r}, but {why} here; use "auto" or "cpu"', key="device", value=spec)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f'device: {str(spec)!r}, but there are {torch.cuda.device_count()} GPUs; use "cuda:{torch.cuda.device_count() - 1}" or below',
            key="device", value=spec,
        )  # fmt: skip
    return CudaDevice(device.index)
