"""The interface between a scheduling policy and the mechanism that asks it.

A policy answers questions over read-only views. It owns no queue and no page, and the mechanism
checks every answer: a policy can be slow or unfair, and nothing that it raises or answers loses a
request or corrupts memory. It runs on the event loop, so one that never returns stops its host.
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
    """A policy's answer to "may this request start?"."""

    NOW = "now"
    LATER = "later"
    """Ask again in the next step. With nothing running the mechanism starts the request anyway:
    an engine that has work never stands still."""
    NEVER = "never"
    """Refuse the request: its stream raises `RequestRejectedError`."""


class Refusal(msgspec.Struct, frozen=True):
    """`Verdict.NEVER` with a reason, which stands in the message of `RequestRejectedError`.

    Raises `ConfigError` for a reason that isn't a str of 1 to 1000 characters, and for seconds that
    aren't a number from 0 on, and finite.
    """

    reason: str
    retry_after_seconds: float | None = None
    """When the same request might be taken, in seconds from now, where that is known: the error
    carries it to the caller."""

    def plain(self) -> Refusal:
        """Copy of a plugin's own refusal, with a plain str and a plain float."""
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
    """One answer to `SchedulingPolicy.preempt`: whom, and what becomes of what it has computed."""

    request: RequestView
    how: Preemption | None = None
    """"swap" copies it to the host pool, as far as there is room in it, "recompute" computes it
    again; "auto" and None leave that to length, and to the engine's `preemption`."""


