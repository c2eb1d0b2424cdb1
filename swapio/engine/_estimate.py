"""What training will need, before a model is taken over."""

from __future__ import annotations

import dataclasses
import itertools
import logging

import torch
from torch import nn

from ..memory import Arena, CpuDevice
from ..optim import from_config
from ..spec import format_nbytes
from ..swap import Place
from ..zero import CHUNK_NUMEL, Partition, StepTiming, UnitLayout, chunk_layouts, find_units
from ._budget import HostPlan, Setting

__all__ = ["Estimate", "estimate_model_states"]

logger = logging.getLogger("swapio")


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes per node for one pair of homes, on a machine that computes on its CPU.

    Attributes:
        offload_param, offload_optimizer: `"cpu"` or `"nvme"`.
        host_nbytes: the smallest `host_memory` that works, of all ranks of the node together; activations come on top.
        fast_nbytes: with which nothing ever has to go.
        drive_nbytes: what rests on the drive.
    """

    offload_param: str
    offload_optimizer: str
    host_nbytes: int
    fast_nbytes: int
    drive_nbytes: int


def estimate_model_states(model: nn.Module, *, stage: int, ranks_per_node: int = 1, num_nodes: int = 1) -> list[Estimate]:
    """What weights, gradients and the state of AdamW need, by the formula that `swapio.initialize` checks; logged as a table too.

    Args:
        model: its parameters count in the dtype they have; they may be on the meta device.
        stage: of ZeRO.
    """
    num_ranks = ranks_per_node * num_nodes
    block_nbytes = Arena(None, device=CpuDevice()).block_nbytes
    spec = from_config("AdamW", {})
    layouts = []
    for unit in find_units(model):
        params = [p.detach() for _, p in unit.params]
        grad_dtype = torch.float32 if num_ranks > 1 and not stage else None
        layouts.append(UnitLayout(params, [p.requires_grad for _, p in unit.params], grad_dtype=grad_dtype))
    weights = states = 0  # of one rank; the first owns the most
    for layout in layouts:
        partition = Partition(layout, num_ranks)
        weights += partition.shard_nbytes[0] if stage == 3 else layout.nbytes
        pieces = partition.pieces[0] if stage else Partition(layout, 1).pieces[0]
        states += sum(chunk.nbytes for _, _, chunk in chunk_layouts(layout, pieces, spec, CHUNK_NUMEL))
    estimates = []
    for param, state in itertools.product(("cpu", "nvme"), repeat=2):
        need = HostPlan(layouts, spec, Setting(
            block_nbytes=block_nbytes, chunk_numel=CHUNK_NUMEL, has_device=False, step_place=Place.HOST, stage=stage,
            param_home=Place.parse(param, key="offload_param"), state_home=Place.parse(state, key="offload_optimizer"), num_ranks=num_ranks,
            timing=StepTiming.IN_FORWARD, spills=num_ranks == 1 and "nvme" in (param, state),
        )).need  # fmt: skip
        drive = (weights if param == "nvme" else 0) + (states if state == "nvme" else 0)
        each = (need.minimum, need.everything, drive)
        estimates.append(Estimate(param, state, *(ranks_per_node * nbytes for nbytes in each)))
    rows = [
        f"offload_param {e.offload_param:4}  offload_optimizer {e.offload_optimizer:4}  host memory from {format_nbytes(e.host_nbytes)} "
        f"to {format_nbytes(e.fast_nbytes)}, drive {format_nbytes(e.drive_nbytes)}"
        for e in estimates
    ]
    numel = sum(p.numel() for p in model.parameters())
    head = f"{numel} parameters, ZeRO stage {stage}, {num_nodes} nodes of {ranks_per_node} ranks; per node:"
    logger.info("%s", "\n  ".join([head, *rows]))
    return estimates
