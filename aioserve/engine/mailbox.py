"""Mailbox between the core loop and one reader: tokens of all samples, then exactly one end.

    core loop ── put, finish ──► Mailbox ── take ──► TokenStream ──► reader
                                    │
        abort (synchronous) ◄───────┘  left, or read nothing for too long

The engine holds mailboxes and never streams. A dropped stream is therefore collected, and its
request ends. All methods run on the engine's event loop and never await.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.engine.begun import Origin
from aioserve.engine.measures import EndedRequests, TokenGaps
from aioserve.errors import AioserveError, StreamBusyError
from aioserve.request import FinishReason, Logprobs, Token, Usage
from aioserve.scheduling.account import RequestAccount
from aioserve.timings import Timings, clock_of

__all__ = ["Mailbox", "ReaderEvent"]


class ReaderEvent(Enum):
    """Event that a reader's mailbox reports to the engine."""

    LEFT = "left"
    """The reader will read no more."""
    FELL_BEHIND = "fell behind"
    """The mailbox is full."""
    CAUGHT_UP = "caught up"
    """The reader took half of the tokens."""


class Mailbox:
    """Buffers tokens between steps and a reader that may be slow.

    `tell` is called with FELL_BEHIND when `capacity` tokens wait, and with CAUGHT_UP when the
    reader has taken half of them. A step or two may be in flight at that moment, so a little more
    than the capacity can wait.
    """

    __slots__ = (
        "_encoded_seconds",
        "_ended_requests",
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
        "first_index",
        "first_token_seconds",
        "handed_out",
        "loop",
        "origin",
        "paused",
        "pid",
        "pooled",
        "prompt_ids",
        "prompt_logprobs",
        "request_id",
        "started_seconds",
        "stop_reasons",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[ReaderEvent], None],
        capacity: int,
        num_samples: int,
        ended_requests: EndedRequests | None = None,
    ) -> None:
        self.request_id: str = request_id
        self.loop: asyncio.AbstractEventLoop = loop
        self.tenant: str | None = None
        """Tenant of the request, once its hints are checked."""
        self.pid: int = os.getpid()
        self.capacity: int = capacity
        self.prompt_ids: Sequence[int] | npt.NDArray[np.int32] = ()
        """Token ids of the prompt; empty until it is encoded."""
        self.prompt_logprobs: list[Logprobs | None] = []
        """Log-probabilities of the prompt so far, if wanted. The first is None."""
        self.pooled: npt.NDArray[np.float64] | None = None
        """Sum of hidden states, float64 `[hidden]`, at the end of a request that wants it."""
        self.completion_tokens: int = 0
        self.first_index: int = 0
        """Index of each sample's first token: the tokens that its completion was begun with."""
        self.origin: Origin | None = None
        """Facts for branches of the stream; None for a stream that has none."""
        self.handed_out: list[array[int]] = [array("i") for _ in range(num_samples)]
        """Ids of the tokens of each sample that the reader has taken, kept where there is an
        `origin`."""
        self.paused: bool = False
        self.finish_reason: FinishReason | None = None
        self.finish_reasons: list[FinishReason | None] = [None] * num_samples
        self.stop_reasons: list[int | str | None] = [None] * num_samples
        """Stop string or stop id of the request that ended each sample."""
        self.error: AioserveError | None = None
        """Error that ended the request. Each read raises a copy."""
        self.clock: Callable[[], float] = clock_of(loop)
        self.started_seconds: float = self.clock()
        """Time of submission, on the loop's clock."""
        self.first_token_seconds: float | None = None
        """Seconds from submission to the first token."""
        self.account: RequestAccount = RequestAccount()
        """The scheduler's own account while it knows the request; a copy after the end."""
        self._encoded_seconds: float | None = None
        self._ended_seconds: float | None = None
        self._gaps = TokenGaps(num_samples)
        self._ended_requests = ended_requests
        """Counts the end of the request, if given."""
        self._timings: Timings | None = None
        """Final timings, kept once they are asked for after the end."""
        self._tell: Callable[[ReaderEvent], None] | None = tell
        self._tokens: deque[Token] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._num_wanted = 1
        """Tokens that the reader waits for, as passed to `arrival`."""
        self._urgent = False
        """True if a first or last token of a sample is waiting."""

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
        """Durations so far; final once the request has ended."""
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
        """Note that the prompt is encoded and may enter."""
        self._encoded_seconds = self.clock()

    def put(self, token: Token) -> None:
        """Deliver one token. Drop it if the request has ended."""
        if self.finish_reason is not None:
            return
        self.completion_tokens += 1
        now = self.clock()
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.started_seconds
        self._gaps.token_came(token.sample, now)
        self._tokens.append(token)
        if token.index == self.first_index:
            self._urgent = True
        self._wake()
        if not self.paused and len(self._tokens) >= self.capacity and self._tell is not None:
            self.paused = True
            self._tell(ReaderEvent.FELL_BEHIND)

    def put_scored(self, scored: Sequence[Logprobs], before: int) -> None:
        """Take log-probabilities of prompt tokens that follow the first `before` scored ones.

        Later ones stay: a preempted request is scored anew, with the same result.
        """
        found = self.prompt_logprobs
        first = before + (1 if found and found[0] is None else 0)
        self.prompt_logprobs = [*found[:first], *scored, *found[first + len(scored) :]]

    def finish_sample(
        self, sample: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """End one sample. The last one ends the stream, with the reason of the first sample."""
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
        """End the stream and its unfinished samples. A second end is ignored; return True for the
        first."""
        if self.finish_reason is not None:
            return False
        self.finish_reason = reason
        self.finish_reasons = [ended or reason for ended in self.finish_reasons]
        self.error = None if error is None else error.copy()  # without the frames that raised it
        self._ended_seconds = now = self.clock()
        self.account = msgspec.structs.replace(self.account)  # steps in flight may add to it
        if self._ended_requests is not None:
            seconds, account = now - self.started_seconds, self.account
            self._ended_requests.ended(reason, self.tenant, seconds, account.device_seconds)
        self._tell = None  # a stream that is kept keeps no request
        self._wake()
        return True

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None and not reader.done() and not self.lacks(self._num_wanted):
            reader.set_result(None)

    # -- the reader's side

    def abort(self) -> None:
        """End the request because its reader left. Synchronous and idempotent, so it works during
        cancellation."""
        self._tokens.clear()
        tell = self._tell
        if self.finish(FinishReason.ABORT) and tell is not None:
            tell(ReaderEvent.LEFT)

    def lacks(self, num_tokens: int = 1) -> bool:
        """True while a reader that wants `num_tokens` for each unfinished sample has to wait.

        The end, half of the capacity, or a sample's first or last token always suffice.
        """
        if self.finish_reason is not None:
            return False
        num_there = len(self._tokens)
        if not num_there or num_tokens == 1 or self._urgent:
            return not num_there
        wanted = num_tokens * self.finish_reasons.count(None)
        return num_there < wanted and 2 * num_there < self.capacity

    def arrival(self, num_tokens: int = 1) -> asyncio.Future[None]:
        """Return a future that is done when the mailbox no longer `lacks` that many tokens.

        Raises `StreamBusyError` if another task is already waiting: a stream has one reader.
        """
        if self._reader is not None and not self._reader.done():
            raise StreamBusyError(f"another task is already reading request {self.request_id!r}")
        self._num_wanted = num_tokens
        self._reader = self.loop.create_future()
        return self._reader

    def raise_error(self) -> None:
        """Raise a copy of the error that ended the request, if any, once all tokens are taken."""
        if not self._tokens and self.error is not None:
            raise self.error.copy()

    def take(self) -> Token | None:
        """Return the next token, or None at the end. Raises as `raise_error` does."""
        if not self._tokens:
            self.raise_error()
            return None
        token = self._tokens.popleft()
        if self.origin is not None:
            self.handed_out[token.sample].append(token.id)
        if self.paused:
            self._taken_some()
        return token

    def take_all(self) -> list[Token]:
        """Return all waiting tokens; an empty list means the end. Raises as `raise_error` does."""
        if not self._tokens:
            self.raise_error()
            return []
        tokens = list(self._tokens)
        self._tokens.clear()
        if self.origin is not None:
            for token in tokens:
                self.handed_out[token.sample].append(token.id)
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
