"""Values that a caller sends and gets back: requests, tokens, completions.

Plain values without behaviour beyond validation at the edge. May be imported from anywhere in the
package.
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
    """Reason why a stream ended."""

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
    """A request as it enters the scheduler.

    Made once, where requests come in, from arguments that were checked there. It is handed on
    unchanged to the scheduler and to everything that reports on requests. Plugins see a projection
    of it.
    """

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    """int32 `[prompt_tokens]`, at least one."""
    max_length: int
    """Most tokens of prompt and answer together; more than the prompt has."""
    params: SamplingParams
    seed: int = 0
    """Key of the first sample's noise, in [0, 2**64); `seed_of` gives those of the others."""
    end_ids: frozenset[int] = frozenset()
    """Token ids that end an answer."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """`params.bad_words` as the tokenizer encodes them."""
    logits_processors: tuple[int, ...] = ()
    """Numbers of `params.logits_processors` at the runner, which makes them."""
    score_from: int | None = None
    """Position, at least 1, of the first token of the prompt whose log-probability is wanted."""
    pooled: range | None = None
    """Positions of the prompt whose hidden states are to be summed: at least one, with step 1."""
    answer_from: int | None = None
    """Position where the answer begins, at most `prompt_tokens`. The prompt's tokens from there on,
    maybe none, are the answer's to all that counts its tokens or goes by them. None: all of the
    prompt comes before the answer."""
    edits_logprobs: bool = False
    """True for a beam. Parameters change log-probabilities in place of logits, and the next token's
    are told as they are afterwards."""
    answers: bool = True
    """False if only something of the prompt is wanted, and no token of an answer."""
    max_draft_tokens: int = 0
    """Most draft tokens of each answer that a step may verify; 0: no drafting."""
    predicted_ids: npt.NDArray[np.int32] = NO_IDS
    """int32 `[predicted tokens]`: text that the caller expects of an answer; drafters read it."""
    namespace: bytes = b""
    """Key of the prefix tree's part that the request uses. Requests share KV pages within it alone
    (`aioserve.kv.namespace`).
    """
    arrival_seconds: float = 0.0
    """Time of arrival on the clock of the steps, in seconds."""
    hints: SchedulingHints = NO_HINTS
    """Facts for the policy and for plugins."""
    script: Any = None
    """Value that the model's own `LoadedModel.script` made of the request."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_before_answer(self) -> int:
        """Tokens of the prompt before the answer begins."""
        return len(self.prompt_ids) if self.answer_from is None else self.answer_from

    @property
    def begun_ids(self) -> npt.NDArray[np.int32]:
        """Tokens of the prompt with which the answer begins, int32, maybe none."""
        return self.prompt_ids[self.num_before_answer :]

    @property
    def max_tokens(self) -> int:
        """Most tokens that each answer may have behind the prompt."""
        return self.max_length - len(self.prompt_ids)

    @property
    def num_samples(self) -> int:
        return self.params.n

    def seed_of(self, sample: int) -> int:
        """Return the key of the noise of sample number `sample`."""
        return (self.seed + sample) % (MAX_SEED + 1)


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """One of the most likely tokens at one place."""

    id: int
    logprob: float
    text: str = ""
    """Text of this token alone. A special token has its name, and bytes of an incomplete character
    become U+FFFD. Empty without a tokenizer.
    """


class Logprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities of the model itself at one place of a text, in natural logarithms.

    They are taken before temperature, penalties and anything else that a request asks for.
    """

    logprob: float
    """Log-probability of the token that is there."""
    top: tuple[TopLogprob, ...] = ()
    """Most likely tokens, in falling order, as many as were asked for."""

    def __repr__(self) -> str:
        return brief(self, self.logprob, top=len(self.top) or None)


class Token(msgspec.Struct, frozen=True, gc=False):
    """One generated token as its stream delivers it."""

    id: int
    text: str
    """Text that became final with this token. Empty while a character or a possible stop string is
    incomplete, and without a tokenizer; several characters when one completes. The texts of a
    sample's tokens joined are its answer.
    """
    index: int
    """Place in its answer, from 0."""
    sample: int = 0
    """Index of its answer among the request's `n`, from 0."""
    logprobs: Logprobs | None = None
    """Log-probabilities; None unless `SamplingParams.logprobs` asks for them."""
    marks: tuple[int, ...] = ()
    """Offsets in `text` at which special tokens that are marks begin, in chats. Any other mark was
    typed.
    """

    @property
    def logprob(self) -> float | None:
        """Log-probability of this token; None unless it was asked for."""
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
    """Prompt tokens that the prefix cache had when the request started, so they weren't computed.
    It is `prompt_tokens_details.cached_tokens` of the OpenAI API. Tokens that a preempted request
    finds when it begins again don't count.
    """
    drafted_tokens: int = 0
    """Draft tokens of the engine's drafter that steps verified; 0 without `speculation`."""
    accepted_draft_tokens: int = 0
    """Draft tokens that were right, and so became tokens of a sample, unless they are after its
    end. It is `completion_tokens_details.accepted_prediction_tokens` of the OpenAI API.
    """

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Sample(msgspec.Struct, frozen=True):
    """One complete answer of a request."""

    text: str
    token_ids: tuple[int, ...]
    """Generated ids up to and including the one that ended the answer. That is an end-of-sequence
    or stop id, or the id that completed a stop string, even if its text was cut.
    """
    finish_reason: FinishReason
    logprobs: tuple[Logprobs, ...] | None = None
    """One for each of `token_ids`; None unless `SamplingParams.logprobs` asks for them."""
    stop_reason: int | str | None = None
    """Entry of `SamplingParams.stop` or `stop_token_ids` that ended it."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of its tokens; None unless they were asked for."""
        return None if self.logprobs is None else sum([each.logprob for each in self.logprobs])

    def parsed(self, form: type[T] | Validates[T]) -> T:
        """Return the object that the text describes: see `Completion.parsed`."""
        return parsed_answer(form, self.text, self.finish_reason)

    def __repr__(self) -> str:
        return brief(self, *_in_short(self))


class Beam(msgspec.Struct, frozen=True):
    """One answer that a beam search found."""

    text: str
    token_ids: tuple[int, ...]
    """Generated ids up to and including the one that ended the answer, as in a `Sample`."""
    finish_reason: FinishReason
    cumulative_logprob: float
    """Sum of the log-probabilities of its tokens, after penalties and other edits."""
    score: float
    """`cumulative_logprob / len(token_ids) ** length_penalty`, by which beams are ordered."""
    stop_reason: int | str | None = None
    """Stop string, or entry of `stop_token_ids`, that ended it."""

    def __repr__(self) -> str:
        return brief(self, *_in_short(self), score=self.score)


def _in_short(answer: Sample | Beam) -> tuple[str, str, str]:
    num_tokens = counted(len(answer.token_ids), "token")
    return quoted(answer.text), num_tokens, str(answer.finish_reason)


class Completion(msgspec.Struct, frozen=True):
    """Result of a request.

    `text`, `token_ids`, `finish_reason`, `stop_reason`, `logprobs` and `cumulative_logprob` are
    those of the first sample. It is the only one unless `SamplingParams.n` says otherwise.
    """

    request_id: str
    samples: tuple[Sample, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    """One for each token of the prompt, None for the first. None unless
    `SamplingParams.prompt_logprobs` asks for them.
    """

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
        """Return the object of `form` that the text describes.

        `form` is a pydantic model or `TypeAdapter`, a `msgspec.Struct` or a dataclass, as in
        `StructuredOutput.json_schema`.

        Raises `InvalidRequestError` for another form. Raises `UnparsedError` for a completion that
        was cut off, is empty or doesn't match the form.
        """
        return self.samples[0].parsed(form)

    def __repr__(self) -> str:
        more = f"{len(self.samples)} samples" if len(self.samples) > 1 else None
        first = _in_short(self.samples[0]) if self.samples else ()
        return brief(self, quoted(self.request_id), *first, *([more] if more else []))
