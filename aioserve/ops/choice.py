"""The choice of a backend, by name or by the environment."""

from __future__ import annotations

import os

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.ops.backend import Backend
from aioserve.ops.native import NativeBackend
from aioserve.ops.reference import ReferenceBackend

__all__ = ["backend_named"]

BACKENDS = ("auto", "native", "reference")


def backend_named(name: str = "auto") -> Backend:
    """The backend `name`: "native", "reference", or "auto".

    "auto" takes what the environment variable AIOSERVE_OPS names, which nothing else looks at, and
    "native" where that is "auto" too, empty or unset.

    Raises:
        ConfigError: there is no backend of that name.
    """
    source = "backend"
    if name == "auto":
        source, name = "AIOSERVE_OPS", os.environ.get("AIOSERVE_OPS") or "auto"
    if name in ("auto", "native"):
        return NativeBackend()
    if name == "reference":
        return ReferenceBackend()
    raise ConfigError(f"{source} must be one of {', '.join(BACKENDS)}; got {shown(name)}")
