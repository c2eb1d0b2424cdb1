from __future__ import annotations

import pytest

from swapio.config import _load


@pytest.fixture(autouse=True)
def _nothing_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schema is tested as it will be when the engine does all that it honours."""
    monkeypatch.setattr(_load, "PENDING", {})
