"""What a caller asks for and gets back: sampling parameters, requests, tokens, completions.

Plain values without behaviour beyond validation at the edge. Everything here may be imported from
anywhere in the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import (
    MadeByNames,
    Rule,
    boolean,
    brief,
    check,
    counted,
    integer,
    number,
    optional,
    pairs,
    quoted,
    sequence,
    several,
    text,
)
from aioserve.drafting.drafter import NO_IDS
from aioserve.errors import InvalidSamplingError
from aioserve.hints import SchedulingHints
from aioserve.schema_classes import Validates, parsed_answer
from aioserve.structured_output import StructuredOutput, structured_output
from aioserve.timings import Timings

__all__ = [
    "Beam",
    "Completion",
    "FinishReason",
    "Logprobs",
    "Request",
    "Sample",
    "SamplingParams",
    "Token",
    "TopLogprob",
    "Usage",
]

T = TypeVar("T")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_CHARS_TOGETHER = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_BIASED_TOKENS = 1024
MAX_ALLOWED_TOKENS = 2**18
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 64
MAX_PROCESSORS = 8
MAX_PROCESSOR_CHARS = 1000
MAX_LOGPROBS = 64
MAX_SEED = 2**64 - 1
MAX_DRAFT_TOKENS = 64
"""Most guesses for one sequence that a step verifies."""


class FinishReason(StrEnum):
    """Why a stream ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the model's context is used up."""
    ABORT = "abort"
    """The caller left, or the engine was closed."""
    ERROR = "error"
    """The request failed; iterating its stream raises the error."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """How to pick each next token, and when to end. Names as in vLLM and the OpenAI API.

    Raises `InvalidSamplingError` for a value outside its range.
    """

    max_tokens: int | None = None
    """At most this many generated tokens, in [1, 2**63); None: as many as the context holds."""
    temperature: float = 1.0
    """0 is greedy; at most 100."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to this; in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens, in [-1, 2**63); 0 keeps all, and so does -1, which
    becomes 0."""
    min_p: float = 0.0
    """Keep tokens that are at least so many times as likely as the most likely one; in [0, 1]."""
    typical_p: float = 1.0
    """Keep the tokens about as likely as the entropy would have it, whose probabilities sum to
    this (Meister et al., "Locally typical sampling", 2023); in (0, 1]."""
    repetition_penalty: float = 1.0
    """Above 1, tokens of prompt and answer become less likely: a positive logit is divided by it, a
    negative one multiplied (Keskar et al., "CTRL", 2019); in [0.01, 100]."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the answer has already; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off as often as the answer has the token; in [-2, 2]."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Added to the logits of these ids, up to 1024; each in [-100, 100]. Kept as a tuple of
    pairs."""
    allowed_token_ids: Sequence[int] | None = None
    """Draw from these ids alone; 1 to 262,144. Kept as a tuple."""
    bad_words: Sequence[str] = ()
    """Up to 64 texts of up to 64 characters that the answer may not have: the last token of each,
    as it is encoded at the start of a text and behind a space, isn't drawn behind the others. Kept
    as a tuple."""
    logits_processors: Sequence[str] = ()
    """Names, up to 8, of processors that plugins offer, options behind them as in
    "name:option=value". Kept as a tuple."""
    min_tokens: int = 0
    """Nothing ends the answer before it has so many tokens; at most `max_tokens`."""
    seed: int | None = None
    """Key of this request's noise, in [0, 2**64). None: the engine draws one per request."""
    stop: Sequence[str] = ()
    """Strings that end the answer; one string alone will do. Kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the answer like the model's own end-of-sequence ids. Kept as a tuple."""
    include_stop_str_in_output: bool = False
    """The text has what ended it: the stop string, or that of the id. The ids always have it."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (and past them alone)."""
    logprobs: int | None = None
    """Log-probabilities of each token and of so many of the most likely ones at its place, in
    [0, 64]; None: none. They are those of the model itself, before `temperature` and all else."""
    prompt_logprobs: int | None = None
    """How many alternatives are told of each token of the prompt but the first; as `logprobs`."""
    structured_output: StructuredOutput | None = None
    """The form that the answer must have, as JSON of a schema; None: any."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, in [0, 2**63), the tags around it aside: behind them the tag that
    closes it comes, and the answer goes on with content. None: as many as the model likes. With
    `structured_output` all of an answer is content, so there is no reasoning to end."""
    n: int = 1
    """Answers to draw for the prompt, which is computed and kept once for all of them; at most the
    engine's `max_num_seqs`. Answer `i` of a request with seed `s` is that of a request with seed
    `(s + i) % 2**64` and n=1; at temperature 0 all are equal."""
    best_of: int | None = None
    """Draw so many answers, from `n` to the engine's `max_num_seqs`, and return the `n` with the
    highest mean log-probability per token, best first. Above `n` for `Engine.generate` alone: a
    stream can't take tokens back. None: as many as `n`."""
    max_draft_tokens: int | None = None
    """Most tokens that the engine's drafter may guess for an answer in one step, in [0, 64]: 0
    guesses none, and with `logits_processors` none are. None: as many as the engine's `speculation`
    allows, which is the limit. It changes no token, unless guesses are verified by rejection."""
    prediction: str | None = None
    """What the answer will be, or much of it, such as the text that it is to edit: the drafter
    guesses by it. It changes no token. For an engine with `speculation`, and a model with a
    tokenizer."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = check(InvalidSamplingError, name, getattr(self, name), rule)
            msgspec.structs.force_setattr(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingError(
                f"min_tokens must be at most max_tokens = {self.max_tokens}, got {self.min_tokens}",
                argument="min_tokens",
                value=self.min_tokens,
                limit=self.max_tokens,
            )
        if (chars := sum(map(len, self.stop))) > MAX_STOP_CHARS_TOGETHER:
            raise InvalidSamplingError(
                f"stop must have at most {MAX_STOP_CHARS_TOGETHER} characters in all its strings "
                f"together, got {chars}",
                argument="stop",
                value=self.stop,
                limit=MAX_STOP_CHARS_TOGETHER,
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidSamplingError(
                f"best_of must be at least n = {self.n}, got {self.best_of}",
                argument="best_of",
                value=self.best_of,
                limit=self.n,
            )
        for name in ("max_draft_tokens", "prediction"):
            if self.logits_processors and getattr(self, name):
                raise InvalidSamplingError(
                    f"{name} has no effect with logits_processors, which are called once a token: "
                    "leave one of them out",
                    argument=name,
                    value=getattr(self, name),
                )
        if self.prediction is not None and self.max_draft_tokens == 0:
            raise InvalidSamplingError(
                "prediction has no effect with max_draft_tokens=0: leave one of them out",
                argument="prediction",
                value=self.prediction,
            )

    @property
    def needs_history(self) -> bool:
        """Whether a draw depends on the tokens before it, beside their keys and values."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.bad_words
            or self.logits_processors
        )

    @property
    def is_guided(self) -> bool:
        """Whether the text so far decides which tokens may come next."""
        return self.structured_output is not None or self.thinking_token_budget is not None

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before anything of them is left out."""
        return bool(
            self.needs_history
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
        )


_RULES: dict[str, Rule[Any]] = {
    "max_tokens": optional(integer(1)),
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "top_k": lambda value: max(integer(-1)(value), 0),
    "min_p": number(0, 1),
    "typical_p": number(0, 1, above=True),
    "repetition_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "logit_bias": pairs(integer(0), number(-100, 100), MAX_BIASED_TOKENS),
    "allowed_token_ids": optional(sequence(integer(0), MAX_ALLOWED_TOKENS, least=1)),
    "bad_words": several(text(1, MAX_BAD_WORD_CHARS), MAX_BAD_WORDS),
    "logits_processors": several(text(1, MAX_PROCESSOR_CHARS), MAX_PROCESSORS),
    "min_tokens": integer(0),
    "seed": optional(integer(0, MAX_SEED)),
    "stop": several(text(1, MAX_STOP_CHARS), MAX_STOP_STRINGS),
    "stop_token_ids": several(integer(0), MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": boolean,
    "ignore_eos": boolean,
    "logprobs": optional(integer(0, MAX_LOGPROBS)),
    "prompt_logprobs": optional(integer(0, MAX_LOGPROBS)),
    "structured_output": optional(structured_output),
    "thinking_token_budget": optional(integer(0)),
    "n": integer(1),
    "best_of": optional(integer(1)),
    "max_draft_tokens": optional(integer(0, MAX_DRAFT_TOKENS)),
    "prediction": optional(text(1)),
}


NO_HINTS = SchedulingHints()


class Request(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All that is known of a request when it enters the scheduler.

    Made once, where requests come in, from arguments that were checked there; handed on as it is to
    the scheduler and to whatever tells of requests. What plugins see is a projection of it.
    """

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    """int32 `[prompt_tokens]`, at least one."""
    max_length: int
    """Prompt and answer together, in tokens; more than the prompt has."""
    params: SamplingParams
    seed: int = 0
    """Key of the first sample's noise, in [0, 2**64); `seed_of` gives those of the others."""
    end_ids: frozenset[int] = frozenset()
    """Token ids that end an answer."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as the tokenizer writes them."""
    logits_processors: tuple[int, ...] = ()
    """Numbers of `params.logits_processors` where the runner makes them."""
    score_from: int | None = None
    """Position, at least 1, of the first token of the prompt whose log-probability is wanted."""
    pooled: range | None = None
    """Positions of the prompt, at least one and with step 1: the sum of the model's hidden states
    there is wanted."""
    beam_from: int | None = None
    """The prompt's tokens from this position on, maybe none, are a beam: they are the answer's to
    what changes its logits. This changes log-probabilities then, and those of the next token are
    told as they are after that."""
    answers: bool = True
    """False where something is wanted of the prompt, and no token of an answer."""
    max_draft_tokens: int = 0
    """Most guesses of each answer that a step may verify; 0: none."""
    predicted_ids: npt.NDArray[np.int32] = NO_IDS
    """int32 `[predicted tokens]`: what the caller expects an answer to be; drafters read it."""
    namespace: bytes = b""
    """KV pages are shared with requests of the same namespace alone (`aioserve.kv.namespace`)."""
    arrival_seconds: float = 0.0
    """On the clock of the steps."""
    hints: SchedulingHints = NO_HINTS
    """Facts for the policy, and for plugins."""
    script: Any = None
    """A value that the model's own `LoadedModel.script` made of the request."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_tokens(self) -> int:
        """Most tokens that each answer may have."""
        return self.max_length - len(self.prompt_ids)

    @property
    def num_samples(self) -> int:
        return self.params.n

    def seed_of(self, sample: int) -> int:
        """Key of the noise of sample number `sample`."""
        return (self.seed + sample) % (MAX_SEED + 1)


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens at some place."""

    id: int
    logprob: float
    text: str = ""
    """What it alone writes: a special token its name, U+FFFD where its bytes are part of a
    character. Empty without a tokenizer."""


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """Natural logarithms of the probabilities that the model itself gave at one place of a text:
    before temperature, penalties and whatever else a request asks for."""

    logprob: float
    """Log-probability of the token that is there."""
    top: tuple[TopLogprob, ...] = ()
    """The most likely tokens, in falling order, as many as were asked for."""

    def __repr__(self) -> str:
        return brief(self, self.logprob, top=len(self.top) or None)


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token as its stream delivers it."""

    id: int
    text: str
    """Text that became final with this token: empty while a character or a possible stop string is
    incomplete, and always without a tokenizer; several characters when one completes. Joined over
    a sample it is the answer."""
    index: int
    """Place in its answer, from 0."""
    sample: int = 0
    """Which of the request's `n` answers it belongs to, from 0."""
    logprobs: Logprobs | None = None
    """Where `SamplingParams.logprobs` asks for them."""
    marks: tuple[int, ...] = ()
    """In chats: where in `text` special tokens that are marks begin. Any other mark was typed."""

    @property
    def logprob(self) -> float | None:
        """Its own, where they were asked for."""
        return None if self.logprobs is None else self.logprobs.logprob

    def __repr__(self) -> str:
        sample = self.sample or None
        about = {"index": self.index, "sample": sample, "logprob": self.logprob}
        return brief(self, self.id, quoted(self.text), **about)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    """Generated tokens of all samples together."""
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when the request started, and so not
    computed; `prompt_tokens_details.cached_tokens` of the OpenAI API. What a preempted request
    finds when it begins again doesn't count."""
    drafted_tokens: int = 0
    """Guesses of the engine's drafter that steps verified; 0 without `speculation`."""
    accepted_draft_tokens: int = 0
    """Guesses among them that were right, and so are tokens of a sample, but for those behind its
    end: `completion_tokens_details.accepted_prediction_tokens` of the OpenAI API."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Sample(msgspec.Struct, frozen=True):
    """One of a request's answers, whole."""

    text: str
    token_ids: tuple[int, ...]
    """Generated ids up to the one that ended the answer, which is one of them: an end-of-sequence
    or stop id, or the id that completed a stop string, whatever of its text was cut."""
    finish_reason: FinishReason
    logprobs: tuple[Logprobs, ...] | None = None
    """One for each of `token_ids`, where `SamplingParams.logprobs` asks for them."""
    stop_reason: int | str | None = None
    """The one of `SamplingParams.stop` or `stop_token_ids` that ended it."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of its tokens, where they were asked for."""
        return None if self.logprobs is None else sum([each.logprob for each in self.logprobs])

    def parsed(self, form: type[T] | Validates[T]) -> T:
        """The object that the text says: see `Completion.parsed`."""
        return parsed_answer(form, self.text, self.finish_reason)

    def __repr__(self) -> str:
        return brief(self, *_in_short(self))


