"""Arguments of `Engine` and of its calls: what they take by name, and checks of those that are
objects of the caller's."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, get_type_hints

from aioserve.arguments import check, number, optional, unknown_argument
from aioserve.engine.truncation import TruncationSide
from aioserve.errors import ConfigError
from aioserve.execution.runner import ModelSource
from aioserve.hints import HintOptions, PromptHintOptions, SearchHintOptions
from aioserve.isolation import blamed, shown
from aioserve.plugins import PluginRegistry, check_policy_object
from aioserve.plugins.installed import installed_plugins
from aioserve.request import SamplingParams
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.text.conversation import conversation_of

__all__ = [
    "DEFAULT_POLICY",
    "MESSAGE_DEFAULTS",
    "STREAM_DEFAULTS",
    "TRUNCATION_DEFAULTS",
    "BeamSearchOptions",
    "EmbedOptions",
    "EncodeOptions",
    "MessageOptions",
    "PromptOnlyOptions",
    "StreamOptions",
    "check_listener",
    "check_names",
    "check_policy_name",
    "checked_deadline",
    "checked_model",
    "checked_plugins",
    "checked_policy",
    "takes",
]

Call = TypeVar("Call", bound=Callable[..., Any])

DEFAULT_POLICY = "fcfs"
MAX_POLICY_CHARS = 1000
MAX_PLUGINS = 1000
"""Given to one engine."""


class BeamSearchOptions(SearchHintOptions, total=False):
    """What `Engine.beam_search` takes by name, beside the search: as `Engine.stream` does."""

    cache_salt: str | None


class PromptOnlyOptions(BeamSearchOptions, PromptHintOptions, total=False):
    """What calls that generate nothing take by name: as `Engine.stream` does."""

    request_id: str | None


class MessageOptions(TypedDict, total=False):
    """What goes with a prompt of messages alone."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


class TruncationOptions(TypedDict, total=False):
    """How a prompt is cut."""

    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide


class EmbedOptions(PromptOnlyOptions, TruncationOptions, total=False):
    """What `Engine.embed` takes by name: as `Engine.stream` does."""


class EncodeOptions(MessageOptions, TruncationOptions, total=False):
    """What `Engine.encode` takes by name: as `Engine.stream` does."""


class StreamOptions(EmbedOptions, HintOptions, MessageOptions, total=False):
    """What `Engine.stream` takes by name."""


MESSAGE_DEFAULTS: dict[str, Any] = {
    name: default
    for name, default in (conversation_of.__kwdefaults__ or {}).items()
    if name in MessageOptions.__optional_keys__
}
"""Values of `MessageOptions` that are as good as none."""
TRUNCATION_DEFAULTS: dict[str, Any] = {"truncate_prompt_tokens": None, "truncation_side": "left"}
"""Values of `TruncationOptions` by which nothing is cut."""
STREAM_DEFAULTS: dict[str, Any] = {**MESSAGE_DEFAULTS, **TRUNCATION_DEFAULTS, "priority": 0}
"""Defaults of `StreamOptions` that aren't None."""


def takes(options: type, defaults: Mapping[str, Any]) -> Callable[[Call], Call]:
    """Let `help` and `inspect.signature` show each of the `options` that a call takes as
    `**options`, with its default: None where `defaults` has none."""

    def shown_in(call: Call) -> Call:
        own = inspect.signature(call)
        *parameters, _ = own.parameters.values()
        for name, hint in get_type_hints(options).items():
            default = defaults.get(name)
            keyword_only = inspect.Parameter.KEYWORD_ONLY
            parameters.append(
                inspect.Parameter(name, keyword_only, default=default, annotation=hint)
            )
        call.__signature__ = own.replace(parameters=parameters)
        return call

    return shown_in


def check_names(call: str, given: Mapping[str, Any], options: Any, *own: str) -> None:
    """Raise `TypeError`, as Python does, for a name that is none of the `options` of a call.
    `own` are further names that may have been meant."""
    if unknown := given.keys() - options.__optional_keys__:
        name = min(unknown)
        if call != "Engine" and name in SamplingParams.__struct_fields__:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}: it goes into "
                f"SamplingParams({name}=...), which is the argument params"
            )
        raise unknown_argument(call, name, (*options.__optional_keys__, *own))


def checked_policy(policy: str | SchedulingPolicy) -> str | SchedulingPolicy:
    """Text becomes plain, whatever a subclass makes of it."""
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


def check_policy_name(policy: str | SchedulingPolicy, plugins: Sequence[object]) -> None:
    """Raise `UnknownPolicyError` for a name that no plugin offers, and `ConfigError` for options
    that its policy doesn't take, where no plugin but the bundled ones could offer it: others are
    imported when the engine is entered, in a thread, and that raises it then."""
    if not isinstance(policy, str) or policy == DEFAULT_POLICY or plugins:
        return
    if all(plugin.bundled for plugin in installed_plugins()):
        PluginRegistry().policy(policy)


def checked_model(model: str | Path | ModelSource) -> str | Path | ModelSource:
    """Text becomes plain, as that of a policy."""
    if isinstance(model, str):
        return str.__str__(model)
    if not isinstance(model, Path) and not callable(getattr(model, "load", None)):
        raise ConfigError(
            f"model must be a name, a directory or an object that loads, got {shown(model)}",
            argument="model",
            value=model,
        )
    return model


def check_listener(name: str, listener: object, model: object) -> None:
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


def check_chat_template(file: str | None, model: object) -> None:
    """Raise `ConfigError` for a file that isn't read."""
    if file is not None and not isinstance(model, str | Path):
        raise _without_effect("chat_template", file, model, "brings a template of its own")


def _without_effect(name: str, value: object, model: object, why: str) -> ConfigError:
    return ConfigError(
        f"{name}={shown(value)} has no effect with model={shown(model)}: such an object {why}, so "
        f"leave {name} out",
        argument=name,
        value=value,
    )


def checked_plugins(plugins: object) -> tuple[object, ...]:
    """A tuple of them, not endless."""
    with blamed("plugins can't be listed", ConfigError):
        if isinstance(plugins, str | bytes) or not isinstance(plugins, Iterable):
            raise ConfigError(f"plugins must be a sequence of plugin objects, got {shown(plugins)}")
        listed = tuple(itertools.islice(plugins, MAX_PLUGINS + 1))
    if len(listed) > MAX_PLUGINS:
        raise ConfigError(f"plugins must be at most {MAX_PLUGINS} objects, got {shown(plugins)}")
    return listed


def checked_deadline(value: object) -> float | None:
    if type(value) is float and value == math.inf:
        return None  # as good as none
    return check(ConfigError, "deadline_seconds", value, optional(number(0)))
