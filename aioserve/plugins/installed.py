"""Which installed plugins may be loaded: all of them, or those that AIOSERVE_PLUGINS names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import NoReturn

import msgspec

from aioserve.errors import ConfigError, PluginError
from aioserve.plugins.specs import GROUP

__all__ = ["BUNDLED", "InstalledPlugin", "installed_plugins"]

BUNDLED = "aioserve-plugins"
"""The distribution of the bundled policies, which are always allowed."""

OFF = "off"


class UnreadablePoint(msgspec.Struct, frozen=True):
    """Stands for the plugins of a distribution whose list of them can't be read."""

    name: str
    dist: Distribution
    cause: Exception

    def load(self) -> NoReturn:
        raise PluginError(f"entry_points.txt is malformed: {self.cause!r}") from self.cause


Point = EntryPoint | UnreadablePoint


class InstalledPlugin(msgspec.Struct, frozen=True):
    """An entry point, not loaded yet."""

    point: Point
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
    points = sorted(_points(), key=lambda point: (point.name, not _bundled(point)))
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


def _points() -> list[Point]:
    try:
        return list(entry_points(group=GROUP))
    except Exception:  # of one distribution, which stands for all: ask each for itself
        return list(_points_one_by_one())


def _points_one_by_one() -> Iterator[Point]:
    seen: set[str] = set()
    for dist in distributions():
        name, _ = _origin_of(dist)
        if _canonical(name) in seen:  # hidden by one that is earlier on the path
            continue
        seen.add(_canonical(name))
        try:
            yield from dist.entry_points.select(group=GROUP)
        except Exception as error:
            if _may_have_plugins(dist):
                yield UnreadablePoint(name, dist, error)


def _may_have_plugins(dist: Distribution) -> bool:
    try:
        return f"[{GROUP}]" in (dist.read_text("entry_points.txt") or "")
    except Exception:
        return True


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


def _bundled(point: Point) -> bool:
    return _canonical(_origin(point)[0]) == BUNDLED


def _origin(point: Point) -> tuple[str, str]:
    return ("unknown distribution", "") if point.dist is None else _origin_of(point.dist)


def _origin_of(dist: Distribution) -> tuple[str, str]:
    """Name and version. What was installed halfway has no metadata: it is named by its folder."""
    folder = getattr(getattr(dist, "_path", None), "name", "unknown distribution")
    return _said(dist, "name") or folder, _said(dist, "version")


def _said(dist: Distribution, what: str) -> str:
    try:
        return getattr(dist, what) or ""
    except Exception:
        return ""
