"""Intake of sampling parameters: checks against the model, and values for requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from aioserve.arguments import shown
from aioserve.config import EngineConfig
from aioserve.errors import ConfigError, InvalidSamplingError, PluginError
from aioserve.execution.runner import LoadedModel, ModelLimits
from aioserve.grammars.gbnf import is_gbnf
from aioserve.grammars.schema import check_ends
from aioserve.request import SamplingParams
from aioserve.text.stop import StopAutomaton
from aioserve.text.tokenizer import Tokenizer

__all__ = ["ParamsIntake", "end_ids_of", "no_token_left"]

NUM_PREPARED = 32
"""Number of stop string lists, and of bad word lists, that are kept prepared. All prompts of a
call share one list, and so do most calls of an application."""

WITHOUT_SPECULATION = "the engine has no speculation, so nothing drafts tokens"

FORBIDDING = (
    "structured_output",
    "thinking_token_budget",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "logits_processors",
)
"""Parameters that can forbid a token. Each may be at fault if all tokens are forbidden."""


def no_token_left(params: SamplingParams) -> InvalidSamplingError | None:
    """Make the error of a request without any token left to sample, naming the `params` at fault.

    None if no parameter forbids tokens: then the logits themselves forbid them.
    """
    given = {name: getattr(params, name) for name in FORBIDDING}
    nothing = {"min_tokens": 0, "bad_words": (), "logits_processors": ()}
    named = [name for name, value in given.items() if value not in (None, nothing.get(name))]
    if not named:
        return None
    return InvalidSamplingError(
        f"{' and '.join(named)} must leave a token to draw at each place of a completion, and "
        f"{'together they leave' if len(named) > 1 else 'it leaves'} none at one",
        argument=named[0],
        value=given[named[0]],
    )


class ParamsIntake:
    """Checks the parameters of one engine's requests.

    `logits_processor` returns the number of a processor by name. It raises `ConfigError` or
    `PluginError`.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, logits_processor: Callable[[str], int]
    ) -> None:
        self._model = model
        self._max_num_seqs = config.max_num_seqs
        self._max_draft_tokens = 0 if config.speculation is None else config.speculation.max_tokens
        self._logits_processor = logits_processor
        self._automaton = lru_cache(NUM_PREPARED)(StopAutomaton)
        self._spelled = lru_cache(NUM_PREPARED)(self._spellings)

    def checked(self, params: SamplingParams | None) -> SamplingParams:
        """Return the params, or the model's defaults for None. Raises `InvalidSamplingError`."""
        if params is None:
            return self._model.defaults
        if not issubclass(type(params), SamplingParams):  # a mock of one isn't one
            raise InvalidSamplingError(
                f"params must be SamplingParams, got {shown(params)}",
                argument="params",
                value=params,
            )
        self._check_samples(params)
        for argument in ("stop", "bad_words"):
            if texts := getattr(params, argument):
                self._tokenizer_for(argument, texts)
        self._check_structured_output(params)
        self._check_vocabulary(params)
        self._check_drafting(params)
        return params

    def _check_samples(self, params: SamplingParams) -> None:
        if params.n > (most := self._max_num_seqs):
            argument = "n" if params.best_of is None else "best_of"
            raise InvalidSamplingError(
                f"{argument} must be at most max_num_seqs = {most}, got {params.n}",
                argument=argument,
                value=params.n,
                limit=most,
            )
        if params.best_of is not None and params.best_of > params.n:
            raise InvalidSamplingError(
                f"best_of must be at most n = {params.n} where tokens are streamed, got "
                f"{params.best_of}; `generate` takes it",
                argument="best_of",
                value=params.best_of,
                limit=params.n,
            )

    def _tokenizer_for(self, argument: str, texts: Sequence[str]) -> Tokenizer:
        if self._model.tokenizer is None:
            raise InvalidSamplingError(
                f"{argument} must be empty without a tokenizer, got {shown(texts)}; "
                f"{self._model.why_no_tokenizer}",
                argument=argument,
                value=texts,
            )
        return self._model.tokenizer

    def _check_structured_output(self, params: SamplingParams) -> None:
        output, tokenizer, why = params.structured_output, self._model.tokenizer, None
        if output is None:
            return
        grammar = output.grammar
        if tokenizer is not None and grammar is not None and not is_gbnf(grammar):
            check_ends(grammar, tokenizer.special_names, self.end_ids(params))
        if tokenizer is None:
            why = f"without a tokenizer; {self._model.why_no_tokenizer}"
        elif not self.end_ids(params):
            why = "where no token id ends an answer"
        if why is not None:
            raise InvalidSamplingError(
                f"structured_output must be None {why}, got {shown(output)}",
                argument="structured_output",
                value=output,
            )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        vocab_size = self._model.limits.vocab_size
        for argument in ("logprobs", "prompt_logprobs"):
            if (getattr(params, argument) or 0) > vocab_size:
                raise InvalidSamplingError(
                    f"{argument} must be at most the vocabulary size {vocab_size}, "
                    f"got {getattr(params, argument)}",
                    argument=argument,
                    value=getattr(params, argument),
                    limit=vocab_size,
                )
        named = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": list(dict(params.logit_bias)),
            "allowed_token_ids": params.allowed_token_ids,
        }
        for argument, token_ids in named.items():
            largest = max(token_ids or (), default=0)
            if largest >= vocab_size:
                raise InvalidSamplingError(
                    f"{argument} must be below the vocabulary size {vocab_size}, got {largest}",
                    argument=argument,
                    value=largest,
                    limit=vocab_size,
                )

    def _check_drafting(self, params: SamplingParams) -> None:
        most, wanted, prediction = (
            self._max_draft_tokens,
            params.max_draft_tokens,
            params.prediction,
        )
        if wanted is not None and wanted > most:
            limit = f"the engine's speculation allows {most}" if most else WITHOUT_SPECULATION
            raise InvalidSamplingError(
                f"max_draft_tokens must be at most {most}, got {wanted}: {limit}",
                argument="max_draft_tokens",
                value=wanted,
                limit=most,
            )
        if prediction is None:
            return
        if not most:
            raise InvalidSamplingError(
                f"prediction must be None, got {shown(prediction)}: {WITHOUT_SPECULATION}",
                argument="prediction",
                value=prediction,
            )
        if self._model.tokenizer is None:
            raise InvalidSamplingError(
                f"prediction must be None without a tokenizer, got {shown(prediction)}; "
                f"{self._model.why_no_tokenizer}",
                argument="prediction",
                value=prediction,
            )

    # -- values for requests

    def max_draft_tokens(self, params: SamplingParams) -> int:
        """Return the most draft tokens of an answer that a step may verify; 0 for none.

        Logits processors may count on one call a token, which wrong draft tokens would break.
        """
        if params.logits_processors:
            return 0
        wanted = params.max_draft_tokens
        return self._max_draft_tokens if wanted is None else wanted

    def processors(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the numbers of the named logits processors. Raises `InvalidSamplingError`."""
        numbers: list[int] = []
        for index, given in enumerate(params.logits_processors):
            try:
                numbers.append(self._logits_processor(given))
            except (ConfigError, PluginError) as error:
                raise InvalidSamplingError(
                    f"logits_processors[{index}]: {error}",
                    argument="logits_processors",
                    value=given,
                ) from error
        return tuple(numbers)

    def end_ids(self, params: SamplingParams) -> frozenset[int]:
        return end_ids_of(self._model.limits, params)

    def stops(self, params: SamplingParams) -> StopAutomaton | None:
        """Return the automaton of the stop strings, shared by all samples; None without any."""
        return self._automaton(tuple(params.stop)) if params.stop else None

    def bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each spelling of each bad word."""
        return self._spelled(tuple(params.bad_words)) if params.bad_words else ()

    def _spellings(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        tokenizer = self._tokenizer_for("bad_words", words)
        vocab_size = self._model.limits.vocab_size
        every = [ids for word in words for ids in tokenizer.spellings(word)]
        # Drop spellings with tokens that the model has no logits for: they are never drawn.
        return tuple([ids for ids in every if max(ids) < vocab_size])


def end_ids_of(limits: ModelLimits, params: SamplingParams) -> frozenset[int]:
    """Return the ids that end a completion and can be sampled. A config may name others."""
    own = frozenset(params.stop_token_ids)
    every = own if params.ignore_eos else own | limits.eos_token_ids
    return frozenset([token_id for token_id in every if token_id < limits.vocab_size])
