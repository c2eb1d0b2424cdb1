"""Which device a setting names, and the machine without an accelerator."""

from __future__ import annotations

import pytest
import torch

from swapio.errors import ConfigError
from swapio.memory import CpuDevice, CudaDevice, SimulatedDevice, get_device


def test_names() -> None:
    assert isinstance(get_device("cpu"), CpuDevice)
    assert isinstance(get_device(torch.device("cpu")), CpuDevice)
    assert isinstance(get_device("simulated"), SimulatedDevice)
    device = SimulatedDevice(polls=7)
    assert get_device(device) is device
    assert isinstance(get_device("auto"), CudaDevice if torch.cuda.is_available() else CpuDevice)


@pytest.mark.parametrize("spec", ["", "gpu", "cuda:x", "meta", "mps:0", "cuda:-2", None, 3.5])
def test_unknown(spec: object) -> None:
    with pytest.raises(ConfigError, match=r'use "auto"') as caught:
        get_device(spec)  # type: ignore[arg-type]
    assert (caught.value.key, caught.value.value) == ("device", spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("spec", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_no_cuda_here(spec: str | torch.device) -> None:
    with pytest.raises(ConfigError, match=r"CUDA|GPU"):
        get_device(spec)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_such_gpu() -> None:
    with pytest.raises(ConfigError, match="there are"):
        get_device("cuda:99")


@pytest.mark.parametrize("nbytes", [0, 1, 4097])
def test_cpu(nbytes: int) -> None:
    device = CpuDevice()
    assert (device.kind, device.has_memory, device.torch_device) == ("cpu", False, torch.device("cpu"))
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    middle, end = device.empty(nbytes), device.empty(nbytes)
    up = device.upload(source, middle, after=device.record())
    down = device.download(middle, end, after=up)
    assert up.done()
    assert down.done()
    assert down.synchronize(0)
    device.wait(down)
    device.synchronize()
    assert torch.equal(end, source)
    device.pin(0, 0)
    device.unpin(0)
    device.close()
    device.close()
