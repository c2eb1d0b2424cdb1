from __future__ import annotations

import signal

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_compute_thread() -> None:
    """Small tensors gain nothing from more, and two teams on few cores lose much."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_arrive() -> None:
    """A job that a shell started in the background ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
