"""What stage 3 needs."""

from __future__ import annotations

from torch import nn

from ...engine import Estimate, estimate_model_states

__all__ = ["estimate_zero3_model_states_mem_needs_all_live"]


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> list[Estimate]:
    """`estimate_model_states` for stage 3. `additional_buffer_factor` has no effect: buffers are in the formula."""
    return estimate_model_states(model, stage=3, ranks_per_node=num_gpus_per_node, num_nodes=num_nodes)
