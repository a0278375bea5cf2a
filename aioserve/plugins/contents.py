"""Asks one plugin what it offers, and checks the answer whole."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pluggy

from aioserve.errors import PluginError
from aioserve.isolation import shown
from aioserve.plugins.records import RequestInfo
from aioserve.plugins.specs import (
    API_VERSION,
    GROUP,
    EvictionSpec,
    HookSpecs,
    LogitsProcessorSpec,
    ObserverSpec,
    PolicySpec,
    Spec,
)

__all__ = ["Contents", "contents_of"]

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Contents(msgspec.Struct, frozen=True):
    """Everything that one plugin offers."""

    specs: tuple[Spec[Any], ...] = ()
    admit: Callable[[RequestInfo], object] | None = None
    """`aioserve_admit` of the plugin, if it has one."""
    admit_place: tuple[bool, bool] = (False, False)
    """Sort key of admission checks: `tryfirst` before the others, `trylast` behind them."""

    @property
    def offered(self) -> list[tuple[str, str]]:
        """Kind and name of every spec."""
        return [(spec.kind, spec.name) for spec in self.specs]


def contents_of(plugin: object) -> Contents:
    """Contents of a plugin's hooks: a module's functions or an object's methods.

    Raises `PluginError` where it breaks the contract, and whatever its hooks raise.
    """
    if inspect.isclass(plugin):
        raise PluginError(f"plugin {shown(plugin)} is a class: give an object of it, or a module")
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin)
    manager.check_pending()
    callers = manager.get_hookcallers(plugin)
    if not callers:
        raise PluginError(f"plugin {shown(plugin)} has no hook marked @aioserve.hookimpl")
    for caller in callers:
        for implementation in caller.get_hookimpls():
            _check_plain(caller.name, implementation)
    hook = manager.hook
    admit = next(iter(hook.aioserve_admit.get_hookimpls()), None)
    return Contents(
        specs=(
            *_specs(hook.aioserve_scheduling_policies, PolicySpec),
            *_specs(hook.aioserve_eviction_strategies, EvictionSpec),
            *_specs(hook.aioserve_observers, ObserverSpec),
            *_specs(hook.aioserve_logits_processors, LogitsProcessorSpec),
        ),
        admit=None if admit is None else lambda info: hook.aioserve_admit(request=info),
        admit_place=(False, False) if admit is None else (not admit.tryfirst, admit.trylast),
    )


def _check_plain(name: str, implementation: pluggy.HookImpl) -> None:
    if inspect.iscoroutinefunction(implementation.function):
        raise PluginError(f"{name} must be a plain function, got an async one")
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError(f"{name} must not be a wrapper: plugins are asked one by one")


def _specs(hook: pluggy.HookCaller, kind: type[Spec[Any]]) -> list[Spec[Any]]:
    """Specs that a hook gives, each checked and made anew of plain values."""
    specs: dict[str, Spec[Any]] = {}
    wanted = kind.__name__
    offers: list[Any] = hook()
    for offered in offers:
        if not isinstance(offered, list | tuple):
            raise PluginError(f"{hook.name} must give a list of {wanted}, got {shown(offered)}")
        for given in offered:
            if not isinstance(given, kind):
                raise PluginError(f"{hook.name} must give {wanted} objects, got {shown(given)}")
            spec = _checked(given, kind)
            if spec.name in specs:
                raise PluginError(f"{wanted} {spec.name!r} is offered twice")
            specs[spec.name] = spec
    return list(specs.values())


def _checked(spec: Spec[Any], kind: type[Spec[Any]]) -> Spec[Any]:
    name = str.__str__(spec.name) if isinstance(spec.name, str) else ""
    if not NAME.fullmatch(name):
        rule = "letters, digits, '_', '-' and '.'"
        raise PluginError(f"{kind.__name__}: name must be {rule}, got {shown(spec.name)}")
    what = f"{kind.__name__} {name!r}"
    if type(spec.api) is not int or spec.api != API_VERSION:
        raise PluginError(
            f"{what} is made for version {shown(spec.api)} of the plugin API, and this aioserve "
            f"has version {API_VERSION}: install versions that go together"
        )
    if not callable(spec.factory):
        raise PluginError(f"{what}: factory must be callable, got {shown(spec.factory)}")
    if not isinstance(spec.description, str):
        raise PluginError(f"{what}: description must be a str, got {shown(spec.description)}")
    return kind(name, spec.factory, str.__str__(spec.description), spec.api)
