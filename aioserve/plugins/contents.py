"""Asks one plugin what it offers, and checks the answer whole."""

from __future__ import annotations

import inspect
import re
from typing import Any, TypeVar

import msgspec
import pluggy

from aioserve.errors import PluginError
from aioserve.plugins.specs import (
    API_VERSION,
    GROUP,
    AnySpec,
    EvictionSpec,
    HookSpecs,
    ObserverSpec,
    PolicySpec,
)

__all__ = ["Contents", "contents_of"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

Spec = TypeVar("Spec", PolicySpec, EvictionSpec, ObserverSpec)


class Contents(msgspec.Struct, frozen=True):
    """Everything that one plugin offers."""

    policies: tuple[PolicySpec, ...] = ()
    evictions: tuple[EvictionSpec, ...] = ()
    observers: tuple[ObserverSpec, ...] = ()
    admit: pluggy.HookCaller | None = None
    """Its `aioserve_admit`, if it has one."""
    admit_place: tuple[bool, bool] = (False, False)
    """Sorts admission checks: `tryfirst` before the others, `trylast` behind them."""

    @property
    def offered(self) -> list[tuple[str, str]]:
        """Kind and name of every spec."""
        return [
            (kind, spec.name)
            for kind, specs in (
                ("policy", self.policies),
                ("eviction strategy", self.evictions),
                ("observer", self.observers),
            )
            for spec in specs
        ]


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
    hook = manager.hook
    admit = next(iter(hook.aioserve_admit.get_hookimpls()), None)
    return Contents(
        policies=_specs(hook.aioserve_scheduling_policies, PolicySpec),
        evictions=_specs(hook.aioserve_eviction_strategies, EvictionSpec),
        observers=_specs(hook.aioserve_observers, ObserverSpec),
        admit=None if admit is None else hook.aioserve_admit,
        admit_place=(False, False) if admit is None else (not admit.tryfirst, admit.trylast),
    )


def _check_plain(name: str, implementation: pluggy.HookImpl) -> None:
    if inspect.iscoroutinefunction(implementation.function):
        raise PluginError(f"{name} must be a plain function, got an async one")
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError(f"{name} must not be a wrapper: plugins are asked one by one")


def _specs(hook: pluggy.HookCaller, kind: type[Spec]) -> tuple[Spec, ...]:
    """The specs that a hook gives, each checked."""
    specs: dict[str, Spec] = {}
    offers: list[Any] = hook()
    for offered in offers:
        if not isinstance(offered, list | tuple):
            raise PluginError(f"{hook.name} must give a list of {kind.__name__}, got {offered!r}")
        for spec in offered:
            if not isinstance(spec, kind):
                raise PluginError(f"{hook.name} must give {kind.__name__} objects, got {spec!r}")
            _check_spec(spec)
            if spec.name in specs:
                raise PluginError(f"{kind.__name__} {spec.name!r} is offered twice")
            specs[spec.name] = spec
    return tuple(specs.values())


def _check_spec(spec: AnySpec) -> None:
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
