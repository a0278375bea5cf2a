"""What a caller asks for and gets back: sampling parameters, requests, tokens, completions.

Plain values without behaviour beyond validation at the edge. Everything here may be imported from
anywhere in the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.arguments import Rule, boolean, check, integer, number, optional, several, text
from aioserve.errors import InvalidSamplingError

__all__ = [
    "Completion",
    "FinishReason",
    "Request",
    "Sample",
    "SamplingParams",
    "Timings",
    "Token",
    "Usage",
]

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_SEED = 2**64 - 1
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1


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


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
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
    """Keep this many most likely tokens, in [0, 2**63); 0 keeps all."""
    seed: int | None = None
    """Key of this request's noise, in [0, 2**64). None: the engine draws one per request."""
    stop: Sequence[str] = ()
    """Strings that end the answer and are not part of it; one string alone will do. Kept as a
    tuple."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the answer like the model's own end-of-sequence ids. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence ids (and past them alone)."""
    n: int = 1
    """Answers to draw for the prompt, which is computed and kept once for all of them; at most the
    engine's `max_num_seqs`. Answer `i` of a request with seed `s` is that of a request with seed
    `(s + i) % 2**64` and n=1; at temperature 0 all are equal."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = check(InvalidSamplingError, name, getattr(self, name), rule)
            msgspec.structs.force_setattr(self, name, value)


_RULES: dict[str, Rule[Any]] = {
    "max_tokens": optional(integer(1)),
    "temperature": number(0, 100),
    "top_p": number(0, 1, above=True),
    "top_k": integer(0),
    "seed": optional(integer(0, MAX_SEED)),
    "stop": several(text(1, MAX_STOP_CHARS), MAX_STOP_STRINGS),
    "stop_token_ids": several(integer(0), MAX_STOP_TOKEN_IDS),
    "ignore_eos": boolean,
    "n": integer(1),
}


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
    namespace: bytes = b""
    """KV pages are shared with requests of the same namespace alone (`aioserve.kv.namespace`)."""
    arrival_seconds: float = 0.0
    """On the clock of whoever plans the steps."""
    tenant: str | None = None
    """On whose behalf the request was sent."""
    priority: int = 0
    """How urgent it is: what more or less means is up to the policy."""
    ttft_target_seconds: float | None = None
    """How soon after its arrival the first token is wanted."""
    tpot_target_seconds: float | None = None
    """How long each further token may take on average."""
    deadline_seconds: float | None = None
    """How long after its arrival it is ended, unless it has ended before."""

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


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    """Of all samples together."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Timings(msgspec.Struct, frozen=True, gc=False):
    """When things happened to one request, in seconds since it was submitted."""

    first_token_seconds: float | None
    """Time to first token (TTFT); None when there was none."""
    total_seconds: float
    completion_tokens: int
    """Of all samples together."""

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time between output tokens after the first (TPOT), whichever samples they belong
        to; None below two tokens."""
        if self.first_token_seconds is None or self.completion_tokens < 2:
            return None
        return (self.total_seconds - self.first_token_seconds) / (self.completion_tokens - 1)


class Sample(msgspec.Struct, frozen=True):
    """One of a request's answers, whole."""

    text: str
    token_ids: tuple[int, ...]
    """Generated ids, the end-of-sequence id included where one ended the answer."""
    finish_reason: FinishReason


class Completion(msgspec.Struct, frozen=True):
    """All that a request brought. `text`, `token_ids` and `finish_reason` are the first sample's,
    which is the only one unless `SamplingParams.n` says otherwise."""

    request_id: str
    samples: tuple[Sample, ...]
    usage: Usage
    timings: Timings

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.samples[0].finish_reason
