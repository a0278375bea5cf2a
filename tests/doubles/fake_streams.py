"""Streams of a `FakeEngine`: one answer, a token for each byte, given out on demand."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Sequence
from typing import Self

from aioserve import (
    ChatAnswer,
    ChatCompletion,
    ChatDelta,
    FinishReason,
    Logprobs,
    SamplingParams,
    Timings,
    Token,
    TopLogprob,
    Usage,
)
from aioserve.errors import AioserveError
from aioserve.timings import loop_seconds

__all__ = ["LOGPROB", "FakeChatStream", "FakeRequest", "FakeTokenStream", "text_of"]

LOGPROB = -1.0
"""Log-probability of every token."""


class FakeRequest:
    """One request: its answers, and the part of them that was given out."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        answer: bytes,
        params: SamplingParams,
        ended: Callable[[FakeRequest], None],
        stalls_after: int | None = None,
    ) -> None:
        self.request_id: str = request_id
        self.tenant: str | None = None
        self.prompt_ids: tuple[int, ...] = tuple(prompt_ids)
        self.params: SamplingParams = params
        self.finish_reason: FinishReason | None = None
        self.error: AioserveError | None = None
        self.num_given: int = 0
        most = len(answer) if params.max_tokens is None else params.max_tokens
        self.reason: FinishReason = FinishReason.LENGTH if most < len(answer) else FinishReason.STOP
        """Reason of each answer's end."""
        ids = answer[:most]
        decode = codecs.getincrementaldecoder("utf-8")().decode
        texts = [decode(bytes([token_id])) for token_id in ids]
        self._tokens = [
            Token(
                token_id,
                texts[place],
                place,
                sample,
                None if params.logprobs is None else logprobs_of(token_id, params.logprobs),
            )
            for place, token_id in enumerate(ids)
            for sample in range(params.n)
        ]
        self._ended = ended
        self._stalls_after = len(self._tokens) if stalls_after is None else stalls_after
        self._has_ended = asyncio.Event()
        self._began = loop_seconds()
        self._total_seconds: float | None = None

    @property
    def timings(self) -> Timings:
        total = self._total_seconds
        return Timings(
            first_token_seconds=0.0 if self.num_given else None,
            total_seconds=loop_seconds() - self._began if total is None else total,
            completion_tokens=self.num_given,
        )

    async def take(self, num_tokens: int) -> list[Token]:
        """Return the next tokens; none at the end. Raises the error that ended the request."""
        if self.num_given == self._stalls_after < len(self._tokens):
            await self._has_ended.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error.copy()
        if self.finish_reason is not None:
            return []
        tokens = self._tokens[self.num_given : self._stalls_after][:num_tokens]
        self.num_given += len(tokens)
        if self.num_given == len(self._tokens):
            self._end(self.reason)
        return tokens

    def close(self) -> None:
        self._end(FinishReason.ABORT)

    def end(self, error: AioserveError) -> None:
        """End the request with an error, which readers get."""
        self.error = error
        self._end(FinishReason.ERROR)

    def _end(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self._total_seconds = self.timings.total_seconds
            self.finish_reason = reason
            self._has_ended.set()
            self._ended(self)


class _FakeStream:
    """The part that both kinds of streams share."""

    def __init__(self, request: FakeRequest) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._request.finish_reason

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        return (self._request.finish_reason,) * self._request.params.n

    @property
    def stop_reasons(self) -> tuple[int | str | None, ...]:
        return (None,) * self._request.params.n

    @property
    def usage(self) -> Usage:
        return Usage(len(self._request.prompt_ids), self._request.num_given)

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._request.prompt_ids

    @property
    def prompt_logprobs(self) -> tuple[Logprobs | None, ...]:
        top = self._request.params.prompt_logprobs
        if top is None:
            return ()
        return (None, *[logprobs_of(one, top) for one in self._request.prompt_ids[1:]])

    @property
    def timings(self) -> Timings:
        return self._request.timings

    async def started(self) -> None:
        if self._request.error is not None:
            raise self._request.error.copy()

    def close(self) -> None:
        self._request.close()


class FakeTokenStream(_FakeStream):
    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Token:
        for token in await self._request.take(1):
            return token
        raise StopAsyncIteration

    async def batch(self, min_tokens: int = 1) -> list[Token]:
        return await self._request.take(min_tokens)


class FakeChatStream(_FakeStream):
    def __init__(self, request: FakeRequest) -> None:
        super().__init__(request)
        self._read: list[Token] = []

    @property
    def reasoning_tokens(self) -> int:
        return 0

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ChatDelta:
        for delta in await self.batch():
            return delta
        raise StopAsyncIteration

    async def batch(self, min_tokens: int = 1, *, by_token: bool = False) -> list[ChatDelta]:
        tokens = await self._request.take(min_tokens)
        self._read += tokens
        return [ChatDelta(one.text, sample=one.sample, tokens=(one,)) for one in tokens]

    async def completion(self) -> ChatCompletion:
        async for _ in self:
            pass
        answers: list[ChatAnswer] = []
        for sample, reason in enumerate(self.finish_reasons):
            own = tuple([token for token in self._read if token.sample == sample])
            content = "".join([token.text for token in own])
            answers.append(ChatAnswer(content, "", (), reason or FinishReason.ABORT, own))
        return ChatCompletion(self.request_id, tuple(answers), self.usage, self.timings)


def text_of(ids: bytes | Sequence[int]) -> str:
    """Text of the complete characters."""
    return bytes(ids).decode("utf-8", "ignore")


def logprobs_of(token_id: int, top: int) -> Logprobs:
    others = [other for other in range(top) if other != token_id]
    likely = [token_id, *others][:top]
    return Logprobs(LOGPROB, tuple([TopLogprob(one, LOGPROB) for one in likely]))
