"""`SamplingParams`, and `PARAMETERS`: one table of all that is known of each parameter.

A parameter is a field of the class and a row of the table. The rows define checks at the edge,
fields of API bodies, what beam searches take, and the columns that backends draw by. Changes to
logits are defined where they are made, in `aioserve.sampling.edits` and `aioserve.ops`.

Plain values; may be imported from anywhere in the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypedDict

import msgspec
import numpy as np

from aioserve.arguments import (
    MadeByNames,
    Rule,
    boolean,
    check_fields,
    integer,
    number,
    optional,
    pairs,
    sequence,
    several,
    text,
)
from aioserve.errors import InvalidSamplingError
from aioserve.structured_output import StructuredOutput, structured_output

__all__ = [
    "BEAM_DEFAULTS",
    "COLUMNS",
    "DRAWN_FREELY",
    "PARAMETERS",
    "REHEARSED",
    "BeamParams",
    "Column",
    "Parameter",
    "SamplingParams",
]

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
"""Most draft tokens of one sequence that a step verifies."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=MadeByNames):
    """Parameters of a request's sampling and of its end. Names are those of vLLM and the OpenAI
    API.

    Raises `InvalidSamplingError` for a value outside its range.
    """

    max_tokens: int | None = None
    """Most generated tokens, in [1, 2**63); None: as many as the context holds."""
    temperature: float = 1.0
    """Divisor of the logits, in [0, 100]; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to this; in (0, 1]."""
    top_k: int = 0
    """Keep this many most likely tokens, in [-1, 2**63). All are kept by 0, and by -1, which
    becomes 0.
    """
    min_p: float = 0.0
    """Keep tokens at least this many times as likely as the most likely one; in [0, 1]."""
    typical_p: float = 1.0
    """Keep the tokens whose `-log(p)` is nearest to the entropy, until their probabilities sum to
    this; in (0, 1]. See Meister et al., "Locally typical sampling", 2023.
    """
    repetition_penalty: float = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens that prompt or answer
    have. Above 1 these become less likely; in [0.01, 100] (Keskar et al., "CTRL", 2019).
    """
    presence_penalty: float = 0.0
    """Amount taken off the logit of each token that the answer already has; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Amount taken off a token's logit for each time that the answer has it; in [-2, 2]."""
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    """Amounts added to the logits of these ids, up to 1024; each in [-100, 100]. Kept as a tuple of
    pairs.
    """
    allowed_token_ids: Sequence[int] | None = None
    """Draw from these ids alone; 1 to 262,144. Kept as a tuple."""
    bad_words: Sequence[str] = ()
    """Texts that the answer may not have: up to 64, of up to 64 characters. A text's last token is
    never drawn after its others, as the text is encoded at the start and after a space. Kept as a
    tuple.
    """
    logits_processors: Sequence[str] = ()
    """Names of up to 8 processors that plugins offer, with options as in "name:option=value". Kept
    as a tuple.
    """
    min_tokens: int = 0
    """Fewest tokens before anything ends the answer; at most `max_tokens`."""
    seed: int | None = None
    """Key of this request's noise, in [0, 2**64). None: the engine draws one per request."""
    stop: Sequence[str] = ()
    """Strings that end the answer; a single string is taken too. Kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """Ids that end the answer like the model's own end-of-sequence ids. Kept as a tuple."""
    include_stop_str_in_output: bool = False
    """Keep in the text what ended it: the stop string, or the text of the stop id. The ids always
    have it.
    """
    ignore_eos: bool = False
    """Continue past the model's end-of-sequence ids. Stop strings and stop ids still end the
    answer.
    """
    logprobs: int | None = None
    """Most likely tokens to report at each place with their log-probabilities, beside the token
    itself; in [0, 64]. None: no log-probabilities. They are the model's own, before `temperature`
    and all else.
    """
    prompt_logprobs: int | None = None
    """Most likely tokens to report at each place of the prompt except the first; as `logprobs`."""
    structured_output: StructuredOutput | None = None
    """Form that the answer must have, such as JSON of a schema; None: any."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning, in [0, 2**63), without the tags around it. Then the closing tag
    comes, and the answer goes on with content. None: no limit. With `structured_output`, all of an
    answer is content, so there is no reasoning to end.
    """
    n: int = 1
    """Answers to draw for the prompt, which is computed and kept once; at most the engine's
    `max_num_seqs`. Answer `i` with seed `s` equals that of a request with seed `(s + i) % 2**64`
    and n=1. At temperature 0 all are equal.
    """
    best_of: int | None = None
    """Draw this many answers, from `n` to the engine's `max_num_seqs`. Return the `n` with the
    highest mean log-probability per token, best first. None: `n`. Only `Engine.generate` takes more
    than `n`: a stream can't take tokens back.
    """
    max_draft_tokens: int | None = None
    """Most tokens that the engine's drafter may propose for an answer in one step, in [0, 64].
    None: the limit of the engine's `speculation`. 0: no draft tokens. Requests with
    `logits_processors` have none. It changes no token, unless draft tokens are verified by
    rejection.
    """
    prediction: str | None = None
    """Text that the answer will resemble, such as one to be edited; drafters use it. It changes no
    token. Needs an engine with `speculation` and a model with a tokenizer.
    """

    def __post_init__(self) -> None:
        check_fields(InvalidSamplingError, self, _RULES)
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
        """True if a draw depends on earlier tokens themselves, beside their keys and values."""
        return _of_history(self) != _NO_HISTORY

    @property
    def is_guided(self) -> bool:
        """True if the text so far decides which tokens may come next."""
        return self.structured_output is not None or self.thinking_token_budget is not None

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before any tokens are left out of the draw."""
        return _edits(self) != _NO_EDITS


class BeamParams(TypedDict, total=False):
    """Fields of `SamplingParams` that a beam search takes: rows with "taken" in `beams`.

    Type checkers read them here.
    """

    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str]
    logits_processors: Sequence[str]
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool


class Column(NamedTuple):
    """Column of a parameter in the rows that a step draws by (`aioserve.ops.SampleRows`)."""

    dtype: type[np.float64 | np.int64]
    idle: float
    """Value in rows that draw nothing."""
    rehearsed: float
    """Value in rows of the rehearsal that measures what a draw takes."""


class Parameter(msgspec.Struct, frozen=True):
    """One sampling parameter: a row of `PARAMETERS`."""

    rule: Rule[Any]
    """Check at the edge."""
    body: Any = None
    """Type of the field of the same name in OpenAI API bodies, which is handed on unchanged. None:
    a body declares it itself, or doesn't have it.
    """
    ollama: str | None = None
    """Name among Ollama's `options`; None: Ollama doesn't have it."""
    beams: Literal["taken"] | tuple[Any, ...] | None = None
    """Use in beam searches. If "taken", it is an option of `Engine.beam_search`. A tuple holds the
    only values allowed with beams. None: it is an argument of the search, or has no effect there.
    """
    edits: Literal["history", "logits"] | None = None
    """Set if it changes logits before the draw: by the tokens so far ("history"), or without them
    ("logits").
    """
    column: Column | None = None
    """Set if it limits or scales the draw."""


def _top_k(value: object) -> int:
    return max(integer(-1)(value), 0)


PARAMETERS: Final[Mapping[str, Parameter]] = {
    "max_tokens": Parameter(optional(integer(1))),
    "temperature": Parameter(
        number(0, 100),
        body=float,
        ollama="temperature",
        beams=(0.0, 1.0),
        column=Column(np.float64, 0, 1),
    ),
    "top_p": Parameter(
        number(0, 1, above=True),
        body=float,
        ollama="top_p",
        beams=(1.0,),
        column=Column(np.float64, 1, 0.9),
    ),
    "top_k": Parameter(
        _top_k, body=int, ollama="top_k", beams=(0, -1), column=Column(np.int64, 0, 0)
    ),
    "min_p": Parameter(
        number(0, 1),
        body=float,
        ollama="min_p",
        beams=(0.0,),
        column=Column(np.float64, 0, 0.1),
    ),
    "typical_p": Parameter(
        number(0, 1, above=True),
        body=float,
        ollama="typical_p",
        beams=(1.0,),
        column=Column(np.float64, 1, 0.9),
    ),
    "repetition_penalty": Parameter(
        number(0.01, 100), body=float, ollama="repeat_penalty", beams="taken", edits="history"
    ),
    "presence_penalty": Parameter(
        number(-2, 2), body=float, ollama="presence_penalty", beams="taken", edits="history"
    ),
    "frequency_penalty": Parameter(
        number(-2, 2), body=float, ollama="frequency_penalty", beams="taken", edits="history"
    ),
    "logit_bias": Parameter(
        pairs(integer(0), number(-100, 100), MAX_BIASED_TOKENS),
        body=dict[str, float],
        beams="taken",
        edits="logits",
    ),
    "allowed_token_ids": Parameter(
        optional(sequence(integer(0), MAX_ALLOWED_TOKENS, least=1)),
        body=list[int],
        beams="taken",
        edits="logits",
    ),
    "bad_words": Parameter(
        several(text(1, MAX_BAD_WORD_CHARS), MAX_BAD_WORDS),
        body=list[str],
        beams="taken",
        edits="history",
    ),
    "logits_processors": Parameter(
        several(text(1, MAX_PROCESSOR_CHARS), MAX_PROCESSORS), beams="taken", edits="history"
    ),
    "min_tokens": Parameter(integer(0), beams="taken", edits="logits"),
    "seed": Parameter(optional(integer(0, MAX_SEED)), body=int, ollama="seed"),
    "stop": Parameter(
        several(text(1, MAX_STOP_CHARS), MAX_STOP_STRINGS),
        body=str | list[str],
        ollama="stop",
        beams="taken",
    ),
    "stop_token_ids": Parameter(
        several(integer(0), MAX_STOP_TOKEN_IDS), body=list[int], beams="taken"
    ),
    "include_stop_str_in_output": Parameter(boolean, body=bool, beams="taken"),
    "ignore_eos": Parameter(boolean, body=bool, beams="taken"),
    "logprobs": Parameter(optional(integer(0, MAX_LOGPROBS))),
    "prompt_logprobs": Parameter(optional(integer(0, MAX_LOGPROBS)), beams=()),
    "structured_output": Parameter(optional(structured_output)),
    "thinking_token_budget": Parameter(optional(integer(0)), body=int, beams=()),
    "n": Parameter(integer(1)),
    "best_of": Parameter(optional(integer(1))),
    "max_draft_tokens": Parameter(optional(integer(0, MAX_DRAFT_TOKENS)), body=int, beams=(0,)),
    "prediction": Parameter(optional(text(1))),
}
"""Rows in the order of the fields of `SamplingParams`."""


_RULES = {name: row.rule for name, row in PARAMETERS.items()}
# Read for each row of a step, so one call gets all of them.
_of_history = attrgetter(*[name for name, row in PARAMETERS.items() if row.edits == "history"])
_edits = attrgetter(*[name for name, row in PARAMETERS.items() if row.edits is not None])
_NO_HISTORY = _of_history(SamplingParams())
_NO_EDITS = _edits(SamplingParams())
COLUMNS: Final[Mapping[str, Column]] = {
    name: row.column for name, row in PARAMETERS.items() if row.column is not None
}
"""Columns by the names of their parameters."""
DRAWN_FREELY: Final[Mapping[str, Any]] = {name: getattr(SamplingParams(), name) for name in COLUMNS}
"""Values of the parameters with a column that leave the draw unchanged: any token,
temperature 1.
"""
BEAM_DEFAULTS: Final[dict[str, Any]] = {
    name: getattr(SamplingParams(), name)
    for name, row in PARAMETERS.items()
    if row.beams == "taken"
}
"""Defaults of `BeamParams`."""
REHEARSED: Final[Mapping[str, Any]] = {name: one.rehearsed for name, one in COLUMNS.items()}
"""Values of the parameters with a column that make a draw do all that it may have to do."""
