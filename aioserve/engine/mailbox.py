"""What passes from the core loop to one reader: tokens of all samples, then exactly one end.

    core loop ── put, finish ──► Mailbox ── take ──► TokenStream ──► reader
                                    │
        abort (synchronous) ◄───────┘  left, or read nothing for too long

The engine holds mailboxes and never streams, so that a stream which is dropped is collected and
its request ends. All methods run on the engine's event loop and never await.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.engine.measures import TokenGaps
from aioserve.errors import AioserveError, StreamBusyError
from aioserve.request import FinishReason, Logprobs, Token, Usage
from aioserve.scheduling.account import RequestAccount
from aioserve.timings import Timings, clock_of

__all__ = ["Mailbox", "ReaderEvent"]


class ReaderEvent(Enum):
    """What the engine must know of a reader."""

    LEFT = "left"
    """It wants no more, and will read no more."""
    FELL_BEHIND = "fell behind"
    """As many tokens wait as may."""
    CAUGHT_UP = "caught up"
    """Half of them were taken."""


class Mailbox:
    """Buffers tokens between steps and a reader that may be slow.

    When `capacity` tokens wait, `tell` is called with the event that the reader fell behind, and
    when it has taken half of them, that it caught up. A step or two may be in flight at that
    moment, so a little more than the capacity can wait.
    """

    __slots__ = (
        "_encoded_seconds",
        "_ended_seconds",
        "_gaps",
        "_num_wanted",
        "_reader",
        "_tell",
        "_timings",
        "_tokens",
        "_urgent",
        "account",
        "capacity",
        "clock",
        "completion_tokens",
        "error",
        "finish_reason",
        "finish_reasons",
        "first_token_seconds",
        "loop",
        "paused",
        "pid",
        "pooled",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "started_seconds",
        "stop_reasons",
    )

    def __init__(
        self,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[ReaderEvent], None],
        capacity: int,
        num_samples: int,
    ) -> None:
        self.request_id: str = request_id
        self.loop: asyncio.AbstractEventLoop = loop
        self.pid: int = os.getpid()
        self.capacity: int = capacity
        self.prompt_ids: Sequence[int] | npt.NDArray[np.int32] = ()
        """Once the prompt is encoded."""
        self.prompt_logprobs: list[Logprobs | None] = []
        """Log-probabilities of the prompt so far, where they are wanted: None for the first."""
        self.pooled: npt.NDArray[np.float64] | None = None
        """The sum of hidden states, float64 `[hidden]`, at the end of a request that wants it."""
        self.completion_tokens: int = 0
        self.paused: bool = False
        self.finish_reason: FinishReason | None = None
        self.finish_reasons: list[FinishReason | None] = [None] * num_samples
        self.stop_reasons: list[int | str | None] = [None] * num_samples
        """Which of the request's stop strings and stop ids ended each sample."""
        self.error: AioserveError | None = None
        """What ended the request; each read gets a copy."""
        self.clock: Callable[[], float] = clock_of(loop)
        self.started_seconds: float = self.clock()
        """When the request was submitted, on the loop's clock."""
        self.first_token_seconds: float | None = None
        """Since then."""
        self.account: RequestAccount = RequestAccount()
        """The scheduler's, from when it knows the request until the end; then a copy."""
        self._encoded_seconds: float | None = None
        self._ended_seconds: float | None = None
        self._gaps = TokenGaps(num_samples)
        self._timings: Timings | None = None
        """Kept once they are asked for after the end."""
        self._tell: Callable[[ReaderEvent], None] | None = tell
        self._tokens: deque[Token] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._num_wanted = 1
        """What the reader waits for, as `arrival` was told."""
        self._urgent = False
        """Among the tokens is a sample's first one, or its last."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def taken(self) -> int:
        """Tokens that the reader has taken."""
        return self.completion_tokens - len(self._tokens)

    @property
    def usage(self) -> Usage:
        """Prompt tokens (0 until the prompt is encoded) and tokens generated so far."""
        account = self.account
        return Usage(
            self.prompt_tokens,
            self.completion_tokens,
            account.cached_tokens or 0,
            account.drafted_tokens,
            account.accepted_tokens,
        )

    @property
    def timings(self) -> Timings:
        """As far as things have come."""
        if self._timings is not None:
            return self._timings
        began, ended, account = self.started_seconds, self._ended_seconds, self.account
        timings = Timings(
            first_token_seconds=self.first_token_seconds,
            total_seconds=(self.clock() if ended is None else ended) - began,
            completion_tokens=self.completion_tokens,
            encoding_seconds=_since(began, self._encoded_seconds),
            queued_seconds=_since(began, account.started_seconds),
            inter_token_latency=self._gaps.summary(),
            preemptions=account.preemptions,
            device_seconds=account.device_seconds,
        )
        if ended is not None:
            self._timings = timings
        return timings

    # -- the core loop's side

    def encoded(self) -> None:
        """The prompt is token ids, and may enter."""
        self._encoded_seconds = self.clock()

    def put(self, token: Token) -> None:
        """Deliver one token; after the end of the request it is dropped."""
        if self.finish_reason is not None:
            return
        self.completion_tokens += 1
        now = self.clock()
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.started_seconds
        self._gaps.token_came(token.sample, now)
        self._tokens.append(token)
        if token.index == 0:
            self._urgent = True
        self._wake()
        if not self.paused and len(self._tokens) >= self.capacity and self._tell is not None:
            self.paused = True
            self._tell(ReaderEvent.FELL_BEHIND)

    def put_scored(self, scored: Sequence[Logprobs], before: int) -> None:
        """Log-probabilities of the prompt's tokens behind the first `before` that were scored. What
        is told of tokens behind these stays: who was preempted is scored anew, to the same end."""
        found = self.prompt_logprobs
        first = before + (1 if found and found[0] is None else 0)
        self.prompt_logprobs = [*found[:first], *scored, *found[first + len(scored) :]]

    def finish_sample(
        self, sample: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """One sample came to its own end; with the last one the stream ends as the first did."""
        if self.finish_reason is not None:
            return
        self.finish_reasons[sample] = reason
        self.stop_reasons[sample] = stop_reason
        self._urgent = True
        ended = [reason for reason in self.finish_reasons if reason is not None]
        if len(ended) == len(self.finish_reasons):
            self.finish(ended[0])
        else:
            self._wake()

    def finish(self, reason: FinishReason, error: AioserveError | None = None) -> bool:
        """The one end of the stream and of the samples that go on; a second one is ignored.
        Returns whether it was the first."""
        if self.finish_reason is not None:
            return False
        self.finish_reason = reason
        self.finish_reasons = [ended or reason for ended in self.finish_reasons]
        self.error = None if error is None else error.copy()  # without the frames that raised it
        self._ended_seconds = self.clock()
        self.account = msgspec.structs.replace(self.account)  # steps in flight may add to it
        self._tell = None  # a stream that is kept keeps no request
        self._wake()
        return True

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None and not reader.done() and not self.lacks(self._num_wanted):
            reader.set_result(None)

    # -- the reader's side

    def abort(self) -> None:
        """The reader has left. Synchronous and idempotent, so it works during cancellation."""
        self._tokens.clear()
        tell = self._tell
        if self.finish(FinishReason.ABORT) and tell is not None:
            tell(ReaderEvent.LEFT)

    def lacks(self, num_tokens: int = 1) -> bool:
        """Whether neither the end is there nor so many tokens for each sample that goes on. Half of
        the capacity is always enough, and so is one token where a sample begins or ends."""
        if self.finish_reason is not None:
            return False
        num_there = len(self._tokens)
        if not num_there or num_tokens == 1 or self._urgent:
            return not num_there
        wanted = num_tokens * self.finish_reasons.count(None)
        return num_there < wanted and 2 * num_there < self.capacity

    def arrival(self, num_tokens: int = 1) -> asyncio.Future[None]:
        """Done when it no longer `lacks` them.

        Raises `StreamBusyError` if another task is already waiting: a stream has one reader.
        """
        if self._reader is not None and not self._reader.done():
            raise StreamBusyError(f"another task is already reading request {self.request_id!r}")
        self._num_wanted = num_tokens
        self._reader = self.loop.create_future()
        return self._reader

    def raise_error(self) -> None:
        """Raise what ended the request, if that was an error, once all tokens are taken; each time
        a copy."""
        if not self._tokens and self.error is not None:
            raise self.error.copy()

    def take(self) -> Token | None:
        """The next token, or None at the end; otherwise as `raise_error`."""
        if not self._tokens:
            self.raise_error()
            return None
        token = self._tokens.popleft()
        if self.paused:
            self._taken_some()
        return token

    def take_all(self) -> list[Token]:
        """All tokens that are there; none at the end. Otherwise as `take`."""
        if not self._tokens:
            self.raise_error()
            return []
        tokens = list(self._tokens)
        self._tokens.clear()
        self._urgent = False
        if self.paused:
            self._taken_some()
        return tokens

    def _taken_some(self) -> None:
        if 2 * len(self._tokens) <= self.capacity:
            self.paused = False
            if self._tell is not None:
                self._tell(ReaderEvent.CAUGHT_UP)


def _since(began_seconds: float, seconds: float | None) -> float | None:
    return None if seconds is None else seconds - began_seconds
