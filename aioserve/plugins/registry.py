"""What is installed and given, as found at one moment. One broken plugin harms nobody who doesn't
use it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from aioserve.errors import ConfigError, PluginError, UnknownPolicyError
from aioserve.plugins.contents import Contents, contents_of
from aioserve.plugins.installed import InstalledPlugin, installed_plugins
from aioserve.plugins.options import made, split_name
from aioserve.plugins.specs import PolicySpec
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["BrokenPlugin", "Offer", "PluginRegistry", "check_policy_object"]

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec", bound=PolicySpec)

GIVEN = "given to the engine"


class Offer(msgspec.Struct, Generic[Spec], frozen=True):
    """Something that a plugin offers by name."""

    spec: Spec
    distribution: str
    version: str
    plugin: str = ""
    """Name of the entry point; empty for a plugin that was given to the engine."""

    def __str__(self) -> str:
        return f"{self.spec.name!r} of {self.distribution} {self.version}".rstrip()


class BrokenPlugin(msgspec.Struct, frozen=True):
    """An entry point whose module couldn't be loaded or broke its contract."""

    name: str
    distribution: str
    version: str
    cause: BaseException
    selected: bool = False
    """AIOSERVE_PLUGINS names it."""

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}): {self.cause!r}"


class PluginRegistry:
    """Each engine makes its own.

    `plugins` are objects or modules with hook implementations that needn't be installed; a broken
    one raises `PluginError`. Raises `ConfigError` if AIOSERVE_PLUGINS names what isn't installed.
    """

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self.policies: dict[str, Offer[PolicySpec]] = {}
        self.broken: list[BrokenPlugin] = []
        self.off: list[InstalledPlugin] = []
        """Those that AIOSERVE_PLUGINS leaves out; they are not imported."""
        for plugin in plugins:
            try:
                self._add(contents_of(plugin), GIVEN, "", "")
            except PluginError:
                raise
            except Exception as error:
                raise PluginError(f"plugin {plugin!r} {GIVEN} is broken: {error!r}") from error
        installed = installed_plugins()
        self.off = [plugin for plugin in installed if not plugin.allowed]
        loaded = [(plugin, self._load(plugin)) for plugin in installed if plugin.allowed]
        # A policy belongs to the entry point of its name before it belongs to any other.
        for own_name in (True, False):
            for plugin, contents in loaded:
                if any(spec.name == plugin.name for spec in contents.policies) is own_name:
                    self._try_adding(plugin, contents)

    def policy(self, text: str) -> SchedulingPolicy:
        """A new policy object of a name, or of a name with options: `NAME:OPTION=VALUE,...`.

        Raises `UnknownPolicyError` listing the names there are, `ConfigError` for options, and
        `PluginError` for a policy whose plugin is broken.
        """
        name, options = split_name(text)
        self._check_not_broken("policy", name, self.policies)
        if name not in self.policies:
            raise UnknownPolicyError(f"no scheduling policy {name!r}; {self._known(self.policies)}")
        offer = self.policies[name]
        try:
            policy = made(offer.spec.factory, options, f"policy {name!r}")
        except (ConfigError, PluginError):
            raise
        except Exception as error:
            raise PluginError(f"policy {offer} can't be made: {error!r}") from error
        if not isinstance(policy, SchedulingPolicy):
            raise PluginError(f"policy {offer}: its factory made {policy!r}, no SchedulingPolicy")
        return policy

    def check_selected(self) -> None:
        """Raise `PluginError` for a broken plugin that AIOSERVE_PLUGINS names."""
        for broken in self.broken:
            if broken.selected:
                raise PluginError(
                    f"AIOSERVE_PLUGINS names a plugin that can't be loaded: {broken}"
                ) from broken.cause

    def _known(self, names: Iterable[str]) -> str:
        known = ", ".join(sorted(names))
        text = f"there are: {known}" if known else "none is installed"
        if self.off:
            text += f"; AIOSERVE_PLUGINS leaves out: {', '.join(p.name for p in self.off)}"
        return text

    def _check_not_broken(self, kind: str, name: str, offers: dict[str, Offer[Spec]]) -> None:
        for broken in self.broken:
            if broken.name == name and name not in offers:
                raise PluginError(f"{kind} {name!r} can't be loaded: {broken}") from broken.cause

    def _load(self, plugin: InstalledPlugin) -> Contents:
        try:
            return contents_of(plugin.point.load())
        except (Exception, SystemExit) as error:
            self._leave_out(plugin, error)
            return Contents()

    def _try_adding(self, plugin: InstalledPlugin, contents: Contents) -> None:
        try:
            self._add(contents, plugin.distribution, plugin.version, plugin.name)
        except PluginError as error:
            self._leave_out(plugin, error)

    def _leave_out(self, plugin: InstalledPlugin, error: BaseException) -> None:
        broken = BrokenPlugin(
            plugin.name, plugin.distribution, plugin.version, error, plugin.selected
        )
        self.broken.append(broken)
        logger.warning("plugin left out: %s", broken)

    def _add(self, contents: Contents, distribution: str, version: str, plugin: str) -> None:
        """All that a plugin offers, or nothing of it."""
        policies = _offers(contents.policies, distribution, version, plugin)
        _check_free("policy", policies, self.policies)
        self.policies.update(policies)


def check_policy_object(policy: object) -> SchedulingPolicy:
    """`policy`, if it is one."""
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError(f"policy must be a name or a SchedulingPolicy object, got {policy!r}")
    return policy


def _offers(
    specs: Sequence[Spec], distribution: str, version: str, plugin: str
) -> dict[str, Offer[Spec]]:
    offers = {spec.name: Offer(spec, distribution, version, plugin) for spec in specs}
    if len(offers) < len(specs):
        raise PluginError(f"a name is offered twice among {[spec.name for spec in specs]}")
    return offers


def _check_free(kind: str, offers: dict[str, Offer[Spec]], taken: dict[str, Offer[Spec]]) -> None:
    for name in offers:
        if name in taken:
            raise PluginError(f"{kind} {name!r} is offered by {taken[name].distribution} too")
