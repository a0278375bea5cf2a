"""Installed plugins that may be loaded: all, or those that AIOSERVE_PLUGINS names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import NoReturn

import msgspec

from aioserve.errors import ConfigError, PluginError
from aioserve.isolation import shown
from aioserve.plugins.specs import GROUP

__all__ = ["BUNDLED", "InstalledPlugin", "Origin", "installed_plugins"]

BUNDLED = "aioserve"
"""Distribution with the bundled policies, which are always allowed."""

OFF = "off"


class UnreadablePoint(msgspec.Struct, frozen=True):
    """Entry point that stands for a distribution whose list of entry points is unreadable."""

    name: str
    dist: Distribution
    cause: Exception

    def load(self) -> NoReturn:
        raise PluginError(f"entry_points.txt is malformed: {self.cause!r}") from self.cause


Point = EntryPoint | UnreadablePoint


class Origin(msgspec.Struct, frozen=True):
    """Origin of a plugin."""

    plugin: str
    """Name of the entry point, or of the given object."""
    distribution: str
    version: str
    selected: bool
    """True if it was given, or AIOSERVE_PLUGINS names it. It is then an error if it is broken."""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()


class InstalledPlugin(msgspec.Struct, frozen=True):
    """An entry point, not loaded yet."""

    point: Point
    origin: Origin
    bundled: bool
    allowed: bool
    """True if it is bundled, or AIOSERVE_PLUGINS is unset or names it."""

    @property
    def name(self) -> str:
        return self.point.name


def installed_plugins() -> list[InstalledPlugin]:
    """Entry points of the group `aioserve`, sorted by name, bundled ones first.

    Raises `ConfigError` if AIOSERVE_PLUGINS names something that isn't installed, or has only
    commas.
    """
    wanted = _wanted()
    found: list[InstalledPlugin] = []
    known: set[str] = set()
    for point in _points():
        distribution, version = (
            ("unknown distribution", "") if point.dist is None else _origin_of(point.dist)
        )
        names = {point.name, _canonical(distribution)}
        known |= names
        selected = any(_matches(name, names) for name in wanted or ())
        bundled = _canonical(distribution) == BUNDLED
        origin = Origin(point.name, distribution, version, selected)
        found.append(InstalledPlugin(point, origin, bundled, wanted is None or selected or bundled))
    for name in wanted or ():
        if not _matches(name, known):
            raise ConfigError(
                f"AIOSERVE_PLUGINS names {shown(name)}, which is neither a plugin nor a "
                f"distribution with one; there are: {', '.join(sorted(known)) or 'nothing'}"
            )
    return sorted(found, key=lambda plugin: (plugin.name, not plugin.bundled))


def _points() -> list[Point]:
    try:
        return list(entry_points(group=GROUP))
    except Exception:  # a single distribution breaks the whole listing: ask each
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
    """Names in AIOSERVE_PLUGINS; None if it isn't set. Raises `ConfigError` for only commas."""
    text = os.environ.get("AIOSERVE_PLUGINS")
    if text is None:
        return None
    if text.strip().lower() == OFF:
        return ()
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if text.strip() and not names:
        raise ConfigError(
            f"AIOSERVE_PLUGINS must be names separated by commas, or {OFF}; got {shown(text)}"
        )
    return names


def _matches(name: str, names: set[str]) -> bool:
    return name in names or _canonical(name) in names


def _canonical(distribution: str) -> str:
    """Canonical name of a distribution: case and separators make no difference."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _origin_of(dist: Distribution) -> tuple[str, str]:
    """Name and version of a distribution. A half-installed one has no metadata, and is named by its
    folder."""
    folder = getattr(getattr(dist, "_path", None), "name", "unknown distribution")
    return _said(dist, "name") or folder, _said(dist, "version")


def _said(dist: Distribution, what: str) -> str:
    try:
        return getattr(dist, what) or ""
    except Exception:
        return ""
