"""Which installed plugins may be loaded: all of them, or those that AIOSERVE_PLUGINS names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

import msgspec

from aioserve.errors import ConfigError
from aioserve.plugins.specs import GROUP

__all__ = ["BUNDLED", "InstalledPlugin", "installed_plugins"]

BUNDLED = "aioserve-plugins"
"""The distribution of the bundled policies, which are always allowed."""

OFF = "off"


class InstalledPlugin(msgspec.Struct, frozen=True):
    """An entry point, not loaded yet."""

    point: EntryPoint
    distribution: str
    version: str
    allowed: bool
    """AIOSERVE_PLUGINS isn't set, or names it, or it is bundled."""
    selected: bool
    """AIOSERVE_PLUGINS names it: that it is broken is an error."""

    @property
    def name(self) -> str:
        return self.point.name


def installed_plugins() -> list[InstalledPlugin]:
    """Entry points of the group `aioserve`, in order of their names, bundled ones first.

    Raises `ConfigError` if AIOSERVE_PLUGINS names what isn't installed.
    """
    points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, not _bundled(point)))
    origins = [_origin(point) for point in points]
    wanted = _wanted()
    known = [
        {point.name, _canonical(origin[0])} for point, origin in zip(points, origins, strict=True)
    ]
    _check_known(wanted or (), known)
    found: list[InstalledPlugin] = []
    for point, (distribution, version), names in zip(points, origins, known, strict=True):
        selected = wanted is not None and any(_matches(name, names) for name in wanted)
        allowed = wanted is None or selected or _bundled(point)
        found.append(InstalledPlugin(point, distribution, version, allowed, selected))
    return found


def _wanted() -> tuple[str, ...] | None:
    """Names in AIOSERVE_PLUGINS; None if it isn't set."""
    text = os.environ.get("AIOSERVE_PLUGINS")
    if text is None:
        return None
    if text.strip().lower() == OFF:
        return ()
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _check_known(wanted: Sequence[str], known: Sequence[set[str]]) -> None:
    for name in wanted:
        if not any(_matches(name, names) for names in known):
            listed = ", ".join(sorted(set().union(*known))) or "nothing"
            raise ConfigError(
                f"AIOSERVE_PLUGINS names {name!r}, which is neither a plugin nor a distribution "
                f"with one; there are: {listed}"
            )


def _matches(name: str, names: set[str]) -> bool:
    return name in names or _canonical(name) in names


def _canonical(distribution: str) -> str:
    """Distribution names are equal whatever their case and separators."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _bundled(point: EntryPoint) -> bool:
    return _canonical(_origin(point)[0]) == BUNDLED


def _origin(point: EntryPoint) -> tuple[str, str]:
    if point.dist is None:
        return "unknown distribution", ""
    return point.dist.name, point.dist.version
