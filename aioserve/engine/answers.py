"""From the tokens of a stream to whole answers, and the best of more than were asked for.

Knows streams and what they bring; must not know the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aioserve.engine.stream import TokenStream
from aioserve.request import Completion, FinishReason, Logprobs, Sample, SamplingParams, Token

__all__ = ["drawn_for", "read_whole"]


def drawn_for(params: SamplingParams | None) -> SamplingParams | None:
    """What to draw where `params` are asked for: of `best_of` answers all, with log-probabilities
    to compare them by."""
    # What is no SamplingParams is refused where requests come in.
    if params is None or not issubclass(type(params), SamplingParams):
        return params
    if params.best_of is None or params.best_of == params.n:
        return params
    return msgspec.structs.replace(params, n=params.best_of, logprobs=params.logprobs or 0)


async def read_whole(stream: TokenStream, params: SamplingParams | None) -> Completion:
    """All that `stream` brings, which was asked for `drawn_for(params)`: the `n` best answers.
    Raises what ended the request, if that was an error."""
    tokens: list[list[Token]] = [[] for _ in stream.finish_reasons]
    async with stream:
        async for token in stream:
            tokens[token.sample].append(token)
    ends = zip(tokens, stream.finish_reasons, stream.stop_reasons, strict=True)
    samples = [
        Sample(
            text="".join([token.text for token in answer]),
            token_ids=tuple([token.id for token in answer]),
            finish_reason=reason or FinishReason.ABORT,
            logprobs=_logprobs_of(answer),
            stop_reason=stop_reason,
        )
        for answer, reason, stop_reason in ends
    ]
    if params is not None and len(samples) > params.n:
        samples = sorted(samples, key=_mean_logprob, reverse=True)[: params.n]
        if params.logprobs is None:
            samples = [msgspec.structs.replace(sample, logprobs=None) for sample in samples]
    prompt_logprobs = None
    if params is not None and params.prompt_logprobs is not None:
        prompt_logprobs = stream.prompt_logprobs
    return Completion(
        stream.request_id, tuple(samples), stream.usage, stream.timings, prompt_logprobs
    )


def _logprobs_of(answer: Sequence[Token]) -> tuple[Logprobs, ...] | None:
    """One for each token, or none at all."""
    found = [token.logprobs for token in answer if token.logprobs is not None]
    return tuple(found) or None


def _mean_logprob(sample: Sample) -> float:
    return (sample.cumulative_logprob or 0.0) / len(sample.token_ids)
