"""Arguments of `Engine` that are objects of its caller's: checked, and made plain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from inspect import iscoroutinefunction
from pathlib import Path

from aioserve.arguments import check, number, optional
from aioserve.errors import ConfigError
from aioserve.isolation import blamed, shown

__all__ = ["check_listener", "checked_deadline", "checked_plugins"]

MAX_PLUGINS = 1000
"""Given to one engine."""


def check_listener(name: str, listener: object, model: object) -> None:
    if listener is None:
        return
    if not callable(listener) or iscoroutinefunction(listener):
        raise ConfigError(
            f"{name} must be callable and not async, got {shown(listener)}",
            argument=name,
            value=listener,
        )
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"{name}={shown(listener)} has no effect with model={shown(model)}: such an "
            f"object loads as it likes and reports to nobody, so leave {name} out"
        )


def checked_plugins(plugins: object) -> tuple[object, ...]:
    """A tuple of them, not endless."""
    with blamed("plugins can't be listed", ConfigError):
        if isinstance(plugins, str | bytes) or not isinstance(plugins, Iterable):
            raise ConfigError(f"plugins must be a sequence of plugin objects, got {shown(plugins)}")
        listed = tuple(itertools.islice(plugins, MAX_PLUGINS + 1))
    if len(listed) > MAX_PLUGINS:
        raise ConfigError(f"plugins must be at most {MAX_PLUGINS} objects, got {shown(plugins)}")
    return listed


def checked_deadline(value: object) -> float | None:
    if type(value) is float and value == math.inf:
        return None  # as good as none
    return check(ConfigError, "deadline_seconds", value, optional(number(0)))
