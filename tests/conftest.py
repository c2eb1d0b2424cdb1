from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_compute_thread() -> None:
    """Small tensors gain nothing from more, and two teams on few cores lose much."""
    torch.set_num_threads(1)
