"""Parameters written and read whole, by one process and by several ranks: the same whatever is partitioned."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch
from torch import nn

import swapio
from swapio.zero import GatheredParameters, register_external_parameter, unregister_external_parameter
from tests.engine.models import make

from . import gathering, launch

MODULE = "tests.ranks.gathering"


def alike(a: gathering.Values, b: gathering.Values) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_what_one_rank_writes_reaches_all(tmp_path: Path) -> None:
    cases = [(stage, place, by) for stage, place in ((0, "nvme"), (1, "cpu"), (2, "nvme"), (3, "nvme"), (3, "cpu")) for by in (1, None)]
    results = launch.run("many", 2, [("write", case) for case in cases], str(tmp_path), module=MODULE)
    names = list(make(layers=1).state_dict())
    for rank in range(2):
        for written, stepped in results[rank]:
            assert alike(written, results[0][0][0]) and alike(stepped, results[0][0][1])
            assert (written[names.index("blocks.0.fc1.weight")] == 0.25).all()
            assert (written[names.index("blocks.0.fc2.weight")] == 0.5).all()
            assert not alike(written, stepped)


@pytest.mark.slow
def test_state_dicts_are_loaded_by_all_ranks(tmp_path: Path) -> None:
    results = launch.run("many", 2, [("load", (stage,)) for stage in range(4)], str(tmp_path), module=MODULE)
    want = list(make(seed=7, layers=1).bfloat16().state_dict().values())
    for rank in range(2):
        for stage in range(4):
            loaded, stepped, half = results[rank][stage]
            assert alike(loaded, want)
            assert alike(stepped, results[0][0][1]) and alike(half, results[0][0][2])
            assert alike(half[:5], want[:5]) and alike(half[5:], stepped[5:])


@pytest.mark.slow
def test_writes_that_cannot_be_kept_are_errors_on_all_ranks(tmp_path: Path) -> None:
    launch.run("many", 2, [("refuse", (stage,)) for stage in (1, 3)], str(tmp_path), module=MODULE)


@pytest.mark.slow
def test_initialize_joins_the_ranks_of_a_launcher(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert launch.run("join", 2, str(tmp_path), port, module=MODULE) == [2, 2]


def test_one_process_keeps_what_it_writes(tmp_path: Path) -> None:
    written, stepped = gathering.write(0, str(tmp_path), 3)
    names = list(make(layers=1).state_dict())
    assert (written[names.index("blocks.0.fc1.weight")] == 0.25).all()
    assert all(not torch.equal(a, b) for a, b in zip(written, stepped, strict=True))


def test_parameters_stay_while_gathered(tmp_path: Path) -> None:
    with gathering.engine_of(str(tmp_path), 3, 0, host_memory="3MiB") as engine:
        module = engine.module
        units = {u.name: u for u in engine.zero.units}
        with GatheredParameters(module.blocks):
            engine.empty_partition_cache()
            assert all(units[name].attached for name in units if name.startswith("blocks.0"))
            assert not units["wte"].attached
        engine.empty_partition_cache()
        assert not any(u.attached for u in units.values())
        with GatheredParameters([module.wte.weight], enabled=False):
            assert not units["wte"].attached


def test_what_is_not_managed_passes_by() -> None:
    layer = nn.Linear(2, 2)
    for params in (layer, layer.weight, layer.parameters(), [torch.ones(1)], []):
        with GatheredParameters(params, modifier_rank=0):
            layer.weight.data.zero_()
    assert not layer.weight.any()


def test_external_parameters_need_no_call(caplog: pytest.LogCaptureFixture) -> None:
    layer = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, "swapio"):
        for _ in range(2):
            register_external_parameter(layer, layer.weight)
            unregister_external_parameter(layer, layer.weight)
    assert len([r for r in caplog.records if "not needed" in r.message]) <= 1
    assert swapio.zero.GatheredParameters is GatheredParameters
