"""Plugins for tests, good and bad."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aioserve import PolicySpec, SchedulingPolicy, hookimpl

__all__ = ["Lifo", "LifoPlugin", "broken", "entry_point", "offering"]


class Lifo(SchedulingPolicy):
    def order(self, waiting, view):
        return reversed(waiting)


class LifoPlugin:
    @hookimpl
    def aioserve_scheduling_policies(self):
        return [PolicySpec("lifo", Lifo, "last in, first out")]


def offering(policies: Any) -> Any:
    """A plugin whose hook for policies gives `policies`."""

    class Plugin:
        @hookimpl
        def aioserve_scheduling_policies(self):
            return policies

    return Plugin()


def entry_point(
    name: str, load: Callable[[], Any], distribution: str = "some-dist", version: str = "1.2"
) -> Any:
    """An installed plugin; `load` stands for the import of its module."""
    return SimpleNamespace(
        name=name, load=load, dist=SimpleNamespace(name=distribution, version=version)
    )


def broken() -> Any:
    raise ImportError("planted")
