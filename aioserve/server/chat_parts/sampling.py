"""The fields of a body that say how to draw a completion, which several APIs share, with limits.

Names are those of the OpenAI API, and of vLLM where that API has none. What isn't given is as the
model's makers say (`Engine.default_params`). `ServerSettings` limits how much one request may ask
for, field by field; what the engine can't do at all is the engine's to refuse.

Some chat templates read an effort of reasoning, others have a switch; a template that has neither
can be told nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import msgspec

from aioserve.engine.engine import Engine
from aioserve.request import MAX_BIASED_TOKENS, SamplingParams
from aioserve.server.errors import ApiError
from aioserve.server.settings import ServerSettings
from aioserve.structured_output import StructuredOutput

__all__ = [
    "FORM_ARGUMENTS",
    "CallFields",
    "Effort",
    "SamplingFields",
    "StructuredOutputs",
    "check_at_most",
    "check_chars",
    "check_metadata",
    "check_sampling",
    "check_schema",
    "variables_of",
]

FORM_ARGUMENTS: tuple[str, ...] = ("structured_output", *StructuredOutput.__struct_fields__)
"""What the engine calls the form of an answer, or a part of it."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, as vLLM's `structured_outputs` names it: exactly one of five."""

    json: dict[str, Any] | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None

    @property
    def form(self) -> StructuredOutput:
        return StructuredOutput(
            json_schema=self.json,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            disable_any_whitespace=bool(self.disable_any_whitespace),
        )


class CallFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every body may say of its call, beside what is asked: hints for the scheduling policy,
    by their names in `SchedulingHints`, and whose call it is."""

    user: str | None = None
    """The tenant of a call without a key."""
    cache_salt: str | None = None
    """Cached prefixes are shared with calls of the same salt, and the same key, alone."""
    priority: int | None = None
    session_id: str | None = None
    ttft_target_seconds: float | None = None
    deadline_seconds: float | None = None
    """The request is ended so long after it came, if it hasn't before."""


class SamplingFields(CallFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checked by `SamplingParams`; None is the same as nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 and -1 keep all."""
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    """Negative ones too: taken modulo 2**64."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    n: int | None = None
    structured_outputs: StructuredOutputs | None = None
    predicted_output_tokens: int | None = None
    tpot_target_seconds: float | None = None

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """`defaults` where nothing is given; `more` are fields that other parts of the body gave.
        Raises `InvalidSamplingError`."""
        given = {name: getattr(self, name) for name in _AS_THEY_ARE}
        if self.top_k is not None:
            given["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.seed is not None:
            given["seed"] = self.seed % 2**64
        if (bias := self.logit_bias) is not None:
            # Too many are refused for their number, and not looked at before.
            few = len(bias) <= MAX_BIASED_TOKENS
            ids = {_token_id(key): value for key, value in bias.items()} if few else bias
            given["logit_bias"] = ids
        if self.structured_outputs is not None:
            given["structured_output"] = self.structured_outputs.form
        given |= more
        given = {name: value for name, value in given.items() if value is not None}
        return msgspec.structs.replace(defaults, **given)


_AS_THEY_ARE = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "n",
)


def _token_id(key: str) -> int | str:
    """`SamplingParams` refuses what is no id."""
    return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else key


def check_at_most(field: str, must: str, value: int, limit: int) -> None:
    """Raise `ApiError` where `value` is above the server's `limit`, which `must` has braces for."""
    if value > limit:
        raise ApiError(
            400,
            f"{field} must {must.format(limit)}, which is this server's limit, got {value}",
            param=field,
            code="limit_exceeded",
        )


def check_chars(field: str, text: str, most: int, of: str = "") -> None:
    check_at_most(field, f"have {of}at most {{}} characters", len(text), most)


def check_metadata(metadata: Mapping[str, str] | None, settings: ServerSettings) -> None:
    given = metadata or {}
    check_at_most("metadata", "have at most {} entries", len(given), settings.max_metadata)
    for key, value in given.items():
        check_chars("metadata", key, settings.max_metadata_key_chars, "keys of ")
        check_chars(f"metadata.{key}", value, settings.max_metadata_value_chars)


def check_sampling(body: SamplingFields, settings: ServerSettings) -> None:
    """Check the limits of the fields that all APIs share."""
    check_at_most("n", "be at most {}", body.n or 1, settings.max_n)
    stops = body.stop if isinstance(body.stop, list) else ()
    num_stops = 1 if isinstance(body.stop, str) else len(stops)
    check_at_most("stop", "have at most {} strings", num_stops, settings.max_stops)
    if body.structured_outputs is not None:
        check_schema("structured_outputs", body.structured_outputs.json, settings)


def check_schema(field: str, schema: Any, settings: ServerSettings) -> None:
    """A schema as a value, or as JSON text."""
    if schema is None:
        return
    size = len(schema.encode()) if isinstance(schema, str) else len(msgspec.json.encode(schema))
    limit = settings.max_schema_bytes
    check_at_most(field, "have a schema of at most {} bytes", size, limit)


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def variables_of(engine: Engine, effort: str | None, field: str) -> dict[str, Any]:
    """Variables of the template that say so. Raises `ApiError` about the `field` of an effort that
    nothing would come of."""
    if effort is None:
        return {}
    if engine.template_reads("reasoning_effort"):
        return {"reasoning_effort": effort}
    if engine.template_reads("enable_thinking") and effort in get_args(Effort):
        return {"enable_thinking": effort != "none"}
    raise ApiError(
        400,
        f"{field} isn't supported: the model's chat template reads neither reasoning_effort nor "
        "enable_thinking",
        param=field,
        code="unsupported_parameter",
    )
