"""Asks one plugin what it offers, and checks the answer whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pluggy

from aioserve.errors import PluginError
from aioserve.plugins.specs import API_VERSION, GROUP, HookSpecs, PolicySpec

__all__ = ["Contents", "contents_of"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Spec = TypeVar("Spec", bound=PolicySpec)


class Contents(msgspec.Struct, frozen=True):
    """Everything that one plugin offers."""

    policies: tuple[PolicySpec, ...] = ()


def contents_of(plugin: object) -> Contents:
    """What a plugin's hooks offer: a module's functions or an object's methods.

    Raises `PluginError` where it breaks the contract, and whatever its hooks raise.
    """
    if inspect.isclass(plugin):
        raise PluginError(f"plugin {plugin!r} is a class: give an object of it, or a module")
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin)
    manager.check_pending()
    callers = manager.get_hookcallers(plugin)
    if not callers:
        raise PluginError(f"plugin {plugin!r} has no hook marked @aioserve.hookimpl")
    for caller in callers:
        for implementation in caller.get_hookimpls():
            _check_plain(caller.name, implementation)
    return Contents(
        policies=_specs(manager.hook.aioserve_scheduling_policies, PolicySpec),
    )


def _check_plain(name: str, implementation: pluggy.HookImpl) -> None:
    if inspect.iscoroutinefunction(implementation.function):
        raise PluginError(f"{name} must be a plain function, got an async one")
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError(f"{name} must not be a wrapper: plugins are asked one by one")


def _specs(hook: Callable[[], list[Any]], kind: type[Spec]) -> tuple[Spec, ...]:
    """The specs that a hook gives, each checked."""
    name = getattr(hook, "name", "the hook")
    specs: list[Spec] = []
    for offered in hook():
        if not isinstance(offered, list | tuple):
            raise PluginError(f"{name} must give a list of {kind.__name__}, got {offered!r}")
        for spec in offered:
            if not isinstance(spec, kind):
                raise PluginError(f"{name} must give {kind.__name__} objects, got {spec!r}")
            _check_spec(spec)
            specs.append(spec)
    return tuple(specs)


def _check_spec(spec: PolicySpec) -> None:
    kind = type(spec).__name__
    if not isinstance(spec.name, str) or not NAME.fullmatch(spec.name):
        raise PluginError(
            f"{kind}: name must be letters, digits, '_', '-' and '.', got {spec.name!r}"
        )
    if spec.api != API_VERSION or isinstance(spec.api, bool):
        raise PluginError(
            f"{kind} {spec.name!r} is made for version {spec.api!r} of the plugin API, and this "
            f"aioserve has version {API_VERSION}: install versions that go together"
        )
    if not callable(spec.factory):
        raise PluginError(f"{kind} {spec.name!r}: factory must be callable, got {spec.factory!r}")
    if not isinstance(spec.description, str):
        raise PluginError(
            f"{kind} {spec.name!r}: description must be a str, got {spec.description!r}"
        )
