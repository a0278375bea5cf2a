"""What is installed and given, as found at one moment. One broken plugin harms nobody who doesn't
use it.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from aioserve.errors import ConfigError, PluginError, UnknownPolicyError
from aioserve.isolation import blamed, shown
from aioserve.kv.eviction import Eviction, EvictionStrategy, GuardedStrategy
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES
from aioserve.plugins.admission import Admission, AdmissionCheck
from aioserve.plugins.contents import Contents, contents_of
from aioserve.plugins.installed import InstalledPlugin, installed_plugins
from aioserve.plugins.observers import Observer, Observers
from aioserve.plugins.options import made, split_name
from aioserve.plugins.records import RequestInfo
from aioserve.plugins.specs import EvictionSpec, ObserverSpec, PolicySpec
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["BrokenPlugin", "Offer", "Origin", "PluginRegistry", "check_policy_object"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
Spec = TypeVar("Spec", PolicySpec, EvictionSpec, ObserverSpec)

GIVEN = "given to the engine"


class Origin(msgspec.Struct, frozen=True):
    """Where a plugin came from."""

    plugin: str
    """Name of the entry point, or of the object that was given."""
    distribution: str
    version: str
    selected: bool
    """It was given, or AIOSERVE_PLUGINS names it: that it is broken is an error."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


class Offer(msgspec.Struct, Generic[Spec], frozen=True):
    """Something that a plugin offers by name."""

    spec: Spec
    origin: Origin

    @property
    def label(self) -> str:
        """For logs and errors."""
        return f"{self.spec.name} ({self.origin})"


class AdmissionOffer(msgspec.Struct, frozen=True):
    """A plugin that is asked about each request."""

    ask: Callable[[RequestInfo], object]
    place: tuple[bool, bool]
    origin: Origin

    @property
    def label(self) -> str:
        return f"{self.origin.plugin} ({self.origin})"


class BrokenPlugin(msgspec.Struct, frozen=True):
    """A plugin that couldn't be loaded or broke its contract."""

    name: str
    origin: Origin
    cause: BaseException
    offered: frozenset[tuple[str, str]] = frozenset()
    """Kind and name of what it would offer, where that is known."""

    @property
    def reason(self) -> str:
        return shown(self.cause)

    def __str__(self) -> str:
        return f"{self.name} ({self.origin}): {self.reason}"


