from __future__ import annotations

from typing import Any

import pytest

from swapio.config import _load, load_config
from swapio.config._pending import PENDING, PENDING_SILENT
from swapio.errors import ConfigError

ON: dict[str, Any] = {
    "world_size": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "dataloader_drop_last": True,
    "scheduler": {"type": "WarmupLR"},
    "fp16.enabled": True,
    "data_types.grad_accum_dtype": "fp32",
    "csv_monitor.enabled": True,
    "tensorboard.enabled": True,
}


@pytest.fixture(autouse=True)
def _pending(_nothing_is_pending: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_load, "PENDING", PENDING)


def test_the_empty_config_loads() -> None:
    assert load_config({}).accepted_without_effect == {}


@pytest.mark.parametrize("key", PENDING)
def test_what_the_engine_would_ignore_is_refused(key: str) -> None:
    config, ranks = ({}, ON[key]) if key == "world_size" else (ON[key], 1)
    for name in reversed(key.split(".")) if ranks == 1 else ():
        config = {name: config}
    with pytest.raises(ConfigError, match=f"^{key}: .* is not supported yet") as caught:
        load_config(config, world_size=ranks)
    assert caught.value.key == key


def test_what_is_for_show_is_listed() -> None:
    assert load_config({"steps_per_print": 10}).accepted_without_effect == PENDING_SILENT
