"""The choice of a backend, by name or by the environment."""

from __future__ import annotations

import os

from aioserve.errors import ConfigError
from aioserve.ops.backend import Backend
from aioserve.ops.native import NativeBackend
from aioserve.ops.reference import ReferenceBackend

__all__ = ["backend_named"]

BACKENDS = ("native", "reference")


def backend_named(name: str = "auto") -> Backend:
    """The backend `name`: "native", "reference", or "auto".

    "auto" takes the environment variable AIOSERVE_OPS, and "native" where that is unset.

    Raises:
        ConfigError: there is no backend of that name.
    """
    choices, source = ("auto", *BACKENDS), "backend"
    if name == "auto":
        choices, source, name = BACKENDS, "AIOSERVE_OPS", os.environ.get("AIOSERVE_OPS") or "native"
    if name == "native":
        return NativeBackend()
    if name == "reference":
        return ReferenceBackend()
    raise ConfigError(f"{source} must be one of {', '.join(choices)}; got {name!r}")
