"""CuPy, imported when it is first needed, because only the CUDA extras install it."""

from __future__ import annotations

import importlib
from typing import Any

from aioserve.errors import ConfigError

__all__ = ["cupy_module"]


def cupy_module() -> Any:
    """Return the module `cupy`. Raises `ConfigError` if it can't be used, and says what to
    install."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a CuPy for another CUDA fails with linker errors
        raise ConfigError(
            f"a CUDA device needs CuPy, which can't be imported ({error}): pip install "
            "'aioserve[cuda12]', or 'aioserve[cuda13]' for CUDA 13"
        ) from error
    if not cupy.cuda.is_available():
        raise ConfigError("CuPy finds no GPU, or its driver is too old for it")
    return cupy
