"""The choice of a backend, by name or by the environment."""

from __future__ import annotations

from aioserve.config import used_backend
from aioserve.ops.backend import Backend
from aioserve.ops.native import NativeBackend
from aioserve.ops.reference import ReferenceBackend

__all__ = ["backend_named"]


def backend_named(name: str = "auto") -> Backend:
    """The backend `name`: "native", "reference", or "auto", as `aioserve.config.used_backend` says.

    Raises:
        ConfigError: there is no backend of that name.
    """
    return NativeBackend() if used_backend(name) == "native" else ReferenceBackend()
