"""Environments of installed packages: the contents of an install, found without a network.

An environment is a directory of links to the running Python's package files. It holds the packages
of a list of requirements, with all that these require. Its base is what `pip install .` brings, as
a virtual environment. What a list adds to it is a directory beside, made once for each list.
"""

from __future__ import annotations

import csv
import os
import sysconfig
import tomllib
import venv
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tests.docs.pages import ROOT

__all__ = ["Environments", "link_files"]

OURS = "aioserve"
Files = dict[str, list[tuple[str, ...]]]
"""Parts of the paths of each package's files."""


class Environments:
    """Makes environments below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sites: dict[tuple[object, ...], Path] = {}
        self._installed = {canonicalize_name(one.metadata["Name"]): one for one in _installed()}

    @cached_property
    def python(self) -> Path:
        """The interpreter of the base."""
        place = self._folder / "base"
        venv.create(place, symlinks=True)
        paths = sysconfig.get_paths(vars={"base": str(place), "platbase": str(place)})
        self._link(self._base, Path(paths["purelib"]))
        return place / "bin" / "python"

    def sites(self, requirements: Sequence[str], here: Path) -> tuple[list[Path], set[str]]:
        """Directories to add to the base for requirements, and names that aren't installed here.

        A requirement is one of PyPI's, `.` or `.[extra]` for this repository, or the directory of a
        project, below `here` or the repository.
        """
        wanted, projects = [], []
        for text in requirements:
            path, bracket, extras = text.partition("[")
            if path == ".":
                wanted.append(Requirement(f"{OURS}{bracket}{extras}"))
            elif found := [at for at in (here / path, ROOT / path) if _is_project(at)]:
                projects.append(found[0])
                wanted += list(_project_requires(found[0], extras.rstrip("]")))
            else:
                wanted.append(Requirement(text))
        names, missing = self._closure(wanted)
        added = frozenset(names - self._base)
        places = [self._made((added,), lambda place: self._link(added, place))] if added else []
        places += [self._made((at,), lambda place, at=at: _install(at, place)) for at in projects]
        return places, missing

    @cached_property
    def _base(self) -> frozenset[str]:
        return frozenset(self._closure([Requirement(OURS)])[0])

    @cached_property
    def _files(self) -> Files:
        found = {}
        for name, distribution in self._installed.items():
            rows = csv.reader((distribution.read_text("RECORD") or "").splitlines())
            found[name] = [tuple(row[0].split("/")) for row in rows]
        return found

    def _made(self, key: tuple[object, ...], make: Any) -> Path:
        if key not in self._sites:
            place = self._folder / f"site-{len(self._sites)}"
            place.mkdir()
            make(place)
            self._sites[key] = place
        return self._sites[key]

    def _closure(self, wanted: Iterable[Requirement]) -> tuple[set[str], set[str]]:
        """Names of packages that come with requirements, and of those that aren't here."""
        names, missing, seen = set(), set(), set()
        to_see = [(one.name, frozenset(one.extras)) for one in wanted if _applies(one, ())]
        while to_see:
            one = to_see.pop()
            if one in seen:
                continue
            seen.add(one)
            name, extras = canonicalize_name(one[0]), one[1]
            if name not in self._installed:
                missing.add(name)
                continue
            names.add(name)
            for needed in self._requires(name, extras):
                to_see.append((needed.name, frozenset(needed.extras)))
        return names, missing

    def _requires(self, name: NormalizedName, extras: frozenset[str]) -> Iterator[Requirement]:
        if name == OURS:  # as the checkout has it now
            for extra in extras or ("",):
                yield from _project_requires(ROOT, extra)
            return
        for line in self._installed[name].requires or ():
            needed = Requirement(line)
            if _applies(needed, extras):
                yield needed

    def _link(self, names: Iterable[str], place: Path) -> None:
        place.mkdir(parents=True, exist_ok=True)
        wanted = frozenset(names)
        for folder in _site_packages():
            link_files(self._files, wanted, folder, place)


def _installed() -> Iterator[Distribution]:
    return iter(distributions(path=[str(folder) for folder in _site_packages()]))


def _site_packages() -> list[Path]:
    return sorted({Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib")})


def _applies(needed: Requirement, extras: Iterable[str]) -> bool:
    marker = needed.marker
    return marker is None or any(marker.evaluate({"extra": one}) for one in ("", *extras))


def link_files(files: Files, wanted: frozenset[str], source: Path, place: Path) -> None:
    """Links to what packages have below `source`. A directory of several, of which some aren't
    wanted, becomes one of links."""
    below: dict[str, Files] = {}
    for name, paths in files.items():
        for first, *rest in paths:
            if first not in ("..", "__pycache__"):
                below.setdefault(first, {}).setdefault(name, []).append(tuple(rest))
    for entry, owned in below.items():
        owners = owned.keys()
        link = place / entry
        if not owners & wanted or link.exists() or not (source / entry).exists():
            continue
        if owners <= wanted or (source / entry).is_file():
            link.symlink_to(source / entry)
        else:
            link.mkdir()
            link_files(owned, wanted, source / entry, link)


def _is_project(path: Path) -> bool:
    return (path / "pyproject.toml").is_file()


def _project(path: Path) -> dict[str, Any]:
    return tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8"))


def _project_requires(path: Path, extra: str) -> Iterator[Requirement]:
    project = _project(path)["project"]
    lines = [*project["dependencies"]]
    for name in filter(None, extra.split(",")):
        lines += project["optional-dependencies"][name]
    yield from (one for one in map(Requirement, lines) if _applies(one, ()))


def _install(path: Path, place: Path) -> None:
    """Writes what makes a project of setuptools importable, and its entry points known."""
    found = _project(path)
    project, tool = found["project"], found["tool"]["setuptools"]
    named = tool["packages"]
    where = named["find"]["where"] if isinstance(named, dict) else ["."]
    lines = [os.fspath((path / one).resolve()) for one in where]
    (place / f"{path.name}.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    info = place / f"{path.name}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    text = ""
    for group, points in project["entry-points"].items():
        text += f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
