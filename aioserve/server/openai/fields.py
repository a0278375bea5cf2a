"""Fields that endpoints of the OpenAI API share, of bodies and of answers: token counts, chunks.

A body's cache salt counts only together with the key: a client that knows another's salt doesn't
share its cached prefixes.

All chunks of a stream begin alike, so the beginning is encoded once. Each chunk costs the encoding
of its choice, and of the counts if they are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from aioserve.arguments import check, name, optional
from aioserve.engine.truncation import TruncationSide
from aioserve.errors import InvalidRequestError
from aioserve.hints import SchedulingHints
from aioserve.request import SamplingParams, Usage
from aioserve.sampling_params import PARAMETERS
from aioserve.server.app_state import Call
from aioserve.server.bodies import Strict
from aioserve.server.chat_parts.sampling import (
    RequestedForm,
    StructuredOutputs,
    check_limits,
    sampling_params,
)
from aioserve.server.errors import refuse
from aioserve.server.hint_fields import let_through
from aioserve.server.hint_tables import OF_CALLS, OF_CHUNK_OPTIONS, Hints
from aioserve.server.request_checks import MAX_REQUEST_ID_CHARS, is_request_id

__all__ = [
    "DONE",
    "AnswerFields",
    "CallFields",
    "ChunkFields",
    "Chunks",
    "StreamOptions",
    "UsageBody",
    "combined_salt",
    "refuse_unsupported",
    "usage_of",
]


class StreamOptions(Strict, frozen=True, kw_only=True):
    """Options of a streamed answer."""

    hints: ClassVar[Hints] = OF_CHUNK_OPTIONS

    include_usage: bool | None = None
    """True for a last chunk with the counts, without choices."""
    continuous_usage_stats: bool | None = None
    """True for the counts so far in every chunk, with `include_usage`."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    """Draft tokens that were right, from a prediction or any other source of the drafter."""
    rejected_prediction_tokens: int | None = None
    """Draft tokens that were wrong. Both counts are absent without draft tokens."""


class UsageBody(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(usage: Usage, reasoning_tokens: int = 0) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptTokensDetails(usage.cached_tokens),
        completion_tokens_details=_details_of(usage, reasoning_tokens),
    )


def _details_of(usage: Usage, reasoning_tokens: int) -> CompletionTokensDetails:
    drafted, accepted = usage.drafted_tokens, usage.accepted_draft_tokens
    if not drafted:
        return CompletionTokensDetails(reasoning_tokens)
    return CompletionTokensDetails(reasoning_tokens, accepted, drafted - accepted)


DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


class Chunks:
    """Encoder of the chunks of a stream. The fields that all chunks have in common are in
    `about`."""

    __slots__ = ("_head", "_tail", "counts_always", "counts_last")

    def __init__(self, about: msgspec.Struct, options: StreamOptions | None) -> None:
        options = StreamOptions() if options is None else options
        self._head = b"data: " + _encode(about)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self.counts_last: bool = bool(options.include_usage)
        """True if a last chunk without choices has the counts."""
        self.counts_always: bool = self.counts_last and bool(options.continuous_usage_stats)
        """True if every chunk has the counts so far."""

    def joined(
        self,
        choices: Sequence[msgspec.Struct],
        usage: UsageBody | None = None,
        more: Mapping[str, Any] = {},
    ) -> bytes:
        """Return an event for each choice, to be sent at once. The counts are in `usage`, if every
        chunk has them. More fields of these chunks are in `more`."""
        tail = self._tail if usage is None else self._counted(usage)
        said = b"".join([b",%b:%b" % (_encode(name), _encode(one)) for name, one in more.items()])
        tail = b"]" + said + tail
        return b"".join([self._head + _encode(choice) + tail for choice in choices])

    def end(self, usage: UsageBody) -> bytes:
        """Return the last events of a whole answer."""
        return self._head + b"]" + self._counted(usage) + DONE if self.counts_last else DONE

    def _counted(self, usage: UsageBody) -> bytes:
        return b',"usage":' + _encode(usage) + b"}\n\n"


_TAG = b"aioserve cache_salt 1"


def combined_salt(own: str | None, asked: str | None) -> str | None:
    """Return the salt of a call whose key has the salt `own` and whose body has `asked`.

    It has 64 hexadecimal digits, different for each pair. It is `own` if the body has no salt.
    """
    if asked is None:
        return own
    parts = [b"" if own is None else b"\1" + own.encode(), asked.encode("utf-8", "surrogatepass")]
    digest = hashlib.sha256(_TAG)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


class CallFields(Strict, frozen=True, kw_only=True):
    """Fields of every request, besides its input."""

    hints: ClassVar[Hints] = OF_CALLS
    limits: ClassVar[Mapping[str, str]] = {}
    """Settings that limit fields, by the names of the fields."""
    default_side: ClassVar[TruncationSide] = "left"

    model: str | None = None
    """Name of the model; the served one by default."""
    user: str | None = None
    """Tenant of a call without a key."""
    cache_salt: str | None = None
    """Salt of cached prefixes. Only calls with the same salt and the same key share them."""
    deadline_seconds: float | None = None
    """Seconds after its arrival when the request is ended, if it hasn't ended before."""
    priority: int | None = None
    session_id: str | None = None
    ttft_target_seconds: float | None = None
    request_id: str | None = None
    """Id of the call, as in `x-request-id`, if its head has none."""
    rid: str | None = None
    """Id of the call, as other servers name the field."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of a prompt; a longer one is cut. -1 leaves room for the answer."""
    truncation_side: TruncationSide | None = None
    """Side on which tokens are dropped; the endpoint's by default."""

    def check(self, call: Call) -> None:
        """Raise `ApiError` for unsupported or contradictory fields, and for values above the
        server's limits. The call gets the id that the body gives."""
        call.app_state.check_model(self.model)
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise refuse("truncation_side", "goes with truncate_prompt_tokens alone")
        check_limits(self, call.settings)
        for field in ("request_id", "rid"):
            if (given := getattr(self, field)) is None:
                continue
            if not is_request_id(given):
                most = MAX_REQUEST_ID_CHARS
                raise refuse(
                    field, f"must be 1 to {most} printable ASCII characters without spaces"
                )
            call.call_log.goes_by(given)

    @property
    def truncation_options(self) -> dict[str, Any]:
        """Options by which the engine cuts prompts."""
        if self.truncate_prompt_tokens is None:
            return {}
        side = self.truncation_side or self.default_side
        return {"truncate_prompt_tokens": self.truncate_prompt_tokens, "truncation_side": side}

    def options(self, call: Call, **more: Any) -> dict[str, Any]:
        """Options of a request to the engine, from its body and its call. Raises
        `InvalidRequestError` for a salt that the engine wouldn't take either."""
        salt = check(InvalidRequestError, "cache_salt", self.cache_salt, optional(name))
        hints = {hint: getattr(self, hint, None) for hint in SchedulingHints.__struct_fields__}
        return call.options(
            **{hint: value for hint, value in hints.items() if value is not None},
            **self.truncation_options,
            tenant=call.tenant or self.user or None,
            cache_salt=combined_salt(call.call_log.cache_salt, salt),
            **more,
        )


