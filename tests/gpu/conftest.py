"""The device of each test, or one line about its absence."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.gpu.place import Place, is_rehearsal, is_required, why_no_card
from tests.ops.gpu.interpreter import correct_products, hasten, round_bfloat16_to_nearest
from tests.parity import tiny_models

# Triton has packages only for Linux on x86-64 and arm64.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    reason = why_no_card()
    if reason is None or is_rehearsal():
        return
    if is_required():
        pytest.exit(f"these tests need a card: {reason}", returncode=1)
    pytest.skip(f"no card: {reason}")


@pytest.fixture(autouse=True)
def no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the suite's own setting, which keeps engines on the CPU."""
    monkeypatch.delenv("AIOSERVE_OPS", raising=False)


@pytest.fixture(scope="session")
def place() -> Place:
    """Device for tests that can be rehearsed."""
    correct_products()
    hasten()
    round_bfloat16_to_nearest()
    return Place.found()


@pytest.fixture
def card(place: Place) -> Place:
    """Device for tests that can't be rehearsed."""
    if not place.is_card:
        pytest.skip("this takes a card, and can't be rehearsed")
    return place


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of tiny random models by name, in float32."""
    root = tmp_path_factory.mktemp("models")

    @cache
    def write(name: str) -> Path:
        return tiny_models.write(name, root / name)

    return write
