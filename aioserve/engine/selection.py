"""The likeliest of several continuations of one prompt.

    score_each ──► log-probability of each, in all or per token ──► the highest

Knows scores; must not know how they are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from aioserve.arguments import brief, check, choice, plain_str, quoted
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.prompt_only import Score, scores_of
from aioserve.engine.prompts import Prompt, listed
from aioserve.errors import InvalidRequestError

__all__ = ["Likelihood", "Selection", "selection_of"]

Likelihood = Literal["mean", "total"]
"""Figure by which continuations are compared: log-probability per token, or in all."""


class Selection(msgspec.Struct, frozen=True):
    """The likeliest of several continuations, and how likely each is."""

    index: int
    """Place of the likeliest among the continuations, from 0; of equals, that of the first."""
    text: str
    """Text of the likeliest. Token ids are decoded; empty without a tokenizer."""
    logprobs: tuple[float, ...]
    """Natural logarithms, one for each continuation in order: the figure they are compared by."""
    scores: tuple[Score, ...]
    """Scores in the same order, with the log-probability of each token."""

    def __repr__(self) -> str:
        return brief(self, self.index, quoted(self.text), logprob=self.logprobs[self.index])


async def selection_of(
    engine: EngineLifecycle,
    prompt: Prompt,
    continuations: Sequence[Any],
    *,
    by: object,
    **options: Any,
) -> Selection:
    """Score each of `continuations` and select the likeliest. Raises what `Engine.select` says."""
    live = engine.usable()
    figure = check(InvalidRequestError, "by", by, choice("mean", "total"))
    every = listed("continuations", continuations, live.config.max_waiting)
    scores = await scores_of(
        engine, prompt, every, several="continuations", top_logprobs=0, **options
    )
    logprobs = [
        score.logprob / (len(score.token_ids) if figure == "mean" else 1) for score in scores
    ]
    index = max(range(len(logprobs)), key=logprobs.__getitem__)
    text, tokenizer = plain_str(every[index]), live.model.tokenizer
    if text is None:
        text = "" if tokenizer is None else tokenizer.decode(scores[index].token_ids)
    return Selection(index, text, tuple(logprobs), tuple(scores))