if TYPE_CHECKING:
    HandedOn = CallFields
else:
    HandedOn = msgspec.defstruct(
        "HandedOn",
        [(name, row.body | None, None) for name, row in PARAMETERS.items() if row.body is not None],
        bases=(CallFields,),
        module=__name__,
        frozen=True,
        kw_only=True,
    )
"""Sampling parameters that are passed on unchanged."""


class AnswerFields(HandedOn, frozen=True, kw_only=True):
    """Fields of every request for an answer, with the names of the OpenAI API, or else of vLLM.

    None equals an absent field. A `seed` may be negative: it is taken modulo 2**64.
    """

    limits: ClassVar[Mapping[str, str]] = {"n": "max_n", "stop": "max_stops"}

    min_tokens: int | None = None
    n: int | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    """Form of the answer in SGLang's API, like `ebnf`."""
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    """Form of the answer in the API of earlier versions of vLLM, like the next three."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    """Form of the answer in llama.cpp's API, like the next field; "" asks for none."""
    json_schema: dict[str, Any] | None = None
    predicted_output_tokens: int | None = None
    tpot_target_seconds: float | None = None
    stream: bool | None = None

    def check(self, call: Call) -> None:
        super().check(call)
        if self.grammar == "":
            let_through(call.call_log, "grammar")
        if self.asked_form is not None:
            self.asked_form.check_sizes(call.settings)

    @property
    def asked_form(self) -> RequestedForm | None:
        """Form that the body asks for; None if it asks for none. Raises `ApiError` if several
        fields do."""
        own = self.structured_outputs
        spacing = {} if own is None else own.spacing or {}
        found = [
            RequestedForm(field, StructuredOutputs(**{kind: getattr(self, field)}, **spacing))
            for field, kind in _FORMS.items()
            if getattr(self, field) is not None and (field != "grammar" or self.grammar)
        ]
        if own is not None and not (found and spacing):
            found.append(RequestedForm("structured_outputs", own))
        if len(found) > 1:
            raise refuse(found[0].field, f"and {found[1].field} ask for a form both")
        return found[0] if found else None

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """Sampling parameters of the body. Values from its other parts are in `more`. Raises
        `InvalidSamplingError`."""
        given = {field: getattr(self, field) for field in _SAMPLING}
        return sampling_params(defaults, given | more)


