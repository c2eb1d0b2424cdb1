"""An optimizer that the engine does not know, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import swapio
from tests.engine.models import config
from tests.reports.compare import layers, mean_square

from . import launch


def refused(rank: int, path: str) -> str:
    settings = config(path) | {"train_batch_size": 4}
    del settings["optimizer"]
    engine = swapio.initialize(model=layers(), config=settings)[0]
    with pytest.raises(swapio.UsageError) as caught:
        engine.backward(mean_square(engine, rank))
    engine.abandon()
    return str(caught.value)


@pytest.mark.slow
def test_gradients_that_nobody_sums_are_refused(tmp_path: Path) -> None:
    for error in launch.run("refused", 2, str(tmp_path), module=__name__):
        assert "is not summed over the ranks" in error
        assert "give swapio.initialize one" in error
