"""Interface between a scheduling policy and the mechanism that asks it.

A policy answers questions over read-only views. It owns no queue and no page, and the mechanism
checks every answer. A policy can be slow or unfair, but its answers and exceptions lose no request
and corrupt no memory. It runs on the event loop, so a policy that never returns stops its host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from aioserve.config import Preemption
from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.scheduling.view import Pin, RequestView, SchedulerView

__all__ = ["Preempt", "Refusal", "SchedulingPolicy", "StepBudget", "TokenShare", "Verdict"]

MAX_REASON_CHARS = 1000


class Verdict(Enum):
    """Answer of a policy to "may this request start?"."""

    NOW = "now"
    LATER = "later"
    """Ask again in the next step. If nothing else runs, the mechanism starts the request anyway: an
    engine that has work never stands still."""
    NEVER = "never"
    """Refuse the request: its stream raises `RequestRejectedError`."""


class Refusal(msgspec.Struct, frozen=True):
    """`Verdict.NEVER` with a reason, which appears in the message of `RequestRejectedError`.

    Raises `ConfigError` unless the reason is a str of 1 to 1000 characters. The seconds must be
    None, or finite and at least 0.
    """

    reason: str
    retry_after_seconds: float | None = None
    """Seconds from now after which the same request might be accepted, if that is known. The error
    carries it to the caller."""

    def plain(self) -> Refusal:
        """Copy a plugin's own refusal into one with a plain str and a plain float."""
        seconds = self.retry_after_seconds
        return Refusal(str.__str__(self.reason), None if seconds is None else float(seconds))

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not 1 <= len(self.reason) <= MAX_REASON_CHARS:
            raise ConfigError(
                f"reason must be a str of 1 to {MAX_REASON_CHARS} characters, got {self.reason!r}"
            )
        seconds = self.retry_after_seconds
        if seconds is not None:
            msgspec.structs.force_setattr(self, "retry_after_seconds", _as_seconds(seconds))


class Preempt(msgspec.Struct, frozen=True, gc=False):
    """One answer to `SchedulingPolicy.preempt`: a request, and the fate of its computed KV."""

    request: RequestView
    how: Preemption | None = None
    """"swap" copies the KV to the host pool, as far as there is room, and "recompute" computes it
    again. With "auto" and None, length and the engine's `preemption` decide."""


