"""Plugins installed and given, as found at one moment. A broken plugin harms nothing that doesn't
use it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from aioserve.drafting.drafter import Drafter
from aioserve.errors import ConfigError, ModelError, PluginError, UnknownPolicyError
from aioserve.isolation import blamed, shown
from aioserve.kv.eviction import Eviction, EvictionStrategy, StrategyCalls
from aioserve.kv.prefix_tree import EVICTION_STRATEGIES
from aioserve.models.architecture import Architecture
from aioserve.models.families import FAMILIES
from aioserve.models.families.family import ModelFamily
from aioserve.models.fields import Fields
from aioserve.models.known import KnownKinds
from aioserve.models.quantization.config import METHODS
from aioserve.models.quantization.declared import WeightFormat, scheme_of
from aioserve.plugins.given_objects import wrong_method
from aioserve.plugins.installed import InstalledPlugin, Origin, installed_plugins
from aioserve.plugins.observers import Admission, Observer, Observers, RequestInfo
from aioserve.plugins.options import made, split_name
from aioserve.plugins.specs import (
    Contents,
    DrafterSpec,
    EvictionSpec,
    LogitsProcessorSpec,
    ModelFamilySpec,
    ObserverSpec,
    PolicySpec,
    ReasoningParserSpec,
    Spec,
    ToolParserSpec,
    ValueSpec,
    WeightFormatSpec,
    contents_of,
)
from aioserve.sampling.processors import LogitsProcessor, ProcessorMaker
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.text.output_parsers.declared import CallFormat, ReasoningMarks, parser_of, tags_of
from aioserve.text.output_parsers.registry import REASONING_FORMATS, TOOL_PARSERS, OutputParsers

__all__ = [
    "BrokenPlugin",
    "Offer",
    "Origin",
    "PluginRegistry",
    "ValueOffer",
]

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

GIVEN = "given to the engine"
NO_PARSERS = ("auto", "none")
BUILT_IN: Mapping[str, Collection[str]] = {
    EvictionSpec.kind: EVICTION_STRATEGIES,
    ToolParserSpec.kind: (*TOOL_PARSERS, *NO_PARSERS),
    ReasoningParserSpec.kind: (*REASONING_FORMATS, *NO_PARSERS),
    ModelFamilySpec.kind: FAMILIES.keys(),
    WeightFormatSpec.kind: METHODS.keys(),
}
"""Names by kind that no plugin may offer."""


class Offer(msgspec.Struct, Generic[T], frozen=True):
    """Something that a plugin offers by name."""

    spec: Spec[T]
    origin: Origin

    @property
    def label(self) -> str:
        """Label for logs and errors."""
        return f"{self.spec.name} ({self.origin})"


class ValueOffer(msgspec.Struct, Generic[T], frozen=True):
    """A value that a plugin offers by name."""

    spec: ValueSpec[T]
    origin: Origin

    @property
    def label(self) -> str:
        """Label for logs and errors."""
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
    """Kinds and names of what it would offer, where known."""

    @property
    def reason(self) -> str:
        return shown(self.cause)

    def __str__(self) -> str:
        return f"{self.name} ({self.origin}): {self.reason}"


class PluginRegistry:
    """Registry of plugins. Each engine makes its own.

    `plugins` are objects or modules with hook implementations that needn't be installed. A broken
    one raises `PluginError`. One object counts once, however often it is found. Raises
    `ConfigError` if AIOSERVE_PLUGINS names something that isn't installed.
    """

    def __init__(self, plugins: Iterable[object] = ()) -> None:
        self.policies: dict[str, Offer[SchedulingPolicy]] = {}
        self.evictions: dict[str, Offer[EvictionStrategy]] = {}
        """Offers of eviction strategies, without the native ones."""
        self.observers: dict[str, Offer[Observer]] = {}
        self.logits_processors: dict[str, Offer[LogitsProcessor]] = {}
        self.drafters: dict[str, Offer[Drafter]] = {}
        self.tool_parsers: dict[str, ValueOffer[CallFormat]] = {}
        """Offers of formats, without the bundled ones; so are the next."""
        self.weight_formats: dict[str, ValueOffer[WeightFormat]] = {}
        self.model_families: dict[str, ValueOffer[ModelFamily]] = {}
        self.reasoning_parsers: dict[str, ValueOffer[ReasoningMarks]] = {}
        self._offers: dict[str, dict[str, Any]] = {
            PolicySpec.kind: self.policies,
            EvictionSpec.kind: self.evictions,
            ObserverSpec.kind: self.observers,
            LogitsProcessorSpec.kind: self.logits_processors,
            DrafterSpec.kind: self.drafters,
            ToolParserSpec.kind: self.tool_parsers,
            ReasoningParserSpec.kind: self.reasoning_parsers,
            ModelFamilySpec.kind: self.model_families,
            WeightFormatSpec.kind: self.weight_formats,
        }
        self.admissions: list[AdmissionOffer] = []
        """Offers in the order of asking."""
        self.broken: list[BrokenPlugin] = []
        self.off: list[InstalledPlugin] = []
        """Plugins that AIOSERVE_PLUGINS leaves out; they are not imported."""
        self._asked: list[object] = []
        for plugin in plugins:
            with blamed(f"plugin {shown(plugin)} {GIVEN} is broken", PluginError):
                origin = Origin(_name_of(plugin), GIVEN, "", selected=True)
                self._add(self._ask(plugin), origin, {})
        installed = installed_plugins()
        self.off = [plugin for plugin in installed if not plugin.allowed]
        loaded = [(plugin, self._load(plugin)) for plugin in installed if plugin.allowed]
        owners = {
            (kind, name): plugin.origin
            for plugin, contents in reversed(loaded)
            for kind, name in contents.offered
            if name == plugin.name
        }
        for plugin, contents in loaded:
            try:
                self._add(contents, plugin.origin, owners)
            except PluginError as error:
                self._leave_out(plugin.name, plugin.origin, error, contents.offered)
        self.admissions.sort(key=attrgetter("place"))

    # -- what an engine chooses

    def policy(self, text: str) -> SchedulingPolicy:
        """Make a policy object from a name, or from a name with options: `NAME:OPTION=VALUE,...`.

        Raises `UnknownPolicyError` listing the known names, `ConfigError` for options, and
        `PluginError` for a policy whose plugin is broken.
        """
        name, options = split_name(text)
        offer = self._offer(PolicySpec, name)
        if offer is None:
            raise UnknownPolicyError(
                f"no scheduling policy {shown(name)}; {self._known(name, self.policies)}",
                name=name,
                known=sorted(self.policies),
            )
        return _made(offer, options)

    def policy_label(self, text: str) -> str:
        """Name and distribution of a policy that `policy` makes, for logs and errors."""
        return self.policies[split_name(text)[0]].label

    def eviction(self, text: str) -> Eviction:
        """Eviction strategy for a name with options like those of a policy, in the form for
        `PrefixTree`.

        Raises `ConfigError` listing the known names, and `PluginError` for a strategy whose plugin
        is broken.
        """
        name, options = split_name(text)
        if name in EVICTION_STRATEGIES:
            if options:
                raise ConfigError(f"eviction strategy {name!r} has no options, got {shown(text)}")
            return name
        offer = self._offer(EvictionSpec, name)
        if offer is None:
            known = self._known(name, [*EVICTION_STRATEGIES, *self.evictions])
            raise ConfigError(f"eviction: no strategy {shown(name)}; {known}")
        return StrategyCalls(_made(offer, options), offer.label)

    def drafter(self, text: str) -> Drafter:
        """Make a drafter from a name, with options like those of a policy.

        Raises `ConfigError` listing the known names, and `PluginError` for a drafter whose plugin
        is broken.
        """
        name, options = split_name(text)
        offer = self._offer(DrafterSpec, name)
        if offer is None:
            known = self._known(name, self.drafters)
            raise ConfigError(f"speculation: no drafter {shown(name)}; {known}")
        return _made(offer, options)

    def drafter_label(self, text: str) -> str:
        """Name and distribution of a drafter that `drafter` makes, for logs and errors."""
        return self.drafters[split_name(text)[0]].label

    def output_parsers(self, *names: str) -> OutputParsers:
        """The parsers of tool calls and of reasoning. Plugins' parsers come after the bundled
        ones, in the order of their names. `names` are those that an engine chooses, first of a tool
        parser and then of a reasoning parser.

        Raises `ConfigError` listing the names there are, and `PluginError` for a parser whose
        plugin is broken.
        """
        parsers = OutputParsers(
            {
                **TOOL_PARSERS,
                **{
                    name: parser_of(name, offer.spec.value, offer.label)
                    for name, offer in sorted(self.tool_parsers.items())
                },
            },
            {
                **REASONING_FORMATS,
                **{
                    name: tags_of(offer.spec.value)
                    for name, offer in sorted(self.reasoning_parsers.items())
                },
            },
        )
        for name, spec, known in zip(
            names,
            (ToolParserSpec, ReasoningParserSpec),
            (parsers.tools, parsers.reasoning),
            strict=False,
        ):
            if name not in (*NO_PARSERS, *known):
                self._check_whole(spec.kind, name)
                argument = spec.kind.replace(" ", "_")
                there = self._known(name, [*NO_PARSERS, *known])
                raise ConfigError(
                    f"{argument}: no {spec.kind} {shown(name)}; {there}",
                    argument=argument,
                    value=name,
                )
        return parsers

    def known_kinds(self) -> KnownKinds:
        """The kinds of models that can be read, those of plugins behind the bundled ones."""
        offers = sorted(self.model_families.items())
        families = {name: _guarded(offer.spec.value, offer.label) for name, offer in offers}
        schemes = {
            name: scheme_of(name, offer.spec.value, offer.label)
            for name, offer in sorted(self.weight_formats.items())
        }
        return KnownKinds(families={**FAMILIES, **families}, schemes={**METHODS, **schemes})

    # -- what a request chooses

    @property
    def processor_makers(self) -> tuple[ProcessorMaker, ...]:
        """Makers of logits processors, one for each name. Runners refer to them by their numbers
        here."""
        return tuple(
            [
                ProcessorMaker(offer.label, lambda text, offer=offer: _made_of(offer, text))
                for _, offer in sorted(self.logits_processors.items())
            ]
        )

    def logits_processor(self, text: str) -> int:
        """Number in `processor_makers` of a name, with options like those of a policy. Makes a
        processor as a test.

        Raises `ConfigError` for an unknown name or option, and `PluginError` for a processor that
        can't be made.
        """
        name, options = split_name(text)
        offer = self._offer(LogitsProcessorSpec, name)
        if offer is None:
            known = self._known(name, self.logits_processors)
            raise ConfigError(f"no logits processor {shown(name)}; {known}")
        _made(offer, options)
        return sorted(self.logits_processors).index(name)

    # -- what every engine has

    def check_selected(self) -> None:
        """Raise `PluginError` for a broken plugin that AIOSERVE_PLUGINS names."""
        for broken in self.broken:
            if broken.origin.selected:
                raise PluginError(
                    f"AIOSERVE_PLUGINS names a plugin that can't be loaded: {broken}"
                ) from broken.cause

    def make_observers(self) -> Observers:
        """Make observer objects and attach them. One that can't be made is left out, with a
        warning. Raises `PluginError` instead if its plugin was given or is named by
        AIOSERVE_PLUGINS."""
        observers = Observers()
        for offer in list(self.observers.values()):
            try:
                observers.attach(_made(offer, {}), offer.label)
            except (PluginError, ConfigError) as error:
                if offer.origin.selected:
                    raise
                self._leave_out(offer.spec.name, offer.origin, error)
        return observers

    def admission(self) -> Admission:
        """Make the admission check of every plugin."""
        return Admission((offer.label, offer.ask) for offer in self.admissions)

    # -- parts

    def _check_model_type(self, spec: ModelFamilySpec, contents: Contents, origin: Origin) -> None:
        """Raise `PluginError` for a family whose model_type is that of another one."""
        model_type = spec.value.model_type
        offered = [one for one in contents.specs if isinstance(one, ModelFamilySpec)]
        own = [one for one in offered if one is not spec]
        others = {name: (family, "aioserve's own") for name, family in FAMILIES.items()}
        others |= {one.name: (one.value, "offered by it too") for one in own}
        others |= {
            name: (offer.spec.value, f"of plugin {offer.origin.plugin} ({offer.origin})")
            for name, offer in self.model_families.items()
        }
        for name, (family, whose) in others.items():
            if family.model_type == model_type:
                raise PluginError(
                    f"model family {spec.name!r} of plugin {origin.plugin} ({origin}) has the "
                    f"model_type {model_type!r}, which is that of {name!r}, {whose}"
                )

    def _offer(self, wanted: type[Spec[T]], name: str) -> Offer[T] | None:
        self._check_whole(wanted.kind, name)
        return self._offers[wanted.kind].get(name)

    def _check_whole(self, kind: str, name: str) -> None:
        """Raise `PluginError` for a name that only a broken plugin offers."""
        for broken in () if name in self._offers[kind] else self.broken:
            if broken.name == name or (kind, name) in broken.offered:
                raise PluginError(f"{kind} {name!r} can't be loaded: {broken}") from broken.cause

    def _known(self, name: str, names: Iterable[str]) -> str:
        """Text of the nearest name, if one is near to `name`, and of all names."""
        known = sorted(names)
        near = get_close_matches(name.replace("-", "_").lower(), known, 1)
        meant = f"did you mean {near[0]}? There" if near else "there"
        text = f"{meant} are: {', '.join(known)}" if known else "none is installed"
        if self.off:
            text += f"; AIOSERVE_PLUGINS leaves out: {', '.join(p.name for p in self.off)}"
        if self.broken:
            text += f"; broken: {'; '.join(map(str, self.broken))}"
        return text

    def _ask(self, plugin: object) -> Contents:
        """Ask a plugin what it offers. Empty if this object was asked before."""
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
            self._leave_out(plugin.name, plugin.origin, error)
            return Contents()

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

    def _add(
        self, contents: Contents, origin: Origin, owners: Mapping[tuple[str, str], Origin]
    ) -> None:
        """Add everything that a plugin offers, or nothing. `owners` are the entry points of a name,
        which have a right to it before any other."""
        for kind, name in contents.offered:
            if name in BUILT_IN.get(kind, ()):
                raise PluginError(
                    f"{kind} {name!r} is built in; plugin {origin.plugin} ({origin}) must give its "
                    "own another name"
                )
            by = owners.get((kind, name), origin)
            if name in self._offers[kind]:
                by = self._offers[kind][name].origin
            if by is not origin:
                raise PluginError(f"{kind} {name!r} is offered by plugin {by.plugin} ({by}) too")
        for spec in contents.specs:
            if isinstance(spec, ModelFamilySpec):
                self._check_model_type(spec, contents, origin)
        for spec in contents.specs:
            offer = Offer(spec, origin) if isinstance(spec, Spec) else ValueOffer(spec, origin)
            self._offers[spec.kind][spec.name] = offer
        if contents.admit is not None:
            self.admissions.append(AdmissionOffer(contents.admit, contents.admit_place, origin))


def _guarded(family: ModelFamily, label: str) -> ModelFamily:
    """The family, whose mistakes name its plugin."""

    def describe(config: Fields) -> Architecture:
        with blamed(
            f"model family {label} can't describe {config.source}", ModelError, PluginError
        ):
            found: object = family.describe(config)
            if not isinstance(found, Architecture):
                raise PluginError(
                    f"model family {label} described {config.source} by {shown(found)}, which is "
                    "no Architecture"
                )
            return found

    return msgspec.structs.replace(family, describe=describe)


def _made_of(offer: Offer[T], text: str) -> T:
    return _made(offer, split_name(text)[1])


def _made(offer: Offer[T], options: Mapping[str, str]) -> T:
    """Call the factory. Raises `PluginError` naming the plugin if it raises or makes something
    else."""
    spec, what = offer.spec, f"{offer.spec.kind} {offer.label}"
    with blamed(f"{what} can't be made", ConfigError, PluginError):
        thing = made(spec.factory, options, f"{spec.kind} {spec.name!r}")
        if not isinstance(thing, spec.makes):
            wanted = spec.makes.__name__
            raise PluginError(f"{what}: its factory made {shown(thing)}, no {wanted}")
        if wrong := wrong_method(thing, spec.makes):
            raise PluginError(f"{what}: {wrong}")
    return thing


def _name_of(plugin: object) -> str:
    name = getattr(plugin, "__name__", None)
    return name if type(name) is str else type(plugin).__name__
