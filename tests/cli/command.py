"""The type of the fixture `aioserve`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

__all__ = ["Run"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
