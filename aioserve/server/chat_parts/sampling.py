"""Sampling parameters from the bodies of several APIs, and limits of requests.

Missing parameters have the defaults of the model's makers (`Engine.default_params`). The fields of
one request are limited by `ServerSettings`, and the engine refuses what it doesn't support.

Some chat templates read a reasoning effort, and others have a switch. Some have neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, get_args

import msgspec

from aioserve.engine.chat_stream import MAX_MESSAGES, MAX_VALUES
from aioserve.engine.interface import TemplateName
from aioserve.request import SamplingParams
from aioserve.sampling_params import MAX_BIASED_TOKENS
from aioserve.server.app_state import Call
from aioserve.server.errors import refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.settings import ServerSettings
from aioserve.structured_output import StructuredOutput

__all__ = [
    "FORM_ARGUMENTS",
    "Effort",
    "Limited",
    "RequestedForm",
    "StructuredOutputs",
    "check_at_most",
    "check_chars",
    "check_limits",
    "check_messages",
    "check_metadata",
    "check_schema",
    "num_entries",
    "sampling_params",
    "template_variables",
    "units_of",
    "variables_of",
]


class Limited(Protocol):
    """Body with limits from a server's settings."""

    limits: ClassVar[Mapping[str, str]]
    """Setting that limits a field, by the name of the field."""


