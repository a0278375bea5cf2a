"""Hooks by which a plugin offers things, and the frozen specs that they give.

A spec says how to make something and which version of the interface it was written for. What it
makes is chosen once, when an engine starts, and then called plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import msgspec
import pluggy

from aioserve.kv.eviction import EvictionStrategy
from aioserve.plugins.observers import Observer
from aioserve.plugins.records import RequestInfo
from aioserve.sampling.processors import LogitsProcessor
from aioserve.scheduling.policy import Refusal, SchedulingPolicy

__all__ = [
    "API_VERSION",
    "GROUP",
    "EvictionSpec",
    "HookSpecs",
    "LogitsProcessorSpec",
    "ObserverSpec",
    "PolicySpec",
    "Spec",
    "hookimpl",
]

T = TypeVar("T")

GROUP = "aioserve"
"""Group of entry points, and project name of pluggy's markers."""

API_VERSION = 1
"""Version of the interfaces that specs are written for. It grows when something that worked no
longer does; a spec made for another version is refused."""

hookspec: pluggy.HookspecMarker = pluggy.HookspecMarker(GROUP)
hookimpl: pluggy.HookimplMarker = pluggy.HookimplMarker(GROUP)


class Spec(msgspec.Struct, Generic[T], frozen=True):
    """Something that a plugin offers by name."""

    kind: ClassVar[str]
    """Kind of what is offered, for messages."""
    makes: ClassVar[type]

    name: str
    factory: Callable[..., T]
    """Factory of one object for one engine. Keyword-only parameters of what is chosen by name can
    be given with the name: `policy="round_robin:chunk_size=512"`."""
    description: str = ""
    """One line for listings."""
    api: int = 1
    """`aioserve.plugins.API_VERSION` that it was written for. The default stays 1: a spec that
    doesn't say is of the first."""


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

    @hookspec(firstresult=True)
    def aioserve_admit(self, request: RequestInfo) -> Refusal | None:
        """Whether a request may enter the queue: None lets it in. Asked once for each request, on
        the event loop, when the length of its prompt is known."""
