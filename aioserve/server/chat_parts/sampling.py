"""How to draw a completion, as bodies of several APIs say it, and limits of what they ask for.

What isn't given is as the model's makers say (`Engine.default_params`). `ServerSettings` limits how
much one request may ask for, field by field; what the engine can't do at all is the engine's to
refuse.

Some chat templates read an effort of reasoning, others have a switch; a template that has neither
can be told nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, get_args

import msgspec

from aioserve.engine.chat import MAX_MESSAGES, MAX_VALUES
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
    "AskedForm",
    "Effort",
    "Limited",
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
    """A body with limits that a server's settings say."""

    limits: ClassVar[Mapping[str, str]]
    """The setting that limits a field, by the name of the field."""


FORM_ARGUMENTS: tuple[str, ...] = ("structured_output", *StructuredOutput.__struct_fields__)
"""What the engine calls the form of an answer, or a part of it."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, as vLLM's `structured_outputs` names it: exactly one of six."""

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
        """How much white space JSON may have, where nothing else is said; None where it is."""
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


class AskedForm(msgspec.Struct, frozen=True):
    """The form of the answer, and the field of the body that asks for it."""

    field: str
    outputs: StructuredOutputs

    def check_sizes(self, settings: ServerSettings) -> None:
        """Raise `ApiError` for a schema that is too large."""
        check_schema(self.field, self.outputs.json, settings)
        check_schema(self.field, self.outputs.structural_tag, settings)


def sampling_params(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`given`, with `defaults` for what is None. A seed is taken modulo 2**64, and ids of
    `logit_bias` are text. Raises `InvalidSamplingError`."""
    fields = {name: value for name, value in given.items() if value is not None}
    if "seed" in fields:
        fields["seed"] %= 2**64
    bias = fields.get("logit_bias")
    if bias is not None and len(bias) <= MAX_BIASED_TOKENS:  # too many are refused for their number
        fields["logit_bias"] = {_token_id(key): value for key, value in bias.items()}
    return msgspec.structs.replace(defaults, **fields)


def _token_id(key: str) -> int | str:
    """`SamplingParams` refuses what is no id."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key


def check_at_most(field: str, must: str, value: int, limit: int) -> None:
    """Raise `ApiError` where `value` is above the server's `limit`, which `must` has braces for."""
    if value > limit:
        why = f"must {must.format(limit)}, which is this server's limit, got {value}"
        raise refuse(field, why, "limit_exceeded")


def check_limits(body: Limited, settings: ServerSettings) -> None:
    """Raise `ApiError` for a field above its limit. Numbers are limited by themselves, lists and
    objects by the number of their entries, of which a text in the place of a list is one."""
    for field, setting in body.limits.items():
        value, limit = getattr(body, field), getattr(settings, setting)
        if isinstance(value, int):
            check_at_most(field, "be at most {}", value, limit)
        elif value is not None:
            size = 1 if isinstance(value, str) else len(value)
            check_at_most(field, "have at most {} entries", size, limit)


MAX_ENTRIES = MAX_VALUES // 3
"""Content parts and tool calls of all messages together: each has three values at least, and the
engine reads no more than `MAX_VALUES`."""


def check_messages(messages: Sequence[object]) -> None:
    """Raise `ApiError` for more messages, or more parts and calls in them, than the engine reads,
    before any is converted."""
    check_at_most("messages", "have at most {} messages", len(messages), MAX_MESSAGES)
    must = "have at most {} content parts and tool calls together"
    check_at_most("messages", must, num_entries(messages), MAX_ENTRIES)


def num_entries(messages: Iterable[object]) -> int:
    """Entries of all lists that stand in objects, which messages are."""
    return sum(
        len(value)
        for message in messages
        if isinstance(message, dict)
        for value in message.values()
        if isinstance(value, list)
    )


MESSAGE_UNITS = 4
"""Units of work of the event loop that a message, a part or a call takes: so often `units_of`."""


def units_of(messages: Sequence[object]) -> int:
    """Units of work that it takes to look at `messages` once."""
    return MESSAGE_UNITS * (len(messages) + num_entries(messages))


def check_chars(field: str, text: str, most: int, of: str = "") -> None:
    check_at_most(field, f"have {of}at most {{}} characters", len(text), most)


def check_metadata(metadata: Mapping[str, str] | None, settings: ServerSettings) -> None:
    """Raise `ApiError` for keys or values that are too long."""
    for key, value in (metadata or {}).items():
        check_chars("metadata", key, settings.max_metadata_key_chars, "keys of ")
        check_chars(f"metadata.{key}", value, settings.max_metadata_value_chars)


def check_schema(field: str, schema: Any, settings: ServerSettings) -> None:
    """A schema as a value, or as JSON text."""
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
"""Variables by which templates are told how much a model reasons."""


def variables_of(
    call: Call,
    effort: str | None,
    field: str,
    given: Mapping[str, Any] | None = None,
    *,
    usual: str = "medium",
) -> dict[str, Any]:
    """Variables of the template that say so, with those that are `given`. Raises `ApiError` about
    the `field` of an effort that nothing would come of, or that these contradict; the `usual` one
    asks for nothing, and neither does any of a model that doesn't reason."""
    variables = template_variables(call, given) or {}
    said = _said(call, effort, field, usual)
    for name, value in said.items():
        if variables.get(name, value) != value:
            raise refuse(field, f"and chat_template_kwargs.{name} contradict")
    return {**variables, **said}


def template_variables(call: Call, given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`given`, without nulls and what a model that doesn't reason has no use for; None for none."""
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
