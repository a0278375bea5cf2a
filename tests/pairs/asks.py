"""Requests of the matrix, how they are read, and their results.

An `Ask` has everything that may change a token. `give` sends it to an engine and reads it to its
end, late, or in part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioserve import Beam, Engine, FinishReason, Logprobs, SamplingParams, Token
from aioserve.sampling_params import BEAM_DEFAULTS

__all__ = ["BEAM_WIDTH", "POOLINGS", "Ask", "Brought", "Moments", "give"]

BEAM_WIDTH = 3
POOLINGS = ("last", "mean")


@dataclass(frozen=True)
class Ask:
    """One request, and how its caller reads it."""

    name: str
    """Unique in a scene."""
    prompt: tuple[int, ...]
    params: SamplingParams
    way: str = "tokens"
    """Way of the request: tokens, beams, or the pooling of an embedding: last, mean."""
    late: bool = False
    """True if nothing is read before all others are done."""
    leave_after: int | None = None
    """Number of tokens after which the caller leaves. Number of steps if there are no tokens to
    count."""
    hints: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Hints for a policy. No token depends on them."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that its result depends on."""
        return (self.prompt, self.params, self.way)

    @property
    def most_tokens(self) -> int:
        """Most KV tokens that it can hold at once."""
        sequences = BEAM_WIDTH if self.way == "beams" else self.params.n
        answer = 1 if self.way in POOLINGS else self.params.max_tokens or 0
        return sequences * (len(self.prompt) + answer)


@dataclass(frozen=True)
class Brought:
    """Result of a request."""

    ids: tuple[tuple[int, ...], ...] = ()
    """Ids of each sample."""
    texts: tuple[str, ...] = ()
    reasons: tuple[FinishReason | None, ...] = ()
    stop_reasons: tuple[int | str | None, ...] = ()
    logprobs: tuple[tuple[Logprobs | None, ...], ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    beams: tuple[Beam, ...] = ()
    vector: tuple[float, ...] = ()
    cached_tokens: int | None = field(default=None, compare=False)
    """Prompt tokens found in the prefix cache, if reported; 0 if it wasn't begun."""
    drafted_tokens: int = field(default=0, compare=False)
    """Draft tokens that steps verified for it."""
    left: bool = field(default=False, compare=False)
    """True if the caller left before the end."""

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))

    def begins(self, whole: Brought) -> bool:
        """True if it is the beginning of `whole`, as far as it was read."""
        return all(
            sample == of[: len(sample)] and text == of_text[: len(text)]
            for sample, of, text, of_text in zip(
                self.ids, whole.ids, self.texts, whole.texts, strict=True
            )
        )


@dataclass(frozen=True)
class Moments:
    """Times at which callers act that don't read at once."""

    others_done: Callable[[], Awaitable[None]]
    steps: Callable[[int], Awaitable[None]]
    """Wait until that many further steps are done, or none come."""


async def give(engine: Engine, ask: Ask, moments: Moments | None = None) -> Brought:
    """Send a request and read it as its caller does; without `moments`, to the end at once."""
    if ask.way != "tokens":
        if moments is None or ask.leave_after is None:
            return await _whole(engine, ask)
        asking = asyncio.ensure_future(_whole(engine, ask))
        await moments.steps(ask.leave_after)
        asking.cancel()
        await asyncio.wait([asking])
        return Brought(left=True) if asking.cancelled() else asking.result()
    stream = engine.stream(list(ask.prompt), ask.params, request_id=ask.name, **ask.hints)
    tokens: list[list[Token]] = [[] for _ in range(ask.params.n)]
    left = False
    async with stream:
        if moments is not None and ask.late:
            await moments.others_done()
        if moments is None or ask.leave_after != 0:
            async for token in stream:
                tokens[token.sample].append(token)
                if moments is not None and sum(map(len, tokens)) == ask.leave_after:
                    break
        left = stream.finish_reason is None
        reasons = stream.finish_reasons
    return Brought(
        ids=tuple([tuple([token.id for token in sample]) for sample in tokens]),
        texts=tuple(["".join([token.text for token in sample]) for sample in tokens]),
        reasons=reasons,
        stop_reasons=stream.stop_reasons,
        logprobs=tuple([tuple([token.logprobs for token in sample]) for sample in tokens]),
        prompt_logprobs=stream.prompt_logprobs,
        cached_tokens=stream.usage.cached_tokens,
        drafted_tokens=stream.usage.drafted_tokens,
        left=left,
    )


async def _whole(engine: Engine, ask: Ask) -> Brought:
    if ask.way == "beams":
        few = {name: ask.hints[name] for name in ("tenant", "priority") if name in ask.hints}
        beams = await engine.beam_search(
            list(ask.prompt),
            beam_width=BEAM_WIDTH,
            max_tokens=ask.params.max_tokens,
            **{name: getattr(ask.params, name) for name in BEAM_DEFAULTS},
            **few,
        )
        return Brought(beams=beams)
    some = {name: ask.hints[name] for name in ("tenant", "priority") if name in ask.hints}
    vector, usage = await engine.embed_counted(
        list(ask.prompt),
        pooling=ask.way,  # pyright: ignore[reportArgumentType]
        request_id=ask.name,
        **some,
    )
    return Brought(vector=tuple(map(float, vector)), cached_tokens=usage.cached_tokens)
