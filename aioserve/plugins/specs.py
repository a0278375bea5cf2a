"""What a plugin may offer: the hooks, and the frozen specs that they give.

A spec says how to make something and which version of the interface it was written for. What it
makes is chosen once, when an engine starts, and then called plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pluggy

from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["API_VERSION", "GROUP", "HookSpecs", "PolicySpec", "hookimpl"]

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


class HookSpecs:
    """The hooks that a plugin may implement."""

    @hookspec
    def aioserve_scheduling_policies(self) -> Sequence[PolicySpec]:  # pyright: ignore[reportReturnType]
        """Scheduling policies that the plugin offers."""