class PluginRegistry:
    """Each engine makes its own.

    `plugins` are objects or modules with hook implementations that needn't be installed; a broken
    one raises `PluginError`. One object counts once, however often it is found. Raises
    `ConfigError` if AIOSERVE_PLUGINS names what isn't installed.
    """

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self.policies: dict[str, Offer[PolicySpec]] = {}
        self.evictions: dict[str, Offer[EvictionSpec]] = {}
        """Without the native ones."""
        self.observers: dict[str, Offer[ObserverSpec]] = {}
        self.admissions: list[AdmissionOffer] = []
        """In the order in which they are asked."""
        self.broken: list[BrokenPlugin] = []
        self.off: list[InstalledPlugin] = []
        """Those that AIOSERVE_PLUGINS leaves out; they are not imported."""
        self._asked: list[object] = []
        for plugin in plugins:
            with blamed(f"plugin {shown(plugin)} {GIVEN} is broken", PluginError):
                origin = Origin(_name_of(plugin), GIVEN, "", selected=True)
                self._add(self._ask(plugin), origin)
        installed = installed_plugins()
        self.off = [plugin for plugin in installed if not plugin.allowed]
        loaded = [(plugin, self._load(plugin)) for plugin in installed if plugin.allowed]
        owners = {
            (kind, name): plugin
            for plugin, contents in reversed(loaded)
            for kind, name in contents.offered
            if name == plugin.name
        }
        for plugin, contents in loaded:
            self._try_adding(plugin, contents, owners)
        self.admissions.sort(key=attrgetter("place"))

    # -- what an engine chooses

    def policy(self, text: str) -> SchedulingPolicy:
        """A new policy object of a name, or of a name with options: `NAME:OPTION=VALUE,...`.

        Raises `UnknownPolicyError` listing the names there are, `ConfigError` for options, and
        `PluginError` for a policy whose plugin is broken.
        """
        name, options = split_name(text)
        offer = self._offer("policy", name, self.policies)
        if offer is None:
            raise UnknownPolicyError(f"no scheduling policy {name!r}; {self._known(self.policies)}")
        return _made("policy", offer, options, SchedulingPolicy)

    def policy_label(self, text: str) -> str:
        """Name and distribution of a policy that `policy` makes, for logs and errors."""
        return self.policies[split_name(text)[0]].label

    def eviction(self, text: str) -> Eviction:
        """What `PrefixTree` takes for the name of an eviction strategy, options as of a policy.

        Raises `ConfigError` listing the names there are, and `PluginError` for a strategy whose
        plugin is broken.
        """
        name, options = split_name(text)
        if name in EVICTION_STRATEGIES:
            if options:
                raise ConfigError(f"eviction strategy {name!r} has no options, got {text!r}")
            return name
        offer = self._offer("eviction strategy", name, self.evictions)
        if offer is None:
            known = self._known([*EVICTION_STRATEGIES, *self.evictions])
            raise ConfigError(f"eviction: no strategy {name!r}; {known}")
        strategy = _made("eviction strategy", offer, options, EvictionStrategy)
        return GuardedStrategy(strategy, offer.label)

    # -- what every engine has

    def check_selected(self) -> None:
        """Raise `PluginError` for a broken plugin that AIOSERVE_PLUGINS names."""
        for broken in self.broken:
            if broken.origin.selected:
                raise PluginError(
                    f"AIOSERVE_PLUGINS names a plugin that can't be loaded: {broken}"
                ) from broken.cause

    def make_observers(self) -> Observers:
        """New observer objects, attached. One that can't be made is left out, with a warning;
        raises `PluginError` where its plugin was given or is named by AIOSERVE_PLUGINS."""
        observers = Observers()
        for offer in list(self.observers.values()):
            try:
                observers.attach(_made("observer", offer, {}, Observer), offer.label)
            except (PluginError, ConfigError) as error:
                if offer.origin.selected:
                    raise
                self._leave_out(offer.spec.name, offer.origin, error)
        return observers

    def admission(self) -> Admission:
        """Every plugin's check of requests."""
        return Admission([AdmissionCheck(offer.ask, offer.label) for offer in self.admissions])

    # -- parts

    def _offer(self, kind: str, name: str, offers: Mapping[str, Offer[Spec]]) -> Offer[Spec] | None:
        if name in offers:
            return offers[name]
        for broken in self.broken:
            if broken.name == name or (kind, name) in broken.offered:
                raise PluginError(f"{kind} {name!r} can't be loaded: {broken}") from broken.cause
        return None

    def _known(self, names: Iterable[str]) -> str:
        known = ", ".join(sorted(names))
        text = f"there are: {known}" if known else "none is installed"
        if self.off:
            text += f"; AIOSERVE_PLUGINS leaves out: {', '.join(p.name for p in self.off)}"
        if self.broken:
            text += f"; broken: {'; '.join(map(str, self.broken))}"
        return text

    def _ask(self, plugin: object) -> Contents:
        """What it offers; nothing more if this very object was asked before."""
        if any(plugin is asked for asked in self._asked):
            return Contents()
        contents = contents_of(plugin)
        self._asked.append(plugin)
        return contents

    def _load(self, plugin: InstalledPlugin) -> Contents:
        try:
            return self._ask(plugin.point.load())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self._leave_out(plugin.name, _origin(plugin), error)
            return Contents()

    def _try_adding(
        self,
        plugin: InstalledPlugin,
        contents: Contents,
        owners: Mapping[tuple[str, str], InstalledPlugin],
    ) -> None:
        """A name belongs to the entry point of that name before it belongs to any other."""
        try:
            for kind, name in contents.offered:
                owner = owners.get((kind, name), plugin)
                if owner is not plugin:
                    raise _taken(kind, name, _origin(owner))
            self._add(contents, _origin(plugin))
        except PluginError as error:
            self._leave_out(plugin.name, _origin(plugin), error, contents.offered)

    def _leave_out(
        self,
        name: str,
        origin: Origin,
        error: BaseException,
        offered: Iterable[tuple[str, str]] = (),
    ) -> None:
        broken = BrokenPlugin(name, origin, error, frozenset(offered))
        self.broken.append(broken)
        logger.warning("plugin left out: %s", broken)

    def _add(self, contents: Contents, origin: Origin) -> None:
        """All that a plugin offers, or nothing of it."""
        for spec in contents.evictions:
            if spec.name in EVICTION_STRATEGIES:
                raise PluginError(f"eviction strategy {spec.name!r} is built in")
        offers = {
            "policy": self.policies,
            "eviction strategy": self.evictions,
            "observer": self.observers,
        }
        for kind, name in contents.offered:
            if name in offers[kind]:
                raise _taken(kind, name, offers[kind][name].origin)
        self.policies.update({s.name: Offer(s, origin) for s in contents.policies})
        self.evictions.update({s.name: Offer(s, origin) for s in contents.evictions})
        self.observers.update({s.name: Offer(s, origin) for s in contents.observers})
        if contents.admit is not None:
            admit = contents.admit
            self.admissions.append(
                AdmissionOffer(lambda info: admit(request=info), contents.admit_place, origin)
            )


def check_policy_object(policy: object) -> SchedulingPolicy:
    """`policy`, if it is one whose methods are plain."""
    with blamed("policy can't be used", ConfigError):
        if not isinstance(policy, SchedulingPolicy):
            raise ConfigError(
                f"policy must be a name or a SchedulingPolicy object, got {shown(policy)}"
            )
        asynchronous = _async_method(policy, SchedulingPolicy)
    if asynchronous:
        raise ConfigError(asynchronous)
    return policy


def _async_method(thing: object, kind: type) -> str | None:
    """What is wrong with the first of its methods that isn't plain: nobody would await it."""
    for method in vars(kind):
        function = None if method.startswith("_") else getattr(thing, method)
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            return f"{type(thing).__name__}.{method} must be a plain function, got an async one"
    return None


def _made(kind: str, offer: Offer[Any], options: Mapping[str, str], wanted: type[T]) -> T:
    """What the factory makes. Raises `PluginError` naming the plugin if it raises or makes
    something else."""
    what = f"{kind} {offer.label}"
    with blamed(f"{what} can't be made", ConfigError, PluginError):
        thing = made(offer.spec.factory, options, f"{kind} {offer.spec.name!r}")
        if not isinstance(thing, wanted):
            raise PluginError(f"{what}: its factory made {shown(thing)}, no {wanted.__name__}")
        asynchronous = _async_method(thing, wanted)
    if asynchronous:
        raise PluginError(f"{what}: {asynchronous}")
    return thing


def _taken(kind: str, name: str, by: Origin) -> PluginError:
    return PluginError(f"{kind} {name!r} is offered by plugin {by.plugin} ({by}) too")


def _origin(plugin: InstalledPlugin) -> Origin:
    return Origin(plugin.name, plugin.distribution, plugin.version, plugin.selected)


def _name_of(plugin: object) -> str:
    name = getattr(plugin, "__name__", None)
    return name if type(name) is str else type(plugin).__name__
