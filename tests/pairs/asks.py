"""Requests of the matrix, how they are read, and their results.

An `Ask` has everything that may change a token. `give` sends it to an engine and reads it to its
end, late, or in part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aioserve import Beam, Engine, FinishReason, Logprobs, SamplingParams, Token, TokenStream
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
    fork_after: int | None = None
    """The caller forks the stream after so many tokens, and reads a branch of each sample in place
    of the rest."""
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
    forked: int = field(default=0, compare=False)
    """Branches that brought a token."""
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
    asked_by: dict[str, str]
    """Names of requests, by the ids of their branches."""


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
    reading = _Reading(ask, stream, moments)
    async with stream:
        if moments is not None and ask.late:
            await moments.others_done()
        await reading.read()
        reasons, tokens = reading.reasons, reading.tokens
    reading.close()
    return Brought(
        ids=tuple([tuple([token.id for token in sample]) for sample in tokens]),
        texts=tuple(["".join([token.text for token in sample]) for sample in tokens]),
        reasons=reasons,
        stop_reasons=reading.stop_reasons,
        logprobs=tuple([tuple([token.logprobs for token in sample]) for sample in tokens]),
        prompt_logprobs=stream.prompt_logprobs,
        cached_tokens=stream.usage.cached_tokens,
        drafted_tokens=reading.drafted_tokens,
        forked=reading.forked,
        left=None in reasons,
    )


class _Reading:
    """A request of tokens as its caller reads it, branches in place of the stream included."""

    def __init__(self, ask: Ask, stream: TokenStream, moments: Moments | None) -> None:
        self.tokens: list[list[Token]] = [[] for _ in range(ask.params.n)]
        self.ends: list[tuple[TokenStream, int]] = [(stream, at) for at in range(ask.params.n)]
        """Streams that each sample is read to its end from, and its number there."""
        self.forked: int = 0
        self._ask = ask
        self._stream = stream
        self._moments = moments
        self._leave_after = None if moments is None else ask.leave_after

    async def read(self) -> None:
        """Read to the end, or until the caller leaves."""
        moments, fork_after = self._moments, self._ask.fork_after
        if moments is None or fork_after is None:
            await self._read(self._stream)
            return
        await self._read(self._stream, fork_after)
        if self._count == self._leave_after:
            return
        waiting = {token.sample for token in self._stream._mailbox._tokens}
        for at, reason in enumerate(self._stream.finish_reasons):
            if reason is None or at in waiting:
                (branch,) = self._stream.fork(1, sample=at)
                moments.asked_by[branch.request_id] = self._ask.name
                self.ends[at] = branch, 0
        self._stream.close()
        for at, (stream, _) in enumerate(self.ends):
            if stream is not self._stream:
                before = self._count
                await self._read(stream, sample=at)
                self.forked += self._count > before

    @property
    def _count(self) -> int:
        return sum(map(len, self.tokens))

    async def _read(
        self, stream: TokenStream, most: int | None = None, sample: int | None = None
    ) -> None:
        while self._count not in (most, self._leave_after):
            token = await anext(stream, None)
            if token is None:
                return
            self.tokens[token.sample if sample is None else sample].append(token)

    @property
    def reasons(self) -> tuple[FinishReason | None, ...]:
        return tuple([stream.finish_reasons[at] for stream, at in self.ends])

    @property
    def stop_reasons(self) -> tuple[int | str | None, ...]:
        return tuple([stream.stop_reasons[at] for stream, at in self.ends])

    @property
    def drafted_tokens(self) -> int:
        every = {id(one): one for one in (self._stream, *[stream for stream, _ in self.ends])}
        return sum([stream.usage.drafted_tokens for stream in every.values()])

    def close(self) -> None:
        for stream, _ in self.ends:
            stream.close()


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
