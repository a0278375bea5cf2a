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

Forked = Callable[[Mailbox, object, object, object], list[Mailbox]]
"""Submits branches of a stream, given their number, sampling and which sample they go on from."""


class RequestStream(ReadByAsync):
    """Base of the streams of a request. A stream owns its request: leaving the stream ends it."""

    __slots__ = ("__weakref__", "_mailbox")

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    @property
    def request_id(self) -> str:
        return self._mailbox.request_id

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason of the stream's end; None while any sample goes on. If every sample ended by
        itself, the reason of the first."""
        return self._mailbox.finish_reason

    @property
    def finish_reasons(self) -> tuple[FinishReason | None, ...]:
        """Reason of each sample's end; None for samples that go on."""
        return tuple(self._mailbox.finish_reasons)

    @property
    def stop_reasons(self) -> tuple[int | str | None, ...]:
        """Entry of `SamplingParams.stop` or `stop_token_ids` that ended each sample. None if none
        did, and for samples that go on."""
        return tuple(self._mailbox.stop_reasons)

    @property
    def usage(self) -> Usage:
        """Prompt tokens, cached prompt tokens, and tokens generated so far.

        Prompt tokens are 0 until the prompt is encoded, cached ones until the request starts.
        """
        return self._mailbox.usage

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt; empty until it is encoded."""
        return tuple([int(token_id) for token_id in self._mailbox.prompt_ids])

    @property
    def prompt_logprobs(self) -> tuple[Logprobs | None, ...]:
        """Log-probabilities of each prompt token, None for the first.

        Complete once the first token of the answer is there. Empty unless
        `SamplingParams.prompt_logprobs` asks for them.
        """
        return tuple(self._mailbox.prompt_logprobs)

    @property
    def timings(self) -> Timings:
        """Durations so far; final once the stream has ended."""
        return self._mailbox.timings

    def __aiter__(self) -> Self:
        return self

    async def started(self) -> None:
        """Wait for the first token or the end. Raises the error that ended the request, as reads
        do.

        Useful if the caller must know before it begins to answer, like a web handler that can still
        respond with 400.
        """
        self._check_loop()
        while self._mailbox.lacks():
            await self._arrival()
        self._mailbox.raise_error()

    async def _batch(self, min_tokens: int) -> list[Token]:
        """Return tokens as `TokenStream.batch` does."""
        if type(min_tokens) is not int or not 1 <= min_tokens <= MAX_INT:
            min_tokens = check(InvalidRequestError, "min_tokens", min_tokens, integer(1, MAX_INT))
        mailbox = self._mailbox
        self._check_loop()
        while mailbox.lacks(min_tokens):
            await self._arrival(min_tokens)
        return mailbox.take_all()

    async def _arrival(self, min_tokens: int = 1) -> None:
        """Wait for tokens. Cancellation meanwhile counts as the reader leaving."""
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
        """End the request if it hasn't ended. Awaits nothing. May be called repeatedly, from any
        thread."""
        mailbox = self._mailbox
        if running_loop() is mailbox.loop:
            mailbox.abort()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nothing to free
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
        # The end of a copy would end the request itself.
        raise TypeError(f"a {type(self).__name__} can't be copied or pickled")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.request_id!r}, {self.finish_reason or 'open'})"


class TokenStream(RequestStream):
    """The tokens of one request, in order. It owns the request: leaving the stream ends it.

    Tokens of several samples (`SamplingParams.n`) come interleaved, as they are computed. Tokens
    of one sample are in order. The end of the request ends all samples.

    It is a class, because a dropped async generator is only closed when the event loop gets round
    to it. Any of these ends the request:

    - the end of an `async with` block, or `close()`;
    - cancellation or a timeout of the task that waits for a token;
    - garbage collection.

    No later step then works for it. Its pages come back when the steps in flight, two at most, are
    done. If a plain `async for token in engine.stream(...)` is left by `break` or an exception, the
    collector ends the request. Prefer `async with` for a stream kept in a variable.

    One task reads a stream, on the engine's event loop; a second one gets `StreamBusyError`. If an
    error ended the request, every read after the last token raises it. An incomplete answer
    therefore never looks complete.
    """

    __slots__ = ("_forked",)

    def __init__(self, mailbox: Mailbox, forked: Forked | None = None) -> None:
        super().__init__(mailbox)
        self._forked = forked

    @property
    def stop_reason(self) -> int | str | None:
        """Entry of `stop_reasons` for the first sample."""
        return self._mailbox.stop_reasons[0]

    async def __anext__(self) -> Token:
        """Return the next token. Raises the error that ended the request, if any."""
        mailbox = self._mailbox
        self._check_loop()
        while mailbox.lacks():
            await self._arrival()
        token = mailbox.take()
        if token is None:
            raise StopAsyncIteration
        return token

    async def batch(self, min_tokens: int = 1) -> list[Token]:
        """Wait for at least one token, and return all that are there; an empty list means the end.

        Use it to forward tokens in few large pieces. Once `finish_reasons` shows a sample's end,
        all of its tokens have been returned. Raises as `__anext__` does.

        It waits for `min_tokens` tokens of each unfinished sample. A sample's first or last token,
        the end of the request, or half of `max_buffered_tokens` end the wait. Raises
        `InvalidRequestError` for `min_tokens` below 1.
        """
        return await self._batch(min_tokens)

    def fork(
        self, n: int, sampling: SamplingParams | None = None, *, sample: int = 0
    ) -> list[Self]:
        """Submit `n` branches of a sample, at most `max_num_seqs`, and return their streams at
        once. Each is a request that begins with the prompt and the tokens handed out so far, and
        shares their pages. This stream goes on as before.

        A branch brings the tokens of a request that began alike: with the same prompt, tokens so
        far and parameters. The tokens so far count for all that counts or follows tokens: `index`,
        `max_tokens`, penalties, stop strings, grammars. The noise of branch `i` is that of seed
        `s + i`, where `s` is the seed of the sample. So branch 0 goes on as this stream does. Other
        parameters, all of them, come with `sampling`; its `seed` stands for `s`.

        A branch keeps the salt, tenant, priority and other hints of this stream, and the moment of
        its deadline. Its prompt, in `usage` and `prompt_token_ids`, has the tokens so far.
        `prompt_logprobs` are told by this stream alone.

        Raises `InvalidRequestError` for a bad argument, for a prompt that isn't encoded yet, and
        for a completion that has ended with the tokens so far. Raises `InvalidSamplingError`,
        `PromptTooLongError` for a full context, `DeadlineExceededError`, `QueueFullError`,
        `EngineClosedError` and `WrongLoopError`. The first read of a branch raises if the text so
        far has a stop string, or if the grammar refuses these tokens.
        """
        if self._forked is None:
            raise InvalidRequestError(
                "a stream that brings no completion can't be forked", argument=None
            )
        branches = self._forked(self._mailbox, n, sampling, sample)
        return [type(self)(branch, self._forked) for branch in branches]


def with_best_of(params: SamplingParams | None) -> SamplingParams | None:
    """Return `params` with `best_of` samples in place of `n`, and log-probabilities to rank
    them."""
    # The intake refuses anything but SamplingParams.
    if params is None or not issubclass(type(params), SamplingParams):
        return params
    if params.best_of is None or params.best_of == params.n:
        return params
    return msgspec.structs.replace(params, n=params.best_of, logprobs=params.logprobs or 0)


TOKENS_AT_ONCE = 4096
"""Tokens of a sample that are joined without yielding to the event loop first."""


async def yield_before(num_tokens: int) -> None:
    """Yield to the event loop before work on many tokens."""
    if num_tokens > TOKENS_AT_ONCE:
        await asyncio.sleep(0)


async def collect(
    stream: TokenStreamLike,
    params: SamplingParams | None,
    before: Callable[[int], Awaitable[object]] = yield_before,
) -> Completion:
    """Read a stream of `with_best_of(params)` to its end; keep the `n` best samples.

    `before` is awaited with a number of tokens before work on them. Raises the error that ended the
    request, if any.
    """
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