class Beam(msgspec.Struct, frozen=True):
    """One of the answers that a beam search found."""

    text: str
    token_ids: tuple[int, ...]
    """Generated ids up to the one that ended the answer, which is one of them, as in a `Sample`."""
    finish_reason: FinishReason
    cumulative_logprob: float
    """Sum of the log-probabilities of its tokens, as penalties and the like have left them."""
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`: what beams are ordered by."""
    stop_reason: int | str | None = None
    """The stop string or the one of `stop_token_ids` that ended it."""

    def __repr__(self) -> str:
        return brief(self, *_in_short(self), score=self.score)


def _in_short(answer: Sample | Beam) -> tuple[str, str, str]:
    num_tokens = counted(len(answer.token_ids), "token")
    return quoted(answer.text), num_tokens, str(answer.finish_reason)


class Completion(msgspec.Struct, frozen=True):
    """All that a request brought. `text`, `token_ids`, `finish_reason`, `stop_reason`, `logprobs`
    and `cumulative_logprob` are those of the first sample, which is the only one unless
    `SamplingParams.n` says otherwise."""

    request_id: str
    samples: tuple[Sample, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """One for each token of the prompt, None for the first, where `SamplingParams.prompt_logprobs`
    asks for them."""

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self.samples[0].stop_reason

    @property
    def logprobs(self) -> tuple[Logprobs, ...] | None:
        return self.samples[0].logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return self.samples[0].cumulative_logprob

    def parsed(self, form: type[T] | Validates[T]) -> T:
        """The object that the text says: of `form`, a pydantic model or `TypeAdapter`, a
        `msgspec.Struct` or a dataclass, which `StructuredOutput.json_schema` takes too.

        Raises `InvalidRequestError` for another form, and `UnparsedError` for a completion that was
        cut off, is empty or isn't of the form.
        """
        return self.samples[0].parsed(form)

    def __repr__(self) -> str:
        more = f"{len(self.samples)} samples" if len(self.samples) > 1 else None
        first = _in_short(self.samples[0]) if self.samples else ()
        return brief(self, quoted(self.request_id), *first, *([more] if more else []))
