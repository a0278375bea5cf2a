"""Arguments of `Engine` that are objects of its caller's: checked, and made plain."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from inspect import iscoroutinefunction
from pathlib import Path

from aioserve.arguments import check, number, optional
from aioserve.errors import ConfigError
from aioserve.execution.runner import ModelSource
from aioserve.isolation import blamed, shown
from aioserve.plugins import check_policy_object
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = [
    "check_listener",
    "checked_deadline",
    "checked_model",
    "checked_plugins",
    "checked_policy",
]

MAX_POLICY_CHARS = 1000
MAX_PLUGINS = 1000
"""Given to one engine."""


def checked_policy(policy: str | SchedulingPolicy) -> str | SchedulingPolicy:
    """Text becomes plain, whatever a subclass makes of it."""
    if not isinstance(policy, str):
        check_policy_object(policy)
        return policy
    policy = str.__str__(policy)
    if len(policy) > MAX_POLICY_CHARS:
        raise ConfigError(
            f"policy must be a name of at most {MAX_POLICY_CHARS} characters, options included, "
            f"got {len(policy)}"
        )
    return policy


def checked_model(model: str | Path | ModelSource) -> str | Path | ModelSource:
    """Text becomes plain, as that of a policy."""
    if isinstance(model, str):
        return str.__str__(model)
    if not isinstance(model, Path) and not callable(getattr(model, "load", None)):
        raise ConfigError(
            f"model must be a name, a directory or an object that loads, got {shown(model)}",
            argument="model",
            value=model,
        )
    return model


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


def check_chat_template(file: str | None, model: object) -> None:
    """Raise `ConfigError` where nobody would read it."""
    if file is not None and not isinstance(model, str | Path):
        raise ConfigError(
            f"chat_template={file!r} has no effect with model={shown(model)}: such an object "
            "brings a template of its own, so leave chat_template out",
            argument="chat_template",
            value=file,
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