class TokenShare(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one step that are kept for some requests."""

    requests: Iterable[RequestView]
    """Requests that wait or run. A request may be in one share only."""
    tokens: int
    """Tokens that no other request gets. They serve the next tokens of these requests and their
    prompts."""


class StepBudget(msgspec.Struct, frozen=True, gc=False):
    """Answer to `SchedulingPolicy.begin_step`: how a step's tokens are shared out.

    A request in a share takes its tokens from that share first, and then from those outside of
    shares. Tokens of a share that are left at the end of the step stay unused.
    """

    shares: Iterable[TokenShare] = ()
    """Shares with at most `tokens` tokens in all. The rest is for all requests."""
    tokens: int | None = None
    """Most tokens of the step, 1 to `max_num_batched_tokens`; None for as many as that."""


def _as_seconds(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
        if 0 <= seconds < math.inf:
            return seconds
    raise ConfigError(
        f"retry_after_seconds must be a number from 0 on and finite, or None, got {shown(value)}"
    )


class SchedulingPolicy:
    """Decides what runs next. Override the questions that matter; the defaults are first come,
    first served.

        class ShortestPromptFirst(SchedulingPolicy):
            def order(self, waiting, view):
                return sorted(waiting, key=lambda request: request.uncached_tokens)

    Methods are plain and synchronous and run on the event loop, so they must be quick. Nothing can
    end a call that never returns, and it stops the host program. If a method raises or returns an
    invalid answer, that is logged. First come, first served then decides for the rest of that step.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        """Return waiting requests in the order to start them. Requests left out wait.

        `waiting` is in order of arrival. Admission stops at the first request that doesn't fit the
        free pages, so that smaller requests can't overtake a large one for ever.
        """
        return waiting

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        """Return a verdict on starting a request in this step. After `NOW` it starts if there is
        memory for it. A `Refusal` is `Verdict.NEVER` with a reason for the caller."""
        return Verdict.NOW

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        """Return the number of prompt tokens to compute in this step, 0 to `budget_tokens`.

        `budget_tokens` is what is left of the step's token budget, and at most what the request
        still needs. Decoding sequences take their one token first, without this question. Every
        request is asked about before it starts, except in a step after a fault of the policy. If a
        request starts because nothing else can run, it is computed even if the answer is 0.
        """
        return budget_tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        """Return the request to preempt when `need_pages` more pages are needed.

        `running` holds the requests that may be preempted. Each has lower precedence than the one
        in need, or the same and arrived later. A request that waits for its own reader or mask may
        be preempted in any case.

        Default: of the requests whose pages cover the need, the one that loses the least work.
        Among equal ones, pages that come back at once are better. If no request covers the need,
        the one that brings back the most pages.
        """
        pages = {request: request.reclaimable_pages for request in running}
        covering = [request for request in running if pages[request] >= need_pages]
        if covering:
            return min(covering, key=lambda r: (r.lost_tokens, r.in_flight, -r.arrival_index))
        return max(running, key=lambda r: (pages[r], r.arrival_index))

    def precedence(self, request: RequestView) -> int:
        """Return the precedence of `request`. Of two requests, the one with the greater may
        displace the other, and takes its pages first.

        Asked once, when the request arrives, so who may preempt whom never changes. By default all
        are equal, and none is displaced.
        """
        return 0

    def displaces(
        self, request: RequestView, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView]:
        """Return requests that may be preempted for `request`, first victim first. It is the next
        to start and lacks a slot or pages.

        `running` holds the requests of lower precedence. As many are preempted as needed, and none
        if all of them aren't enough. By default all are named: the lowest precedence first, and
        among equal ones the one that loses the least work.
        """
        return sorted(
            running,
            key=lambda r: (self.precedence(r), r.lost_tokens, r.in_flight, -r.arrival_index),
        )

    # -- Asked only where a policy overrides them

    def begin_step(self, view: SchedulerView) -> StepBudget | None:
        """Return how the tokens of the next step are shared out. Asked once per step, before
        anything else. Decodes count like prompts, so a share is one of the whole step.

        A request that the budget leaves no token sits the step out; `chunk` is told what is left
        for its request. Two cases ignore the budget. A request that made others give their pages
        back gets its token. If nothing else can run, one request goes on without a limit.

        With None, the default, there are no shares: first come, first served.
        """
        return None

    victim_of_any_age: bool = False
    """True to ask `victim` about all requests that may be preempted, and not only about those
    behind the one in need."""

    def preempt(
        self, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView | Preempt]:
        """Return requests to take off the device before a step is planned, even if there are pages
        left. They start again in a later step, when `order` and `admit` say so.

        `running` holds the requests that may be preempted. Left out are requests whose tokens are
        all known or being sampled, and those preempted too often since their last token. By default
        none.
        """
        return ()

    def order_prefills(
        self, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView]:
        """Return running requests with more than one token to compute, in the order to ask `chunk`
        for them. Requests left out sit this step out.

        By default as in `running`: higher precedence first, then order of arrival.
        """
        return running

    def decode(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        """Return running requests that are ready for their next token, in the order in which they
        get tokens of the step and pages. Requests left out sit this step out.

        By default as in `running`: higher precedence first, then order of arrival. A request that
        made others give their pages back gets its token whatever the answer.
        """
        return running

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        """Return the number of draft tokens of a running request that this step may verify, 0 to
        `limit`.

        `limit` follows from measured times and the request's own acceptance. Each draft token is
        one more of the step's tokens. Asked only if the engine speculates and `limit` isn't 0. By
        default `limit`.
        """
        return limit

    def reserve(self, request: RequestView, view: SchedulerView) -> int | None:
        """Return the pages that must be left for completions when `request` starts: for its own,
        and for those of all running requests. If fewer would be left, it waits.

        With None, the default, the engine's `output_reserve_tokens` decides. A request that is
        alone may start in any case.
        """
        return None

    def drop(self, request: RequestView, view: SchedulerView) -> Refusal | None:
        """Return a refusal to end a running request before its completion is done, or None to let
        it go on. Its stream raises `RequestRejectedError` after the tokens that it has. By default
        None."""
        return None

    def pin(self, request: RequestView) -> int:
        """Return the number of leading tokens of an ended request whose pages the prefix cache is
        to keep, 0 to `computed_tokens`. Only whole pages are kept. By default 0.

        Pins keep their pages from waiting requests. They end for running requests that need the
        pages, for a request that might displace others for them, and when nothing else can run. The
        oldest pin ends first, also when all pins together would hold more than a quarter of the
        pages.
        """
        return 0

    def unpin(self, pins: Sequence[Pin], view: SchedulerView) -> Iterable[Pin]:
        """Return the pins to end before a step is planned. Asked only while there are pins. Their
        pages stay cached until they are evicted. By default none."""
        return ()

    # -- Declared, and told

    def starvation_bound_tokens(self, request: RequestView) -> int | None:
        """Return the most that `request` may be overtaken, in tokens; None promises nothing. Once
        that many tokens have been processed since it arrived, no later request starts before it.

        0 means order of arrival. The default is None. This is a declaration that
        `aioserve.testing.check_policy` tests; the mechanism doesn't ask.
        """
        return None

    def arrived(self, requests: Sequence[RequestView]) -> None:
        """Notification that these requests entered the queue since the last step was planned."""

    def step_finished(self, step: int, tokens: int) -> None:
        """Notification that step number `step` is done; it computed `tokens` tokens."""

    def finished(self, requests: Sequence[RequestView]) -> None:
        """Notification that these requests have ended, for any reason."""
