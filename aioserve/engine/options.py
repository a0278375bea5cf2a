"""Keyword options of an engine's calls."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_type_hints

from aioserve.arguments import check, number, optional, unknown_argument
from aioserve.engine.truncation import TruncationSide
from aioserve.errors import ConfigError
from aioserve.hints import HintOptions, PromptHintOptions, SearchHintOptions
from aioserve.request import SamplingParams
from aioserve.sampling_params import BeamParams
from aioserve.text.conversation import conversation_of

__all__ = [
    "MESSAGE_DEFAULTS",
    "STREAM_DEFAULTS",
    "TRUNCATION_DEFAULTS",
    "BeamSearchOptions",
    "EarlyStopping",
    "EmbedOptions",
    "EncodeOptions",
    "MessageOptions",
    "Pooling",
    "PromptOnlyOptions",
    "StreamOptions",
    "check_names",
    "checked_deadline",
    "takes",
]

EarlyStopping = bool | Literal["never"]
"""Rule by which a beam search ends before `max_tokens`; see `aioserve.engine.beam_search`."""
Pooling = Literal["last", "mean", "cls"]
"""Choice of the hidden states that make the vector of a prompt."""

Call = TypeVar("Call", bound=Callable[..., Any])

_WITH_PARAMS = ("stream", "generate", "chat")
"""Calls that have an argument `params`."""


class SharingOptions(SearchHintOptions, total=False):
    cache_salt: str | None


class BeamSearchOptions(BeamParams, SharingOptions, total=False):
    """Options of `Engine.beam_search`, as in `SamplingParams` and `Engine.stream`."""


class PromptOnlyOptions(SharingOptions, PromptHintOptions, total=False):
    """Options of calls that generate nothing, as in `Engine.stream`."""

    request_id: str | None


class MessageOptions(TypedDict, total=False):
    """Options that only go with a prompt of messages."""

    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool
    continue_final_message: bool


class TruncationOptions(TypedDict, total=False):
    """Options that cut a prompt."""

    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide


class EmbedOptions(PromptOnlyOptions, TruncationOptions, total=False):
    """Options of `Engine.embed`, as in `Engine.stream`."""


class EncodeOptions(MessageOptions, TruncationOptions, total=False):
    """Options of `Engine.encode`, as in `Engine.stream`."""


class StreamOptions(EmbedOptions, HintOptions, MessageOptions, total=False):
    """Options of `Engine.stream`."""


MESSAGE_DEFAULTS: dict[str, Any] = {
    name: default
    for name, default in (conversation_of.__kwdefaults__ or {}).items()
    if name in MessageOptions.__optional_keys__
}
"""Values of `MessageOptions` that have no effect."""
TRUNCATION_DEFAULTS: dict[str, Any] = {"truncate_prompt_tokens": None, "truncation_side": "left"}
"""Values of `TruncationOptions` that cut nothing."""
STREAM_DEFAULTS: dict[str, Any] = {**MESSAGE_DEFAULTS, **TRUNCATION_DEFAULTS, "priority": 0}
"""Defaults of `StreamOptions` that aren't None."""


def takes(options: type, defaults: Mapping[str, Any]) -> Callable[[Call], Call]:
    """Let `help` and `inspect.signature` show the `options` that a call takes as `**options`.

    Each is shown with its default from `defaults`, or None.
    """

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


def check_names(call: Callable[..., Any], given: Mapping[str, Any], options: Any) -> None:
    """Raise `TypeError`, as Python does, for a name that is not among the `options` of a call."""
    if unknown := given.keys() - options.__optional_keys__:
        name, said = min(unknown), call.__name__
        if said in _WITH_PARAMS and name in SamplingParams.__struct_fields__:
            raise TypeError(
                f"{said}() takes no {name!r}: it goes into SamplingParams({name}=...), which is "
                "the argument params"
            )
        raise unknown_argument(said, name, inspect.signature(call).parameters)


def checked_deadline(value: object) -> float | None:
    if type(value) is float and value == math.inf:
        return None  # as good as no deadline
    return check(ConfigError, "deadline_seconds", value, optional(number(0)))
