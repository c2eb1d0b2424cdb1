from __future__ import annotations

import pytest

from swapio.activation import _configure


@pytest.fixture(autouse=True)
def _not_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is one per process."""
    monkeypatch.setattr(_configure, "_configured", None)
