"""CuPy, imported where it is first needed: it comes with the extras for CUDA alone."""

from __future__ import annotations

import importlib
from typing import Any

from aioserve.errors import ConfigError

__all__ = ["cupy_module"]


def cupy_module() -> Any:
    """The module `cupy`. Raises `ConfigError`, which says what to install, where it is no use."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a CuPy of another CUDA fails with errors of the linker
        raise ConfigError(
            f"a CUDA device needs CuPy, which can't be imported ({error}): pip install "
            "'aioserve[cuda12]', or 'aioserve[cuda13]' for CUDA 13"
        ) from error
    if not cupy.cuda.is_available():
        raise ConfigError("CuPy finds no GPU, or its driver is too old for it")
    return cupy
