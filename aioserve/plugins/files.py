"""Make a policy or a drafter from a file that is no plugin: `path/to/file.py:ClassName`, followed
by options."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

from aioserve.arguments import shown
from aioserve.drafting.drafter import Drafter
from aioserve.errors import ConfigError, PluginError
from aioserve.isolation import blamed
from aioserve.plugins.given_objects import check_drafter_object, check_policy_object
from aioserve.plugins.options import made, split_name
from aioserve.plugins.registry import PluginRegistry
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = [
    "DRAFTER",
    "POLICY",
    "FileClass",
    "FileKind",
    "class_of_file",
    "drafter_of_file",
    "named_policy",
    "names_file",
    "policy_of_file",
]

SEPARATOR = ".py:"


class FileKind(NamedTuple):
    """Kind of classes that files may have."""

    word: str
    """Name of the kind in errors."""
    base: type
    check: Callable[[object], Any]
    """Returns an object of this kind if it can be used, and raises `ConfigError` for others."""


class FileClass(NamedTuple):
    """Class in a file, with options."""

    kind: FileKind
    make: Callable[[], Any]


POLICY = FileKind("policy", SchedulingPolicy, check_policy_object)
DRAFTER = FileKind("drafter", Drafter, check_drafter_object)


def named_policy(registry: PluginRegistry, text: str) -> SchedulingPolicy:
    """Make a policy object from an installed name, like `PluginRegistry.policy`, or from a class in
    a file (`class_of_file`)."""
    make = policy_of_file(text)
    return registry.policy(text) if make is None else make()


def policy_of_file(text: str) -> Callable[[], SchedulingPolicy] | None:
    """Factory of policy objects that `class_of_file` finds."""
    found = class_of_file(text, POLICY)
    return None if found is None else found.make


def drafter_of_file(text: str) -> Callable[[], Drafter] | None:
    """Factory of drafters that `class_of_file` finds."""
    found = class_of_file(text, DRAFTER)
    return None if found is None else found.make


def names_file(text: str, *kinds: FileKind) -> bool:
    """True if a text names a class in an existing file. Runs none of it. Raises `ConfigError` for a
    file that doesn't exist, and for one named without a class."""
    if SEPARATOR in text:
        path = Path(f"{text.partition(SEPARATOR)[0]}.py")
        if not _is_file(path):
            raise ConfigError(f"{_what(text, kinds)}: there is no file {shown(str(path))}")
        return True
    if text.endswith(".py") and _is_file(Path(text)):
        named = shown(f"{text}:CLASS")
        raise ConfigError(f"{_what(text, kinds)}: name a class of the file, as {named}")
    return False


def class_of_file(text: str, *kinds: FileKind) -> FileClass | None:
    """Find the class for `FILE.py:CLASS` or `FILE.py:CLASS:OPTION=VALUE,...`, with the first of
    `kinds` that fits. None for a text that names no file.

    The file is run here, like a module. Call it where no event loop runs, since the file may run
    one. Raises `ConfigError` for a file that doesn't exist or has no such class, `PluginError` for
    one that can't be run. Making the object raises the same for bad options, and for results of
    another kind.
    """
    if not names_file(text, *kinds):
        return None
    file, _, rest = text.partition(SEPARATOR)
    name, options = split_name(rest)
    what = _what(text, kinds)
    in_file = _loaded(Path(f"{file}.py"), what)
    found = in_file.get(name)
    for kind in kinds:
        if isinstance(found, type) and issubclass(found, kind.base):
            return FileClass(kind, partial(_made, kind, found, name, options, text))
    is_none = f"is no {' and no '.join(kind.base.__name__ for kind in kinds)}"
    why = is_none if found is not None else "isn't in the file"
    raise ConfigError(f"{what}: {shown(name)} {why}{_classes_of(in_file, kinds)}")


def _made(kind: FileKind, cls: type, name: str, options: Mapping[str, str], text: str) -> Any:
    with blamed(f"{kind.word} {shown(text)} can't be made", ConfigError, PluginError):
        return kind.check(made(cls, options, f"{kind.word} {name!r}"))


def _what(text: str, kinds: tuple[FileKind, ...]) -> str:
    return f"{' or '.join(kind.word for kind in kinds)} {shown(text)}"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _classes_of(module: dict[str, object], kinds: tuple[FileKind, ...]) -> str:
    """Text with the names of the classes of these kinds that a module defines itself."""
    names = [
        name
        for name, value in module.items()
        if isinstance(value, type)
        and issubclass(value, tuple(kind.base for kind in kinds))
        and value.__module__ == module["__name__"]
    ]
    return f"; there are: {', '.join(names)}" if names else ""


class _AsItIs(SourceFileLoader):
    """Compiles a file each time. Python's own cache compares only seconds and size, and may miss an
    edit."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _loaded(path: Path, what: str) -> dict[str, object]:
    """Run a module and return its contents."""
    name = f"aioserve_file_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_AsItIs(name, str(path)))
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what}: {path} can't be read as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look for it there
    try:
        with blamed(f"{what} can't be loaded"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return vars(module)