_FORMS = {
    "regex": "regex",
    "ebnf": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}
"""Names in `structured_outputs` of the other fields that ask for a form."""
_SAMPLING = [
    field for field in AnswerFields.__struct_fields__ if field in SamplingParams.__struct_fields__
]


class ChunkFields(AnswerFields, frozen=True, kw_only=True):
    """Fields of requests that are answered in choices, or in chunks of them."""

    limits: ClassVar[Mapping[str, str]] = {
        **AnswerFields.limits,
        "prompt_logprobs": "max_top_logprobs",
    }

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """True if the ids of prompt and answer are returned."""
    return_tokens_as_token_ids: bool | None = None
    """True if log-probabilities name each token "token_id:ID", which is unique."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens listed at each place of the prompt, besides the token that is
    there."""
    use_beam_search: bool | None = None
    """True for the `n` best answers that a beam search finds."""
    length_penalty: float | None = None

    def check(self, call: Call) -> None:
        super().check(call)
        options = self.stream_options
        asks = options is not None and (options.include_usage or options.continuous_usage_stats)
        if asks and not self.stream:
            raise refuse("stream_options", "goes with stream=true alone")
        if not self.use_beam_search and self.length_penalty not in (None, 1):
            raise refuse("length_penalty", "goes with use_beam_search alone")
        if self.prompt_logprobs is not None and self.stream:
            raise refuse("prompt_logprobs", "isn't told in a stream: it goes with stream=false")


def refuse_unsupported(
    body: msgspec.Struct, fields: Mapping[str, tuple[Any, ...]], where: str = ""
) -> None:
    """Raise `ApiError` for a field that asks for something.

    The values that ask for nothing, besides None, are in `fields`. The message names the case in
    which fields aren't supported with `where`, like " with use_beam_search".
    """
    for field, harmless in fields.items():
        value = getattr(body, field)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in harmless
        ):
            only = ", ".join(msgspec.json.encode(one).decode() for one in harmless)
            but = f"; only {only} is" if harmless else ""
            raise refuse(field, f"isn't supported{where}{but}", "unsupported_parameter")
