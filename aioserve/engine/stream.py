"""Streams of one request as its caller sees it, and whole completions read from them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import NoReturn, Self

import msgspec

from aioserve.arguments import MAX_INT, check, integer
from aioserve.engine.event_loop import check_on, running_loop
from aioserve.engine.interface import TokenStreamLike
from aioserve.engine.mailbox import Mailbox
from aioserve.engine.misuse import ReadByAsync
from aioserve.errors import InvalidRequestError
from aioserve.request import (
    Completion,
    FinishReason,
    Logprobs,
    Sample,
    SamplingParams,
    Token,
    Usage,
)
from aioserve.timings import Timings

__all__ = ["RequestStream", "TokenStream", "collect", "with_best_of", "yield_before"]


class RequestStream(ReadByAsync):
    """What streams of a request have in common. A stream owns its request: leaving it ends it."""

    __slots__ = ("__weakref__", "_mailbox")

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    @property
    def request_id(self) -> str:
        return self._mailbox.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the stream ended; None while any sample goes on. Where every sample came to its own
        end, that of the first."""
        return self._mailbox.finish_reason

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Why each sample ended; None for those that go on."""
        return tuple(self._mailbox.finish_reasons)

    @property
    def stop_reasons(self) -> tuple[int | str | None, ...]:
        """The entry of `SamplingParams.stop` or `stop_token_ids` that ended each sample; None where
        none of them did, and for samples that go on."""
        return tuple(self._mailbox.stop_reasons)

    @property
    def usage(self) -> Usage:
        """Prompt tokens (0 until the prompt is encoded), those of them that were found in the
        prefix cache (0 until the request starts), and tokens generated so far."""
        return self._mailbox.usage

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """What the prompt became; empty until it is encoded."""
        return tuple([int(token_id) for token_id in self._mailbox.prompt_ids])

    @property
    def prompt_logprobs(self) -> tuple[Logprobs | None, ...]:
        """One for each token of the prompt, None for the first, once the first token of the answer
        is there; empty unless `SamplingParams.prompt_logprobs` asks for them."""
        return tuple(self._mailbox.prompt_logprobs)

    @property
    def timings(self) -> Timings:
        """What took how long: until the end, and while there is none, until now."""
        return self._mailbox.timings

    def __aiter__(self) -> Self:
        return self

    async def started(self) -> None:
        """Wait until the first token is there, or the end. Raises what ended the request, if that
        was an error, as the next read will: for those who must know before they begin to answer,
        such as a web handler that can still say 400."""
        self._check_loop()
        while self._mailbox.lacks():
            await self._arrival()
        self._mailbox.raise_error()

    async def _batch(self, min_tokens: int) -> list[Token]:
        """Tokens as `TokenStream.batch` gives them."""
        if type(min_tokens) is not int or not 1 <= min_tokens <= MAX_INT:
            min_tokens = check(InvalidRequestError, "min_tokens", min_tokens, integer(1, MAX_INT))
        mailbox = self._mailbox
        self._check_loop()
        while mailbox.lacks(min_tokens):
            await self._arrival(min_tokens)
        return mailbox.take_all()

    async def _arrival(self, min_tokens: int = 1) -> None:
        """A reader that is cancelled while it waits has left."""
        try:
            await self._mailbox.arrival(min_tokens)
        except asyncio.CancelledError:
            self._mailbox.abort()
            raise

    def _check_loop(self) -> None:
        mailbox = self._mailbox
        if running_loop() is not mailbox.loop or os.getpid() != mailbox.pid:
            check_on(mailbox.loop, mailbox.pid, f"request {self.request_id!r}")

    def close(self) -> None:
        """End the request if it hasn't ended. Awaits nothing; call it as often as you like, from
        any thread."""
        mailbox = self._mailbox
        if running_loop() is mailbox.loop:
            mailbox.abort()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing is left to free
                mailbox.loop.call_soon_threadsafe(mailbox.abort)

    async def aclose(self) -> None:
        """Do what `close()` does, for `contextlib.aclosing`."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The collector may run on any thread, and after a constructor that failed.
        mailbox = getattr(self, "_mailbox", None)
        if mailbox is not None and mailbox.finish_reason is None:
            self.close()

    def __reduce__(self) -> NoReturn:
        # The end of a copy would be that of the request.
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r}, {self.finish_reason or 'open'})"


