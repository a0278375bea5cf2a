"""A trained model, which `make test-real` puts into the cache; without it tests are skipped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def gemma() -> Path:
    """Gemma 3 270M in GGUF, as `tools/real_model` leaves it there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    file = cache / "aioserve" / "real" / "gemma-3-270m-Q4_K_M.gguf"
    if not file.is_file():
        pytest.skip("there is no trained model: `make test-real` downloads it")
    return file
