"""Hooks by which a plugin offers things, the frozen specs that they return, and the checked
contents of one plugin.

A spec says how to make something, and the version of the interface it was written for. The object
is chosen once, when an engine starts, and then called plainly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import pluggy

from aioserve.drafting.drafter import Drafter
from aioserve.errors import PluginError
from aioserve.isolation import shown
from aioserve.kv.eviction import EvictionStrategy
from aioserve.models.families.family import ModelFamily, check_family
from aioserve.models.quantization.declared import WeightFormat, check_weight_format_value
from aioserve.plugins.observers import Observer, RequestInfo
from aioserve.sampling.processors import LogitsProcessor
from aioserve.scheduling.policy import Refusal, SchedulingPolicy
from aioserve.text.output_parsers.declared import (
    CallFormat,
    ReasoningMarks,
    check_call_format,
    check_tags,
)

__all__ = [
    "API_VERSION",
    "GROUP",
    "AnySpec",
    "Contents",
    "DrafterSpec",
    "EvictionSpec",
    "HookSpecs",
    "LogitsProcessorSpec",
    "ModelFamilySpec",
    "ObserverSpec",
    "PolicySpec",
    "ReasoningParserSpec",
    "Spec",
    "ToolParserSpec",
    "ValueSpec",
    "WeightFormatSpec",
    "contents_of",
    "hookimpl",
]

T = TypeVar("T")

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")

GROUP = "aioserve"
"""Group of entry points, and project name of pluggy's markers."""

API_VERSION = 1
"""Version of the interfaces that specs are written for. It grows when something that worked no
longer does. A spec made for another version is refused."""

hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(GROUP)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(GROUP)


class Spec(msgspec.Struct, Generic[T], frozen=True):
    """Something that a plugin offers by name."""

    kind: ClassVar[str]
    """Kind of what is offered, for messages."""
    makes: ClassVar[type]

    name: str
    factory: Callable[..., T]
    """Factory of one object for one engine. If the object is chosen by name, keyword-only
    parameters can be given with the name: `policy="round_robin:chunk_size=512"`."""
    description: str = ""
    """One line for listings."""
    api: int = 1
    """Value of `aioserve.plugins.API_VERSION` that it was written for. The default stays 1: a spec
    that doesn't say was written for the first."""


class ValueSpec(msgspec.Struct, Generic[T], frozen=True):
    """A value that a plugin offers by name: it says how something is, and makes nothing."""

    kind: ClassVar[str]
    """Kind of what is offered, for messages."""
    check: ClassVar[Callable[[object], None]]
    """Raises `ValueError`, in words, for a value that can't be used."""

    name: str
    value: T
    """Frozen value that the plugin offers."""
    description: str = ""
    """One line for listings."""
    api: int = 1
    """`aioserve.plugins.API_VERSION` that it was written for."""


AnySpec = Spec[Any] | ValueSpec[Any]


class PolicySpec(Spec[SchedulingPolicy], frozen=True):
    """A scheduling policy that a plugin offers."""

    kind = "policy"
    makes = SchedulingPolicy


class EvictionSpec(Spec[EvictionStrategy], frozen=True):
    """An order in which cached pages are given up, offered by a plugin."""

    kind = "eviction strategy"
    makes = EvictionStrategy


class ObserverSpec(Spec[Observer], frozen=True):
    """An observer that a plugin attaches to every engine."""

    kind = "observer"
    makes = Observer


class LogitsProcessorSpec(Spec[LogitsProcessor], frozen=True):
    """A logits processor that a plugin offers to requests."""

    kind = "logits processor"
    makes = LogitsProcessor


class DrafterSpec(Spec[Drafter], frozen=True):
    """A drafter that a plugin offers."""

    kind = "drafter"
    makes = Drafter


class ToolParserSpec(ValueSpec[CallFormat], frozen=True):
    """A format of tool calls that a plugin offers: a `JsonCalls` or a `CustomCalls`."""

    kind = "tool parser"
    check: ClassVar[Callable[[object], None]] = staticmethod(check_call_format)


class ReasoningParserSpec(ValueSpec[ReasoningMarks], frozen=True):
    """A format of reasoning that a plugin offers: the tags around it."""

    kind = "reasoning parser"
    check: ClassVar[Callable[[object], None]] = staticmethod(check_tags)


class ModelFamilySpec(ValueSpec[ModelFamily], frozen=True):
    """A family of models that a plugin offers. `name` is that in `architectures` of config.json,
    such as "MyModelForCausalLM"."""

    kind = "model family"
    check: ClassVar[Callable[[object], None]] = staticmethod(check_family)


