"""`SamplingParams`, and `PARAMETERS`: one table of all that is known of each of them.

A parameter is a field of the class and a row of the table. Made from the rows are the checks at the
edge, fields of bodies that APIs share, what beam searches take and refuse, and the columns of the
rows that backends draw by. What a parameter does to logits stands where it is done, in
`aioserve.sampling.edits` and `aioserve.ops`.

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
    """Most tokens that the engine's drafter may propose for an answer in one step, in [0, 64]: 0
    asks for none, and with `logits_processors` none are. None: as many as the engine's
    `speculation` allows, which is the limit. It changes no token, unless draft tokens are verified
    by rejection."""
    prediction: str | None = None
    """What the answer will be, or much of it, such as the text that it is to edit: the drafter
    goes by it. It changes no token. For an engine with `speculation`, and a model with a
    tokenizer."""

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
        """True if a draw depends on the tokens before it, beside their keys and values."""
        return _of_history(self) != _NO_HISTORY

    @property
    def is_guided(self) -> bool:
        """True if the text so far decides which tokens may come next."""
        return self.structured_output is not None or self.thinking_token_budget is not None

    @property
    def edits_logits(self) -> bool:
        """True if logits are changed before anything of them is left out."""
        return _edits(self) != _NO_EDITS


class BeamParams(TypedDict, total=False):
    """Fields of `SamplingParams` that a beam search takes: rows with "taken" in `beams`. Type
    checkers read them here."""

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
    """The column of a parameter in the rows that a step draws by (`aioserve.ops.SampleRows`)."""

    dtype: type[np.float64 | np.int64]
    idle: float
    """Value in rows that draw nothing."""
    rehearsed: float
    """Value in rows that are drawn to see what that takes."""


class Parameter(msgspec.Struct, frozen=True):
    """One row: a sampling parameter, beside its type and its default."""

    rule: Rule[Any]
    """Check at the edge."""
    body: Any = None
    """Type of the field of its name in bodies of the OpenAI API, where it is handed on as it is.
    None: a body declares it, or hasn't got it."""
    ollama: str | None = None
    """Name among Ollama's `options`; None: it isn't there."""
    beams: Literal["taken"] | tuple[Any, ...] | None = None
    """"taken": an option of `Engine.beam_search`. A tuple: refused with beams, but for these
    values. None: it is an argument of the search, or nothing comes of it."""
    edits: Literal["history", "logits"] | None = None
    """It changes logits before the draw: by the tokens so far, or without them."""
    column: Column | None = None
    """It limits or scales the draw."""


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
# Looked at for each row of a step: one call gets them all.
_of_history = attrgetter(*[name for name, row in PARAMETERS.items() if row.edits == "history"])
_edits = attrgetter(*[name for name, row in PARAMETERS.items() if row.edits is not None])
_NO_HISTORY = _of_history(SamplingParams())
_NO_EDITS = _edits(SamplingParams())
COLUMNS: Final[Mapping[str, Column]] = {
    name: row.column for name, row in PARAMETERS.items() if row.column is not None
}
"""Columns by the names of their parameters."""
DRAWN_FREELY: Final[Mapping[str, Any]] = {name: getattr(SamplingParams(), name) for name in COLUMNS}
"""Values of parameters with a column by which every token may be drawn, at temperature 1."""
BEAM_DEFAULTS: Final[dict[str, Any]] = {
    name: getattr(SamplingParams(), name)
    for name, row in PARAMETERS.items()
    if row.beams == "taken"
}
"""Defaults of `BeamParams`."""
REHEARSED: Final[Mapping[str, Any]] = {name: one.rehearsed for name, one in COLUMNS.items()}
"""Values of them that ask for everything that a draw may have to do."""