class TokenShare(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one step that are kept for some requests."""

    requests: Iterable[RequestView]
    """Requests that wait or run, none of which is in another share."""
    tokens: int
    """Tokens that nobody else gets: for the next tokens of these requests and for their prompts."""


class StepBudget(msgspec.Struct, frozen=True, gc=False):
    """One answer to `SchedulingPolicy.begin_step`: how a step's tokens are shared out.

    A request of a share takes its tokens from that share first, and then from what is in no share.
    What is left of a share at the end of the step is computed for nobody.
    """

    shares: Iterable[TokenShare] = ()
    """Shares with at most `tokens` tokens in all. What they leave is for all requests."""
    tokens: int | None = None
    """Most tokens of the step, 1 to `max_num_batched_tokens`; None for as many."""


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

    Methods are plain and synchronous and run on the event loop, so they must be quick: nothing can
    end a call that never returns, and it stops the host program. Where one raises, or gives an
    answer that isn't one, that is logged, and first come, first served decides for the rest of that
    step.
    """

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        """Waiting requests in the order to start them; those left out wait.

        `waiting` is in order of arrival. Admission stops at the first request that doesn't fit
        the free pages, so that a large request isn't overtaken for ever.
        """
        return waiting

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        """Whether a request may start in this step. It does if there is memory for it. A `Refusal`
        is `Verdict.NEVER` with a reason for the caller."""
        return Verdict.NOW

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        """Prompt tokens to compute in this step, 0 to `budget_tokens`.

        `budget_tokens` is what is left of the step's token budget, and at most what the request
        still needs. Sequences that decode are not asked: they take their one token first. Every
        request is asked about before it starts, except in a step after a fault of the policy. One
        that starts since nothing else can run is computed even where the answer is 0.
        """
        return budget_tokens

    def victim(
        self, running: Sequence[RequestView], need_pages: int, view: SchedulerView
    ) -> RequestView:
        """The request to preempt when `need_pages` more pages are needed.

        `running` holds those that may be preempted: each is of lower precedence than the request in
        need, or of the same and arrived after it, or waits for its own reader. By default the
        request that loses the least work among those whose pages cover the need, and of equal ones
        one whose pages come back at once; where none covers the need, the one that brings back the
        most pages.
        """
        pages = {request: request.reclaimable_pages for request in running}
        covering = [request for request in running if pages[request] >= need_pages]
        if covering:
            return min(covering, key=lambda r: (r.lost_tokens, r.in_flight, -r.arrival_index))
        return max(running, key=lambda r: (pages[r], r.arrival_index))

    def precedence(self, request: RequestView) -> int:
        """How far `request` goes before others that run: of two, the one with the greater may
        displace the other, and takes its pages first. Asked once, when the request arrives: who may
        preempt whom never changes. By default all are equal, and none is displaced.
        """
        return 0

    def displaces(
        self, request: RequestView, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView]:
        """Requests that give way to `request`, which is the next to start and has no slot or no
        pages; those to be preempted first come first.

        `running` holds those of lower precedence. As many of them are preempted as have to be, and
        none where all that are named aren't enough. By default all may be, the lowest first, and
        of equal ones the one that loses the least work.
        """
        return sorted(
            running,
            key=lambda r: (self.precedence(r), r.lost_tokens, r.in_flight, -r.arrival_index),
        )

    # -- Asked only where a policy overrides them

    def begin_step(self, view: SchedulerView) -> StepBudget | None:
        """How the tokens of the step are shared out that is about to be planned: asked once, before
        anything else. Decodes count as prompts do, so a share is one of the whole step.

        What the budget leaves no token for sits the step out; `chunk` is told what is left for its
        request. One that made others give their pages back gets its token whatever is answered, and
        where nothing else can run one request goes on without a limit. None, the default: whoever
        comes first takes all.
        """
        return None

    victim_of_any_age: bool = False
    """Whether `victim` is asked about all that may be preempted, and not only about those that are
    behind the one in need."""

    def preempt(
        self, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView | Preempt]:
        """Requests to take off the device although there may be pages left, before a step is
        planned. They start again in a later step, when `order` and `admit` say so.

        `running` holds those that may be preempted: of the others all tokens are known or being
        sampled, or they were preempted so often since their last token that it is their turn. By
        default none.
        """
        return ()

    def order_prefills(
        self, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView]:
        """Running requests with more than one token to compute, in the order in which `chunk` is
        asked for them; those left out sit this step out. By default as they arrived, those of
        higher precedence first, which is how `running` is ordered."""
        return running

    def decode(self, running: Sequence[RequestView], view: SchedulerView) -> Iterable[RequestView]:
        """Running requests that are ready for their next token, in the order in which they get one
        of the step's tokens and their pages; those left out sit this step out.

        By default all, as they arrived, those of higher precedence first, which is how `running` is
        ordered. One that made others give their pages back gets its token whatever is answered.
        """
        return running

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        """Draft tokens of a running request that this step may verify, 0 to `limit`, which
        is what measured times and the request's own acceptance make of it. Each is one more of the
        step's tokens. Asked where the engine speculates and `limit` isn't 0. By default `limit`.
        """
        return limit

    def reserve(self, request: RequestView, view: SchedulerView) -> int | None:
        """Pages that have to be left for answers, its own and those of all that run, when `request`
        starts: where fewer would be, it waits. None, the default, is what the engine's
        `output_reserve_tokens` makes of it. One that is alone may start in any case."""
        return None

    def drop(self, request: RequestView, view: SchedulerView) -> Refusal | None:
        """Whether to end a running request before its answer is complete, and why: its stream
        raises `RequestRejectedError` behind the tokens that it has. By default None: no."""
        return None

    def pin(self, request: RequestView) -> int:
        """Leading tokens of a request that has just ended whose pages the prefix cache is to keep,
        0 to `computed_tokens`: whole pages of it. By default 0.

        Pinned pages aren't evicted for those that wait. They are for requests that run, for one
        that might displace others for them, and when nothing else can run: the oldest pin goes
        first, as it does where all pins together would hold more than a quarter of the pages.
        """
        return 0

    def unpin(self, pins: Sequence[Pin], view: SchedulerView) -> Iterable[Pin]:
        """Which pins, of which there are some, to end before a step is planned. Their pages stay
        cached until they are evicted. By default none."""
        return ()

    # -- Declared, and told

    def starvation_bound_tokens(self, request: RequestView) -> int | None:
        """The most that `request` may be overtaken: once that many tokens have been processed since
        it arrived, no request that arrived later starts before it.

        0 is order of arrival, None (the default) promises nothing. It is a declaration, held by
        `aioserve.testing.check_policy`; the mechanism doesn't ask.
        """
        return None

    def arrived(self, requests: Sequence[RequestView]) -> None:
        """These requests entered the queue since the last step was planned."""

    def step_finished(self, step: int, tokens: int) -> None:
        """Step number `step` is done; it computed `tokens` tokens."""

    def finished(self, requests: Sequence[RequestView]) -> None:
        """These requests have ended, for whatever reason."""