class WeightFormatSpec(ValueSpec[WeightFormat], frozen=True):
    """A format of weights that a plugin offers. `name` is its `quant_method` in config.json."""

    kind = "weight format"
    check: ClassVar[Callable[[object], None]] = staticmethod(check_weight_format_value)


class HookSpecs:
    """The hooks that a plugin may implement."""

    @hookspec
    def aioserve_scheduling_policies(self) -> Sequence[PolicySpec]:  # pyright: ignore[reportReturnType]
        """Scheduling policies that the plugin offers."""

    @hookspec
    def aioserve_eviction_strategies(self) -> Sequence[EvictionSpec]:  # pyright: ignore[reportReturnType]
        """Eviction strategies that the plugin offers."""

    @hookspec
    def aioserve_observers(self) -> Sequence[ObserverSpec]:  # pyright: ignore[reportReturnType]
        """Observers to attach to every engine."""

    @hookspec
    def aioserve_logits_processors(self) -> Sequence[LogitsProcessorSpec]:  # pyright: ignore[reportReturnType]
        """Logits processors that requests may name."""

    @hookspec
    def aioserve_drafters(self) -> Sequence[DrafterSpec]:  # pyright: ignore[reportReturnType]
        """Drafters that engines may use for speculative decoding."""

    @hookspec
    def aioserve_tool_parsers(self) -> Sequence[ToolParserSpec]:  # pyright: ignore[reportReturnType]
        """Formats in which models write tool calls."""

    @hookspec
    def aioserve_reasoning_parsers(self) -> Sequence[ReasoningParserSpec]:  # pyright: ignore[reportReturnType]
        """Tags in which models write their reasoning."""

    @hookspec
    def aioserve_model_families(self) -> Sequence[ModelFamilySpec]:  # pyright: ignore[reportReturnType]
        """Families of models that can be loaded."""

    @hookspec
    def aioserve_weight_formats(self) -> Sequence[WeightFormatSpec]:  # pyright: ignore[reportReturnType]
        """Formats of quantized weights that can be read."""

    @hookspec(firstresult=True)
    def aioserve_admit(self, request: RequestInfo) -> Refusal | None:
        """Return a refusal to keep a request out of the queue; None lets it in. Asked once for each
        request, on the event loop, when the length of its prompt is known."""


class Contents(msgspec.Struct, frozen=True):
    """Everything that one plugin offers."""

    specs: tuple[AnySpec, ...] = ()
    admit: Callable[[RequestInfo], object] | None = None
    """`aioserve_admit` of the plugin, if it has one."""
    admit_place: tuple[bool, bool] = (False, False)
    """Sort key of admission checks: `tryfirst` before the others, `trylast` after them."""

    @property
    def offered(self) -> list[tuple[str, str]]:
        """Kind and name of every spec."""
        return [(spec.kind, spec.name) for spec in self.specs]


def contents_of(plugin: object) -> Contents:
    """Contents of a plugin's hooks: a module's functions or an object's methods.

    Raises `PluginError` if it breaks the contract, and anything that its hooks raise.
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
            *_specs(hook.aioserve_drafters, DrafterSpec),
            *_specs(hook.aioserve_tool_parsers, ToolParserSpec),
            *_specs(hook.aioserve_reasoning_parsers, ReasoningParserSpec),
            *_specs(hook.aioserve_model_families, ModelFamilySpec),
            *_specs(hook.aioserve_weight_formats, WeightFormatSpec),
        ),
        admit=None if admit is None else lambda info: hook.aioserve_admit(request=info),
        admit_place=(False, False) if admit is None else (not admit.tryfirst, admit.trylast),
    )


def _check_plain(name: str, implementation: pluggy.HookImpl) -> None:
    if inspect.iscoroutinefunction(implementation.function):
        raise PluginError(f"{name} must be a plain function, got an async one")
    if implementation.hookwrapper or implementation.wrapper:
        raise PluginError(f"{name} must not be a wrapper: plugins are asked one by one")


def _specs(hook: pluggy.HookCaller, kind: type[AnySpec]) -> list[AnySpec]:
    """Specs that a hook returns, each checked and copied into plain values."""
    specs: dict[str, AnySpec] = {}
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


def _checked(spec: AnySpec, kind: type[AnySpec]) -> AnySpec:
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
    if isinstance(spec, Spec):
        given: Any = spec.factory
        if not callable(given):
            raise PluginError(f"{what}: factory must be callable, got {shown(given)}")
    else:
        given = spec.value
        try:
            type(spec).check(given)
        except ValueError as error:
            raise PluginError(f"{what}: {error}") from error
    if not isinstance(spec.description, str):
        raise PluginError(f"{what}: description must be a str, got {shown(spec.description)}")
    return kind(name, given, str.__str__(spec.description), spec.api)