FORM_ARGUMENTS: tuple[str, ...] = ("structured_output", *StructuredOutput.__struct_fields__)
"""Arguments of the engine for the form of an answer, or for a part of it."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of the answer, as in vLLM's `structured_outputs`: exactly one of six."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    max_whitespace: int | None = None

    @property
    def spacing(self) -> Mapping[str, Any] | None:
        """Options for white space in JSON, if there are some and no form; else None."""
        forms = (
            *(self.json, self.json_object or None, self.regex, self.choice),
            *(self.grammar, self.structural_tag),
        )
        spaces = {
            "disable_any_whitespace": bool(self.disable_any_whitespace),
            "max_whitespace": self.max_whitespace,
        }
        is_said = self.disable_any_whitespace or self.max_whitespace is not None
        return spaces if is_said and not any(form is not None for form in forms) else None

    @property
    def form(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
            disable_any_whitespace=bool(self.disable_any_whitespace),
            max_whitespace=self.max_whitespace,
        )


class RequestedForm(msgspec.Struct, frozen=True):
    """Form of the answer, and the field of the body that asks for it."""

    field: str
    outputs: StructuredOutputs

    def check_sizes(self, settings: ServerSettings) -> None:
        """Raise `ApiError` for a schema that is too large."""
        check_schema(self.field, self.outputs.json, settings)
        check_schema(self.field, self.outputs.structural_tag, settings)


def sampling_params(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return `given`, with `defaults` in place of None. A seed is taken modulo 2**64, and ids of
    `logit_bias` are text. Raises `InvalidSamplingError`."""
    fields = {name: value for name, value in given.items() if value is not None}
    if "seed" in fields:
        fields["seed"] %= 2**64
    bias = fields.get("logit_bias")
    if bias is not None and len(bias) <= MAX_BIASED_TOKENS:  # too many are refused for their number
        fields["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    return msgspec.structs.replace(defaults, **fields)


def _token_id(key: str) -> int | str:
    """Return the id as an int. Any other text stays text, which `SamplingParams` refuses."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key


def check_at_most(field: str, must: str, value: int, limit: int) -> None:
    """Raise `ApiError` if `value` is above the server's `limit`. The message has `must`, with the
    limit in its braces."""
    if value > limit:
        why = f"must {must.format(limit)}, which is this server's limit, got {value}"
        raise refuse(field, why, "limit_exceeded")


def check_limits(body: Limited, settings: ServerSettings) -> None:
    """Raise `ApiError` for a field above its limit. Numbers are limited by their value, and lists
    and objects by their entries. A text in place of a list is one entry."""
    for field, setting in body.limits.items():
        value, limit = getattr(body, field), getattr(settings, setting)
        if isinstance(value, int):
            check_at_most(field, "be at most {}", value, limit)
        elif value is not None:
            size = 1 if isinstance(value, str) else len(value)
            check_at_most(field, "have at most {} entries", size, limit)


MAX_ENTRIES = MAX_VALUES // 3
"""Most content parts and tool calls of all messages together. Each has at least three values, and
the engine reads up to `MAX_VALUES`."""


def check_messages(messages: Sequence[object]) -> None:
    """Raise `ApiError` for more messages, parts or calls than the engine reads, before any is
    converted."""
    check_at_most("messages", "have at most {} messages", len(messages), MAX_MESSAGES)
    must = "have at most {} content parts and tool calls together"
    check_at_most("messages", must, num_entries(messages), MAX_ENTRIES)


def num_entries(messages: Iterable[object]) -> int:
    """Number of entries of all lists in the fields of `messages`."""
    return sum(
        len(value)
        for message in messages
        if isinstance(message, dict)
        for value in message.values()
        if isinstance(value, list)
    )


MESSAGE_UNITS = 4
"""Units of work to look once at a message, a part or a call, as `units_of` counts them."""


def units_of(messages: Sequence[object]) -> int:
    """Units of work to look at `messages` once."""
    return MESSAGE_UNITS * (len(messages) + num_entries(messages))


def check_chars(field: str, text: str, most: int, of: str = "") -> None:
    check_at_most(field, f"have {of}at most {{}} characters", len(text), most)


def check_metadata(metadata: Mapping[str, str] | None, settings: ServerSettings) -> None:
    """Raise `ApiError` for keys or values that are too long."""
    for key, value in (metadata or {}).items():
        check_chars("metadata", key, settings.max_metadata_key_chars, "keys of ")
        check_chars(f"metadata.{key}", value, settings.max_metadata_value_chars)


def check_schema(field: str, schema: Any, settings: ServerSettings) -> None:
    """Raise `ApiError` for a schema that is too large. It is a value, or JSON text."""
    if schema is None:
        return
    size = len(schema.encode()) if isinstance(schema, str) else len(msgspec.json.encode(schema))
    limit = settings.max_schema_bytes
    check_at_most(field, "have a schema of at most {} bytes", size, limit)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


_OF_REASONING: tuple[TemplateName, ...] = (
    "enable_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
)
"""Variables that tell a template how much a model reasons."""


def variables_of(
    call: Call,
    effort: str | None,
    field: str,
    given: Mapping[str, Any] | None = None,
    *,
    usual: str = "medium",
) -> dict[str, Any]:
    """Return the template's variables for an effort, with those that are `given`.

    Raises `ApiError` about `field` if the template can't follow the effort, or if other variables
    contradict it. The `usual` effort asks for nothing. Neither does any effort of a model that
    doesn't reason.
    """
    variables = template_variables(call, given) or {}
    said = _said(call, effort, field, usual)
    for name, value in said.items():
        if variables.get(name, value) != value:
            raise refuse(field, f"and chat_template_kwargs.{name} contradict")
    return {**variables, **said}


def template_variables(call: Call, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return `given` without nulls, and without variables of reasoning if the model doesn't reason.
    None if nothing is left."""
    if given is None:
        return None
    facts = call.facts
    kept = {name: value for name, value in given.items() if value is not None}
    for name in _OF_REASONING:
        if name in kept and not facts.reads(name) and not facts.reasons:
            let_through(call.call_log, f"chat_template_kwargs.{name}")
            del kept[name]
    return kept or None


def _said(call: Call, effort: str | None, field: str, usual: str) -> dict[str, Any]:
    if effort is None:
        return {}
    facts, is_known = call.facts, effort in get_args(Effort)
    if facts.reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if facts.reads("enable_thinking") and is_known:
        return {"enable_thinking": effort != "none"}
    if is_known and (effort == usual or not facts.reasons):
        let_through(call.call_log, field)
        return {}
    why = "isn't supported: the model's chat template reads neither reasoning_effort nor "
    raise refuse(field, why + "enable_thinking", "unsupported_parameter")
