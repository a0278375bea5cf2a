"""What a plugin may offer: the hooks, and the frozen specs that they give.

A spec says how to make something and which version of the interface it was written for. What it
makes is chosen once, when an engine starts, and then called plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pluggy

from aioserve.kv.eviction import EvictionStrategy
from aioserve.plugins.observers import Observer
from aioserve.plugins.records import RequestInfo
from aioserve.scheduling.policy import Refusal, SchedulingPolicy

__all__ = [
    "API_VERSION",
    "GROUP",
    "EvictionSpec",
    "HookSpecs",
    "ObserverSpec",
    "PolicySpec",
    "hookimpl",
]

GROUP = "aioserve"
"""Of entry points, and the project name of pluggy's markers."""

API_VERSION = 1
"""Of the interfaces that specs are written for. It grows when something that worked no longer
does; a spec made for another version is refused."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


class PolicySpec(msgspec.Struct, frozen=True):
    """A scheduling policy that a plugin offers."""

    name: str
    factory: Callable[..., SchedulingPolicy]
    """Makes one policy object for one engine. Its keyword-only parameters can be given by name:
    `policy="round_robin:chunk_size=512"`."""
    description: str = ""
    """One line for listings."""
    api: int = 1
    """The `aioserve.plugins.API_VERSION` that it was written for. The default stays 1: a spec that
    doesn't say is of the first."""


class EvictionSpec(msgspec.Struct, frozen=True):
    """An order in which cached pages are given up, offered by a plugin."""

    name: str
    factory: Callable[..., EvictionStrategy]
    """Makes one object for one engine; options as of a policy."""
    description: str = ""
    api: int = 1


class ObserverSpec(msgspec.Struct, frozen=True):
    """An observer that a plugin attaches to every engine."""

    name: str
    factory: Callable[[], Observer]
    """Makes one object for one engine."""
    description: str = ""
    api: int = 1


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

    @hookspec(firstresult=True)
    def aioserve_admit(self, request: RequestInfo) -> Refusal | None:
        """Whether a request may enter the queue: None lets it in. Asked once for each request, on
        the event loop, when the length of its prompt is known."""
