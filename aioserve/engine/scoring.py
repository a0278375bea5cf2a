"""How likely a model finds a given continuation: log-probabilities of its tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from aioserve.arguments import check, integer
from aioserve.engine.continuations import ContinuedPrompt, checked_continuation
from aioserve.engine.intake import ChatArguments, Prompt
from aioserve.engine.lifecycle import EngineLifecycle
from aioserve.engine.looks import check_options, ids_of, looked_at, placed
from aioserve.engine.mailbox import Mailbox
from aioserve.errors import InvalidRequestError
from aioserve.request import MAX_LOGPROBS, Logprobs, SamplingParams, Timings, Usage

__all__ = ["Score", "scores_of"]


class Score(msgspec.Struct, frozen=True):
    """How likely one continuation of a prompt is."""

    request_id: str
    token_ids: tuple[int, ...]
    """Of the continuation."""
    logprobs: tuple[Logprobs, ...]
    """One for each of `token_ids`."""
    usage: Usage
    """Its `prompt_tokens` are those of prompt and continuation together; nothing is generated."""
    timings: Timings

    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability of the whole continuation: the sum over its
        tokens."""
        return math.fsum(one.logprob for one in self.logprobs)


async def scores_of(
    usable: Callable[[], EngineLifecycle],
    prompt: Prompt,
    continuations: Sequence[Any],
    *,
    several: str | None,
    top_logprobs: int,
    request_id: str | None = None,
    **wishes: Any,
) -> list[Score]:
    """Of each of `continuations`, behind the same prompt; `usable` gives the engine or raises, and
    `several` is the name of the argument, where it is a list.

    The first is computed with the prompt, and then the others, which find the prompt's KV in the
    prefix cache: together, they would all begin with the prompt.
    """
    check_options("score" if several is None else "score_each", wishes)
    live = usable()
    limits, encoder = live.model.limits, live.intake.encoder
    top = check(InvalidRequestError, "top_logprobs", top_logprobs, integer(0, MAX_LOGPROBS))
    if top > limits.vocab_size:
        raise InvalidRequestError(
            f"top_logprobs must be at most the vocabulary size {limits.vocab_size}, got {top}",
            argument="top_logprobs",
            value=top,
            limit=limits.vocab_size,
        )
    parts = []
    for index, part in enumerate(continuations):
        with placed(several, index):
            check_text = partial(encoder.check_text, "continuation")
            parts.append(checked_continuation(part, limits, check_text))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=top)
    request_ids = ids_of(request_id, len(parts) if several else None)
    first = ContinuedPrompt(live.intake.checked_prompt(prompt, ChatArguments()), parts[0])
    others = [ContinuedPrompt(None, part) for part in parts[1:]]

    def submit(continued: ContinuedPrompt, request_id: str | None) -> Mailbox:
        intake = usable().intake
        return intake.submit(continued, params, request_id, look=continued, **wishes)

    every = [partial(submit, *one) for one in zip([first, *others], request_ids, strict=True)]
    async with looked_at(every[:1], live.turns, several) as mailboxes:
        scores = [_score(first, mailbox) for mailbox in mailboxes]
    for one in others:
        one.prompt = first.prompt_ids
    async with looked_at(every[1:], live.turns, several, first=1) as mailboxes:
        return scores + [_score(*one) for one in zip(others, mailboxes, strict=True)]


def _score(continued: ContinuedPrompt, mailbox: Mailbox) -> Score:
    return Score(
        request_id=mailbox.request_id,
        token_ids=continued.continuation_ids,
        logprobs=tuple([one for one in mailbox.prompt_logprobs if one is not None]),
        usage=mailbox.usage,
        timings=mailbox.timings,
    )
