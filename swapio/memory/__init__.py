"""Host memory under a hard budget, and the device it is copied to and from."""

from ._arena import Arena, Lease
from ._copy import copied, copy_to
from ._cuda import CudaDevice
from ._device import CpuDevice, Device, Event
from ._heap import trim_heap
from ._select import get_device
from ._simulated import SimulatedDevice

__all__ = [
    "Arena", "CpuDevice", "CudaDevice", "Device", "Event", "Lease", "SimulatedDevice", "copied", "copy_to", "get_device", "trim_heap",
]  # fmt: skip
