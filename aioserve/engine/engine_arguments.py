"""Arguments of `Engine`: its configuration, and objects. Checks them without finding or loading
any."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, get_args, get_type_hints

import msgspec

from aioserve.config import EngineConfig, ReasoningParserName, Speculation, ToolParserName
from aioserve.errors import ConfigError
from aioserve.execution.runner import ModelSource
from aioserve.isolation import blamed, shown
from aioserve.plugins import PluginRegistry, check_policy_object
from aioserve.plugins.files import DRAFTER, POLICY, names_file
from aioserve.plugins.installed import installed_plugins
from aioserve.scheduling.policy import SchedulingPolicy

__all__ = ["DEFAULT_MODEL", "DEFAULT_POLICY", "EngineArguments", "takes_arguments"]

DEFAULT_MODEL = "pyhelp"
DEFAULT_POLICY = "fcfs"
MAX_POLICY_CHARS = 1000
MAX_PLUGINS = 1000
"""Most plugins that one engine is given."""

P = ParamSpec("P")


class _EngineOptions(EngineConfig, frozen=True, kw_only=True):
    """Keyword arguments of `Engine`: fields of its configuration, and these."""

    policy: str | SchedulingPolicy = DEFAULT_POLICY
    plugins: Sequence[object] = ()
    progress: Callable[[int, int], None] | None = None
    capture_progress: Callable[[int, int], None] | None = None
    # Types that callers may give; the configuration keeps plain values.
    chat_template: str | Path | None = None
    speculation: Speculation | str | None = None


class EngineArguments(_EngineOptions, frozen=True):
    """All arguments of `Engine`.

    Raises `ConfigError` as `EngineConfig` does, and for unusable objects. Raises
    `UnknownPolicyError` for an unknown policy if only the bundled plugins could offer it.
    """

    model: str | Path | ModelSource = DEFAULT_MODEL

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.config
        policy, plugins = _checked_policy(self.policy), _checked_plugins(self.plugins)
        drafter = None if config.speculation is None else config.speculation.drafter
        _check_names(policy, drafter, plugins, (config.tool_parser, config.reasoning_parser))
        model = _checked_model(self.model)
        _check_chat_template(config.chat_template, model)
        _check_listener("progress", self.progress, model)
        _check_listener("capture_progress", self.capture_progress, model)
        for name, value in (("policy", policy), ("plugins", plugins), ("model", model)):
            msgspec.structs.force_setattr(self, name, value)

    @property
    def config(self) -> EngineConfig:
        """Configuration, without the other arguments."""
        return EngineConfig(**{name: getattr(self, name) for name in _CONFIGURED})


_CONFIGURED = EngineConfig.__struct_fields__


def takes_arguments(
    kind: Callable[P, EngineArguments],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Let type checkers, `help` and `inspect.signature` show a constructor with the arguments of
    `kind`."""

    def shown_in(constructor: Callable[..., None]) -> Callable[Concatenate[Any, P], None]:
        own = inspect.signature(constructor)
        hints = get_type_hints(kind)
        named = inspect.signature(kind).parameters
        order = ["model", *(name for name in named if name not in (*_CONFIGURED, "model"))]
        arguments = [named[name].replace(annotation=hints[name]) for name in (*order, *_CONFIGURED)]
        itself = next(iter(own.parameters.values()))
        constructor.__signature__ = own.replace(parameters=[itself, *arguments])
        return constructor

    return shown_in


def _checked_policy(policy: str | SchedulingPolicy) -> str | SchedulingPolicy:
    """Check a policy. Text becomes a plain str, even of a subclass."""
    if not isinstance(policy, str):
        check_policy_object(policy)
        return policy
    policy = str.__str__(policy)
    if len(policy) > MAX_POLICY_CHARS:
        raise ConfigError(
            f"policy must be a name of at most {MAX_POLICY_CHARS} characters, options included, "
            f"got {len(policy)}"
        )
    return policy


def _check_names(
    policy: str | SchedulingPolicy,
    drafter: str | None,
    plugins: Sequence[object],
    parsers: tuple[str, str],
) -> None:
    """Check names and options that only bundled plugins could offer.

    Other plugins and files are imported in a thread when the engine is entered, which checks them
    then. Here a file only has to exist.

    Raises `UnknownPolicyError` for an unknown policy, and `ConfigError` for an unknown drafter or
    parser and for options that these don't take.
    """
    named: dict[str, str] = {}
    if isinstance(policy, str) and policy != DEFAULT_POLICY and not names_file(policy, POLICY):
        named["policy"] = policy
    if drafter is not None and not names_file(drafter, DRAFTER):
        named["drafter"] = drafter
    names = {*get_args(ToolParserName), *get_args(ReasoningParserName)}
    if not named and names.issuperset(parsers):
        return
    if plugins or not all(plugin.bundled for plugin in installed_plugins()):
        return
    registry = PluginRegistry()
    registry.output_parsers(*parsers)
    if "policy" in named:
        registry.policy(named["policy"])
    if "drafter" in named:
        registry.drafter(named["drafter"])


def _checked_model(model: str | Path | ModelSource) -> str | Path | ModelSource:
    """Check a model. Text becomes a plain str, as for a policy."""
    if isinstance(model, str):
        return str.__str__(model)
    if not isinstance(model, Path) and not callable(getattr(model, "load", None)):
        raise ConfigError(
            f"model must be a name, a directory or an object that loads, got {shown(model)}",
            argument="model",
            value=model,
        )
    return model


def _check_listener(name: str, listener: object, model: object) -> None:
    if listener is None:
        return
    if not callable(listener) or inspect.iscoroutinefunction(listener):
        raise ConfigError(
            f"{name} must be callable and not async, got {shown(listener)}",
            argument=name,
            value=listener,
        )
    if not isinstance(model, str | Path):
        raise _without_effect(name, listener, model, "loads as it likes and reports nothing")


def _check_chat_template(file: str | None, model: object) -> None:
    """Raise `ConfigError` for a file that would not be read."""
    if file is not None and not isinstance(model, str | Path):
        raise _without_effect("chat_template", file, model, "brings a template of its own")


def _without_effect(name: str, value: object, model: object, why: str) -> ConfigError:
    return ConfigError(
        f"{name}={shown(value)} has no effect with model={shown(model)}: such an object {why}, so "
        f"leave {name} out",
        argument=name,
        value=value,
    )


def _checked_plugins(plugins: object) -> tuple[object, ...]:
    """Copy the plugins to a tuple; they may be endless."""
    with blamed("plugins can't be listed", ConfigError):
        if isinstance(plugins, str | bytes) or not isinstance(plugins, Iterable):
            raise ConfigError(f"plugins must be a sequence of plugin objects, got {shown(plugins)}")
        listed = tuple(itertools.islice(plugins, MAX_PLUGINS + 1))
    if len(listed) > MAX_PLUGINS:
        raise ConfigError(f"plugins must be at most {MAX_PLUGINS} objects, got {shown(plugins)}")
    return listed
