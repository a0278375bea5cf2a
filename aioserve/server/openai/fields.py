"""Fields of bodies that endpoints of the OpenAI API share, and fields of what they answer: token
counts, and the chunks of a stream.

A body's cache salt never stands for itself: a client that knows another's salt doesn't come to
share its cached prefixes.

All chunks of a stream begin alike, so that is encoded once; each costs the encoding of its choice
and of the counts, where those are asked for.
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
    AskedForm,
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
    """A last chunk without choices tells the counts."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`, every chunk tells those so far."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, omit_defaults=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    """Draft tokens that were right, by a prediction or whatever else the drafter goes by."""
    rejected_prediction_tokens: int | None = None
    """Draft tokens that were verified in vain. Both are told where there were any."""


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
    """`about` is what all chunks say of the answer, as an object of JSON."""

    __slots__ = ("_head", "_tail", "counts_always", "counts_last")

    def __init__(self, about: msgspec.Struct, options: StreamOptions | None) -> None:
        options = StreamOptions() if options is None else options
        self._head = b"data: " + _encode(about)[:-1] + b',"choices":['
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self.counts_last: bool = bool(options.include_usage)
        """A chunk without choices tells them."""
        self.counts_always: bool = self.counts_last and bool(options.continuous_usage_stats)
        """Every chunk tells those so far."""

    def joined(
        self,
        choices: Sequence[msgspec.Struct],
        usage: UsageBody | None = None,
        more: Mapping[str, Any] = {},
    ) -> bytes:
        """Return an event for each choice, to be sent at once. `usage` where every chunk tells
        it; `more` is what these chunks alone say of the answer."""
        tail = self._tail if usage is None else self._counted(usage)
        said = b"".join([b",%b:%b" % (_encode(name), _encode(one)) for name, one in more.items()])
        tail = b"]" + said + tail
        return b"".join([self._head + _encode(choice) + tail for choice in choices])

    def end(self, usage: UsageBody) -> bytes:
        """The last events of an answer that is whole."""
        return self._head + b"]" + self._counted(usage) + DONE if self.counts_last else DONE

    def _counted(self, usage: UsageBody) -> bytes:
        return b',"usage":' + _encode(usage) + b"}\n\n"


_TAG = b"aioserve cache_salt 1"


def combined_salt(own: str | None, asked: str | None) -> str | None:
    """The salt of a call whose key has the salt `own` and whose body has `asked`: 64 hexadecimal
    digits that are others for each pair, and `own` where the body has none."""
    if asked is None:
        return own
    parts = [b"" if own is None else b"\1" + own.encode(), asked.encode("utf-8", "surrogatepass")]
    digest = hashlib.sha256(_TAG)
    for part in parts:
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.hexdigest()


class CallFields(Strict, frozen=True, kw_only=True):
    """Fields of every request, beside what is asked."""

    hints: ClassVar[Hints] = OF_CALLS
    limits: ClassVar[Mapping[str, str]] = {}
    """Settings that limit fields, by the names of the fields."""
    default_side: ClassVar[TruncationSide] = "left"

    model: str | None = None
    """The model that is served, where it isn't said."""
    user: str | None = None
    """The tenant of a call without a key."""
    cache_salt: str | None = None
    """Cached prefixes are shared with calls of the same salt, and the same key, alone."""
    deadline_seconds: float | None = None
    """The request is ended so long after it came, if it hasn't before."""
    priority: int | None = None
    session_id: str | None = None
    ttft_target_seconds: float | None = None
    request_id: str | None = None
    """What the call goes by, as `x-request-id` says, where its head has none."""
    rid: str | None = None
    """`request_id`, as other servers call it."""
    truncate_prompt_tokens: int | None = None
    """A longer prompt is cut to so many tokens; -1 leaves room for the answer."""
    truncation_side: TruncationSide | None = None
    """Where its tokens are dropped, if not where the endpoint does."""

    def check(self, call: Call) -> None:
        """Raise `ApiError` for what isn't supported or contradicts itself, and what is above the
        server's limits. The call goes by what the body says from here on."""
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
        """What a request to the engine carries of its body and its call. Raises
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
"""Sampling parameters that are handed on as they are: nothing here looks at them."""


class AnswerFields(HandedOn, frozen=True, kw_only=True):
    """Fields of every request for an answer, by the names of the OpenAI API, and of vLLM where that
    has none. None is the same as nothing. `seed` may be negative: it is taken modulo 2**64."""

    limits: ClassVar[Mapping[str, str]] = {"n": "max_n", "stop": "max_stops"}

    min_tokens: int | None = None
    n: int | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    """The form of the answer as SGLang's clients say it, as `ebnf`."""
    ebnf: str | None = None
    guided_json: dict[str, Any] | str | None = None
    """The form of the answer as clients of earlier versions of vLLM say it, as the next three."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    """The form of the answer as clients of llama.cpp say it, as the next one; "" asks for none."""
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
    def asked_form(self) -> AskedForm | None:
        """Raises `ApiError` where several fields ask for a form."""
        own = self.structured_outputs
        spacing = {} if own is None else own.spacing or {}
        found = [
            AskedForm(field, StructuredOutputs(**{kind: getattr(self, field)}, **spacing))
            for field, kind in _FORMS.items()
            if getattr(self, field) is not None and (field != "grammar" or self.grammar)
        ]
        if own is not None and not (found and spacing):
            found.append(AskedForm("structured_outputs", own))
        if len(found) > 1:
            raise refuse(found[0].field, f"and {found[1].field} ask for a form both")
        return found[0] if found else None

    def params(self, defaults: SamplingParams, **more: Any) -> SamplingParams:
        """`more` are fields that other parts of the body gave. Raises `InvalidSamplingError`."""
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
"""What `structured_outputs` calls other fields that ask for a form."""
_SAMPLING = [
    field for field in AnswerFields.__struct_fields__ if field in SamplingParams.__struct_fields__
]


class ChunkFields(AnswerFields, frozen=True, kw_only=True):
    """Fields of requests that are answered in choices, or chunks of them."""

    limits: ClassVar[Mapping[str, str]] = {
        **AnswerFields.limits,
        "prompt_logprobs": "max_top_logprobs",
    }

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """The ids of prompt and answer are told."""
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities call each token "token_id:ID", which no two have in common."""
    prompt_logprobs: int | None = None
    """How many of the most likely tokens are told at each place of the prompt, beside the one that
    is there."""
    use_beam_search: bool | None = None
    """The answers are the `n` best that a beam search finds."""
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
    """Raise `ApiError` for a field that has none of the values, beside None, by which nothing is
    asked. `where` says behind "supported" in which case that is so."""
    for field, harmless in fields.items():
        value = getattr(body, field)
        if value is not None and not any(
            type(value) is type(one) and value == one for one in harmless
        ):
            only = ", ".join(msgspec.json.encode(one).decode() for one in harmless)
            but = f"; only {only} is" if harmless else ""
            raise refuse(field, f"isn't supported{where}{but}", "unsupported_parameter")
