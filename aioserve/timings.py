"""Durations of a request, and the clock that they are measured with.

Plain values, which may be imported from anywhere in the package.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

__all__ = ["GAP_BOUNDS_SECONDS", "InterTokenLatency", "Timings", "clock_of", "loop_seconds"]

GAP_BOUNDS_SECONDS: tuple[float, ...] = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.5,
)  # fmt: skip
"""Upper bounds of the buckets in which gaps between tokens are counted, in seconds."""


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Return the clock of a loop's timers, in seconds, to measure durations with.

    uvloop's own clock has whole milliseconds, read once an iteration. Steps and gaps between tokens
    are shorter, so uvloop's loops are measured by the system's monotonic clock itself.
    """
    is_coarse = type(loop).__module__.partition(".")[0] == "uvloop"
    return time.monotonic if is_coarse else loop.time


def loop_seconds() -> float:
    """Return the time on the running loop's clock, as `clock_of` chooses it."""
    return clock_of(asyncio.get_running_loop())()


class InterTokenLatency(msgspec.Struct, frozen=True, gc=False):
    """Gaps between tokens of the same sample, from one token's delivery to its stream to the next
    one's.

    A reader that takes tokens late doesn't count. Tokens that come with one step have no gap
    between them.
    """

    count: int
    """Number of gaps, of all samples together; at least one."""
    mean_seconds: float
    p50_seconds: float
    """Median gap. Off by at most 1 % or 1 µs, as gaps aren't kept; more above two weeks."""
    p99_seconds: float
    """Gap that 99 % of the gaps don't exceed, off as the median is."""
    max_seconds: float
    counts: tuple[int, ...] = ()
    """Number of gaps no longer than each of `GAP_BOUNDS_SECONDS`, off as the quantiles are."""


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Durations of one request in seconds, measured from its submission.

        submitted ─► encoded ─► started ─────► first token ─► .. ─► last token, end
        ├ encoding ┤          │              │
        ├──── queued ─────────┼── prefill ───┤
        ├──────────── first token ───────────┤
        ├──────────────────────────── total ──────────────────────────────────────┤

    They are the durations so far while the request goes on.
    """

    first_token_seconds: float | None
    """Time to first token (TTFT), of whichever sample comes first; None if there is no token."""
    total_seconds: float
    """Time to the end, or until now if the request goes on."""
    completion_tokens: int
    """Generated tokens of all samples together."""
    encoding_seconds: float | None = None
    """Time until the prompt was encoded and plugins had admitted the request. It includes the wait
    for an encoding thread. None if it never got there.
    """
    queued_seconds: float | None = None
    """Time until the first step with the request was planned, encoding included; None if none
    was.
    """
    inter_token_latency: InterTokenLatency | None = None
    """Gaps between tokens; None while no sample has two tokens."""
    preemptions: int = 0
    """Times that it was preempted, of all samples together."""
    device_seconds: float = 0.0
    """Time that the device spent on it: its share of the steps that it was in. A step's time is as
    `EngineStats.step_seconds_total` counts it, until the event loop hears of its end. It is shared
    out by tokens, prompt tokens and decoded ones alike. All requests together have the time of all
    steps, except the shares of requests that ended before a step in flight did. Steps that failed
    count too.
    """

    @property
    def prefill_seconds(self) -> float | None:
        """Time from planning the first step to the first token: computing the prompt, with the
        waits between its chunks and after a preemption. None if there was no token.
        """
        if self.first_token_seconds is None or self.queued_seconds is None:
            return None
        return self.first_token_seconds - self.queued_seconds

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time between output tokens after the first (TPOT), whichever samples they belong to.

        None for fewer than two tokens.
        """
        if self.first_token_seconds is None or self.completion_tokens < 2:
            return None
        return (self.total_seconds - self.first_token_seconds) / (self.completion_tokens - 1)
