"""Entry points that are found instead of those that are installed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aioserve.plugins import installed as installed_module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Append what `entry_point` makes."""
    found: list[SimpleNamespace] = []
    monkeypatch.setattr(installed_module, "entry_points", lambda group: found)
    monkeypatch.delenv("AIOSERVE_PLUGINS", raising=False)
    return found
