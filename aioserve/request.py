"""Values that a caller sends and gets back: requests, tokens, completions.

Plain values without behaviour beyond validation at the edge. Everything here may be imported from
anywhere in the package.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import (
    brief,
    counted,
    quoted,
)
from aioserve.drafting.drafter import NO_IDS
from aioserve.hints import SchedulingHints
from aioserve.sampling_params import MAX_SEED, SamplingParams
from aioserve.schema_classes import Validates, parsed_answer
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
    """Most draft tokens of each answer that a step may verify; 0: none."""
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
    """Draft tokens of the engine's drafter that steps verified; 0 without `speculation`."""
    accepted_draft_tokens: int = 0
    """Draft tokens among them that were right, and so are tokens of a sample, but for those behind
    its end: `completion_tokens_details.accepted_prediction_tokens` of the OpenAI API."""

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