class TokenStream(RequestStream):
    """The tokens of one request, in order. It owns the request: leaving the stream ends it.

    The tokens of several samples (`SamplingParams.n`) come interleaved, as they are computed; those
    of each sample are in order. What ends the request ends all of them.

    A class and not an async generator, because a generator that is dropped is only closed when the
    event loop gets round to it. Each of these ends the request: the end of an `async with` block,
    `close()`, cancellation or a timeout of the task that is waiting for a token, and garbage
    collection. No later step works for it then, and its pages come back when the steps in flight,
    two at most, are done. A plain `async for token in engine.stream(...)` that is left by `break`
    or an exception is ended by the collector; where the stream is kept in a variable, prefer
    `async with`.

    One task reads a stream, on the engine's event loop; a second one gets `StreamBusyError`. If an
    error ended the request, every read after the last token raises it, so that an answer which is
    not whole never looks so.
    """

    __slots__ = ()

    @property
    def stop_reason(self) -> int | str | None:
        """What ended the first sample, as in `stop_reasons`."""
        return self._mailbox.stop_reasons[0]

    async def __anext__(self) -> Token:
        """The next token. Raises what ended the request, if that was an error."""
        mailbox = self._mailbox
        self._check_loop()
        while mailbox.lacks():
            await self._arrival()
        token = mailbox.take()
        if token is None:
            raise StopAsyncIteration
        return token

    async def batch(self, min_tokens: int = 1) -> list[Token]:
        """All tokens that are there, at least one, for which it waits; none at the end. For those
        who send them on and would rather send few things than many. Once a sample's end is in
        `finish_reasons`, all of its tokens were given out. Raises as `__anext__` does.

        It waits for `min_tokens` tokens for each sample that goes on, but never longer once there
        is a sample's first token or its last, the end of the request, or as many tokens as half of
        `max_buffered_tokens`. Raises `InvalidRequestError` for one below 1."""
        return await self._batch(min_tokens)


def with_best_of(params: SamplingParams | None) -> SamplingParams | None:
    """Return `params` with `best_of` samples in place of `n`, and with log-probabilities to compare
    them by."""
    # What is no SamplingParams is refused where requests come in.
    if params is None or not issubclass(type(params), SamplingParams):
        return params
    if params.best_of is None or params.best_of == params.n:
        return params
    return msgspec.structs.replace(params, n=params.best_of, logprobs=params.logprobs or 0)


TOKENS_AT_ONCE = 4096
"""Tokens of read samples that are put together before the event loop has its turn."""


async def yield_before(num_tokens: int) -> None:
    """Let the event loop have its turn before work on so many tokens, where they are many."""
    if num_tokens > TOKENS_AT_ONCE:
        await asyncio.sleep(0)


async def collect(
    stream: TokenStreamLike,
    params: SamplingParams | None,
    before: Callable[[int], Awaitable[object]] = yield_before,
) -> Completion:
    """Read a stream of `with_best_of(params)` to its end; keep the `n` best samples. `before` is
    awaited before work on so many tokens. Raises what ended the request, if that was an error."""
    tokens: list[list[Token]] = [[] for _ in stream.finish_reasons]
    with contextlib.closing(stream):
        async for token in stream:
            tokens[token.sample].append(token)
    ends = zip(tokens, stream.finish_reasons, stream.stop_reasons, strict=True)
    samples: list[Sample] = []
    for sample, reason, stop_reason in ends:
        await before(len(sample))
        samples.append(_sample(sample, reason, stop_reason))
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


def _sample(
    tokens: list[Token], reason: FinishReason | None, stop_reason: int | str | None
) -> Sample:
    return Sample(
        text="".join([token.text for token in tokens]),
        token_ids=tuple([token.id for token in tokens]),
        finish_reason=reason or FinishReason.ABORT,
        logprobs=tuple([one.logprobs for one in tokens if one.logprobs is not None]) or None,
        stop_reason=stop_reason,
    )


def _mean_logprob(sample: Sample) -> float:
    return (sample.cumulative_logprob or 0.0) / len(sample.token_ids)
