"""Finds plugins and asks them what they offer; one broken plugin harms nobody who doesn't use it.

A plugin is a module named by an entry point of the group `aioserve`, or an object given to
`Engine(plugins=[...])`, with hook implementations marked `@aioserve.hookimpl`. The entry point
carries the name of the policy that its module offers, so that a module which can't be imported is
still known by that name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points

import msgspec
import pluggy

from aioserve.errors import ConfigError, PluginError, UnknownPolicyError
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["BrokenPlugin", "PluginRegistry", "PolicyInfo", "PolicySpec", "hookimpl"]

logger = logging.getLogger(__name__)

GROUP = "aioserve"
GIVEN = "given to the engine"

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class PolicySpec(msgspec.Struct, frozen=True):
    """A scheduling policy that a plugin offers."""

    name: str
    factory: Callable[[], SchedulingPolicy]
    """Makes one policy object for one engine."""
    description: str = ""
    """One line for listings."""


class PolicyInfo(msgspec.Struct, frozen=True):
    """A policy that was found, and where."""

    spec: PolicySpec
    distribution: str
    version: str


class BrokenPlugin(msgspec.Struct, frozen=True):
    """An entry point whose module couldn't be loaded or broke its contract."""

    name: str
    distribution: str
    version: str
    cause: Exception

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}): {self.cause!r}"


class HookSpecs:
    """The hooks that a plugin may implement."""

    @hookspec
    def aioserve_scheduling_policies(self) -> Sequence[PolicySpec]:  # pyright: ignore[reportReturnType]
        """Scheduling policies that the plugin offers."""


class PluginRegistry:
    """What is installed, as found at one moment. Each engine makes its own."""

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self.policies: dict[str, PolicyInfo] = {}
        self.broken: list[BrokenPlugin] = []
        for plugin in plugins:
            try:
                self._add(_specs_of(plugin), GIVEN, "")
            except PluginError:
                raise
            except Exception as error:
                raise PluginError(f"plugin {plugin!r} {GIVEN} is broken: {error!r}") from error
        # A policy belongs to the entry point of its name before it belongs to any other.
        points = sorted(entry_points(group=GROUP), key=lambda point: point.name)
        loaded = [(point, self._load(point)) for point in points]
        for own_name in (True, False):
            for point, specs in loaded:
                if any(spec.name == point.name for spec in specs) is own_name:
                    self._try_adding(point, specs)

    def policy(self, name: str) -> SchedulingPolicy:
        """A new policy object of that name.

        Raises `UnknownPolicyError` listing the names there are, and `PluginError` for a policy
        whose plugin is broken.
        """
        for broken in self.broken:
            if broken.name == name and name not in self.policies:
                raise PluginError(f"policy {name!r} can't be loaded: {broken}") from broken.cause
        if name not in self.policies:
            known = ", ".join(sorted(self.policies)) or "none is installed"
            raise UnknownPolicyError(f"no scheduling policy {name!r}; there are: {known}")
        info = self.policies[name]
        try:
            policy = info.spec.factory()
        except Exception as error:
            raise PluginError(
                f"policy {name!r} of {info.distribution} {info.version} can't be made: {error!r}"
            ) from error
        return check_policy_object(policy)

    def _load(self, point: EntryPoint) -> list[PolicySpec]:
        try:
            return _specs_of(point.load())
        except Exception as error:
            self._leave_out(point, error)
            return []

    def _try_adding(self, point: EntryPoint, specs: list[PolicySpec]) -> None:
        try:
            self._add(specs, *_origin(point))
        except PluginError as error:
            self._leave_out(point, error)

    def _leave_out(self, point: EntryPoint, error: Exception) -> None:
        broken = BrokenPlugin(point.name, *_origin(point), error)
        self.broken.append(broken)
        logger.warning("plugin left out: %s", broken)

    def _add(self, specs: list[PolicySpec], distribution: str, version: str) -> None:
        """All of a plugin's policies, or none."""
        for spec in specs:
            if spec.name in self.policies:
                other = self.policies[spec.name].distribution
                raise PluginError(f"policy {spec.name!r} is offered by {other} too")
        for spec in specs:
            self.policies[spec.name] = PolicyInfo(spec, distribution, version)


def _specs_of(plugin: object) -> list[PolicySpec]:
    """What a plugin's hooks offer."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(HookSpecs)
    manager.register(plugin)
    manager.check_pending()
    if not manager.get_hookcallers(plugin):
        raise PluginError(f"plugin {plugin!r} has no hook marked @aioserve.hookimpl")
    specs = []
    for offered in manager.hook.aioserve_scheduling_policies():
        if not isinstance(offered, list | tuple):
            raise PluginError(
                f"aioserve_scheduling_policies must give a list of PolicySpec, got {offered!r}"
            )
        for spec in offered:
            if not isinstance(spec, PolicySpec):
                raise PluginError(
                    f"aioserve_scheduling_policies must give PolicySpec objects, got {spec!r}"
                )
            specs.append(spec)
    return specs


def check_policy_object(policy: object) -> SchedulingPolicy:
    """`policy`, if it is one."""
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError(f"policy must be a name or a SchedulingPolicy object, got {policy!r}")
    return policy


def _origin(entry_point: EntryPoint) -> tuple[str, str]:
    if entry_point.dist is None:
        return "unknown distribution", ""
    return entry_point.dist.name, entry_point.dist.version
