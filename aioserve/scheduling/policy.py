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

from aioserve.errors import ConfigError
from aioserve.isolation import shown
from aioserve.scheduling.view import RequestView, SchedulerView

__all__ = ["Refusal", "SchedulingPolicy", "Verdict"]

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
        """The same of a plugin's own making: from a plain str and a plain float."""
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
        still needs. Sequences that decode are not asked: they take their one token first.
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
        preempt whom never changes. By default all are equal, and nobody is displaced.
        """
        return 0

    def displaces(
        self, request: RequestView, running: Sequence[RequestView], view: SchedulerView
    ) -> Iterable[RequestView]:
        """Who gives way to `request`, which is the next to start and has no seat or no pages; those
        to be preempted first come first.

        `running` holds those of lower precedence. As many of them are preempted as have to be, and
        nobody where all that are named aren't enough. By default all may be, the lowest first, and
        of equal ones the one that loses the least work.
        """
        return sorted(
            running,
            key=lambda r: (self.precedence(r), r.lost_tokens, r.in_flight, -r.arrival_index),
        )

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
