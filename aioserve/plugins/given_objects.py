"""Checks of the objects that callers give in place of names, and of what factories make."""

from __future__ import annotations

import inspect
from difflib import get_close_matches
from typing import TypeVar

from aioserve.drafting.drafter import Drafter
from aioserve.errors import ConfigError
from aioserve.isolation import blamed, shown
from aioserve.plugins.observers import Observer
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["check_drafter_object", "check_observer_object", "check_policy_object", "wrong_method"]

T = TypeVar("T")

LEAST_LIKENESS = 0.8
"""Least likeness of a method's name to one of the interface that makes it a misspelling."""


def check_policy_object(policy: object) -> SchedulingPolicy:
    """Return `policy` if it is a policy with plain methods."""
    return _with_plain_methods("policy", policy, SchedulingPolicy, "a name or a")


def check_observer_object(observer: object) -> Observer:
    """Return `observer` if it is an observer with plain methods."""
    return _with_plain_methods("observer", observer, Observer, "an")


def check_drafter_object(drafter: object) -> Drafter:
    """Return `drafter` if it is a drafter with plain methods."""
    return _with_plain_methods("drafter", drafter, Drafter, "a")


def _with_plain_methods(what: str, thing: object, kind: type[T], must_be: str) -> T:
    with blamed(f"{what} can't be used", ConfigError):
        if not isinstance(thing, kind):
            raise ConfigError(
                f"{what} must be {must_be} {kind.__name__} object, got {shown(thing)}"
            )
        if wrong := wrong_method(thing, kind):
            raise ConfigError(wrong)
    return thing


def wrong_method(thing: object, kind: type) -> str | None:
    """Describe the first wrong method, or return None.

    An async method would never be awaited. A method named nearly like one of `kind` would never be
    called. A method in place of a bool would count as True.
    """
    asked = [name for name in vars(kind) if not name.startswith("_")]
    for method in asked:
        function = getattr(thing, method)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return f"{type(thing).__name__}.{method} must be a plain function, got an async one"
        if isinstance(vars(kind)[method], bool) and not isinstance(function, bool):
            return f"{type(thing).__name__}.{method} must be True or False, got {shown(function)}"
    classes = [cls for cls in type(thing).__mro__ if cls not in (kind, object)]
    own = {name for cls in classes for name in vars(cls) if not name.startswith("_")}
    missing = [name for name in asked if name not in own]
    for name in sorted(own.difference(asked)):
        if not inspect.isroutine(inspect.getattr_static(thing, name)):
            continue
        if near := get_close_matches(name, missing, 1, LEAST_LIKENESS):
            return (
                f"{type(thing).__name__}.{name} is never called: did you mean {near[0]}? "
                "(A method of your own may begin with an underscore.)"
            )
    return None
