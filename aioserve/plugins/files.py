"""Makes a policy of a file that is no plugin: `path/to/file.py:ClassName`, options behind it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from aioserve.arguments import shown
from aioserve.errors import ConfigError, PluginError
from aioserve.isolation import blamed
from aioserve.plugins.options import made, split_name
from aioserve.plugins.registry import PluginRegistry, check_policy_object
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["named_policy", "names_policy_file", "policy_of_file"]

SEPARATOR = ".py:"


def named_policy(registry: PluginRegistry, text: str) -> SchedulingPolicy:
    """Make a policy object of a name that is installed, as `PluginRegistry.policy` makes it, or of
    a class of a file, see `policy_of_file`."""
    make = policy_of_file(text)
    return registry.policy(text) if make is None else make()


def names_policy_file(text: str) -> bool:
    """True for a text that names a policy of a file, which is there. Nothing of it is run. Raises
    `ConfigError` for one that isn't there, and for a file without a class."""
    if SEPARATOR in text:
        path = Path(f"{text.partition(SEPARATOR)[0]}.py")
        if not _is_file(path):
            raise ConfigError(f"policy {shown(text)}: there is no file {shown(str(path))}")
        return True
    if text.endswith(".py") and _is_file(Path(text)):
        named = shown(f"{text}:CLASS")
        raise ConfigError(f"policy {shown(text)}: name a class of the file, as {named}")
    return False


def policy_of_file(text: str) -> Callable[[], SchedulingPolicy] | None:
    """Factory of policy objects for `FILE.py:CLASS` or `FILE.py:CLASS:OPTION=VALUE,...`; None for a
    text that names no file.

    The file is run here, as Python runs a module. Raises `ConfigError` for one that isn't there or
    has no such policy, `PluginError` for one that can't be run; what is made raises the same for
    options and for a class that makes no policy.
    """
    if not names_policy_file(text):
        return None
    file, _, rest = text.partition(SEPARATOR)
    name, options = split_name(rest)
    path = Path(f"{file}.py")
    in_file = _loaded(path, text)
    found = in_file.get(name)
    if not isinstance(found, type) or not issubclass(found, SchedulingPolicy):
        what = "is no SchedulingPolicy" if found is not None else "isn't in the file"
        raise ConfigError(f"policy {shown(text)}: {shown(name)} {what}{_policies_of(in_file)}")

    def make() -> SchedulingPolicy:
        with blamed(f"policy {shown(text)} can't be made", ConfigError, PluginError):
            return check_policy_object(made(found, options, f"policy {name!r}"))

    return make


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _policies_of(module: dict[str, object]) -> str:
    """Names of the policies that a module defines itself."""
    names = [
        name
        for name, value in module.items()
        if isinstance(value, type)
        and issubclass(value, SchedulingPolicy)
        and value.__module__ == module["__name__"]
    ]
    return f"; there are: {', '.join(names)}" if names else ""


def _loaded(path: Path, text: str) -> dict[str, object]:
    """Run the module; return what it has then."""
    name = f"aioserve_policy_file_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"policy {shown(text)}: {path} can't be read as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickles look for it
    try:
        with blamed(f"policy {shown(text)} can't be loaded"):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return vars(module)
