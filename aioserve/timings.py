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
"""Gaps between tokens are counted by these."""


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Clock of a loop's timers, in seconds, to measure durations with.

    uvloop tells whole milliseconds of the system's monotonic clock, read once an iteration. Steps
    and gaps between tokens are shorter than that, so its loops are measured by that clock itself.
    """
    is_coarse = type(loop).__module__.partition(".")[0] == "uvloop"
    return time.monotonic if is_coarse else loop.time


def loop_seconds() -> float:
    """Time on that clock of the running loop."""
    return clock_of(asyncio.get_running_loop())()


class InterTokenLatency(msgspec.Struct, frozen=True, gc=False):
    """Times between tokens of the same sample, from one's delivery to its stream until the next
    one's: how late the reader takes them doesn't count. Tokens that come with one step have no time
    between them."""

    count: int
    """Gaps between two tokens, of all samples together; at least one."""
    mean_seconds: float
    p50_seconds: float
    """Half of the gaps are no longer. Off by at most 1 % or 1 µs, as gaps aren't kept; above two
    weeks by more."""
    p99_seconds: float
    """99 % of the gaps are no longer; likewise."""
    max_seconds: float
    counts: tuple[int, ...] = ()
    """Gaps no longer than each of `GAP_BOUNDS_SECONDS`, off as the quantiles are."""


class Timings(msgspec.Struct, frozen=True, gc=False):
    """What took how long in one request, in seconds; times begin when it was submitted.

        submitted ─► encoded ─► started ─────► first token ─► .. ─► last token, end
        ├ encoding ┤          │              │
        ├──── queued ─────────┼── prefill ───┤
        ├──────────── first token ───────────┤
        ├──────────────────────────── total ──────────────────────────────────────┤

    While the request goes on, everything is as far as it has come.
    """

    first_token_seconds: float | None
    """Time to first token (TTFT), of whichever sample; None when there was none."""
    total_seconds: float
    """Until the end; while there is none, until now."""
    completion_tokens: int
    """Generated tokens of all samples together."""
    encoding_seconds: float | None = None
    """Until the prompt was token ids and plugins had let the request in: the wait for a thread
    that encodes is in it. None where it came to no such moment."""
    queued_seconds: float | None = None
    """Until the first step with the request was planned, encoding included; None where none was."""
    inter_token_latency: InterTokenLatency | None = None
    """None while no sample has two tokens."""
    preemptions: int = 0
    """Times that it gave its memory to others and began again later; of all samples together."""
    device_seconds: float = 0.0
    """Its share of the steps that it was in: the time of a step, as the event loop hears of its
    end and `EngineStats.step_seconds_total` counts it, is shared out by tokens, one of a prompt as
    much as one that is decoded. Over all requests this is the time of all steps, less the shares
    of requests that had ended before a step in flight did. Steps that failed count too."""

    @property
    def prefill_seconds(self) -> float | None:
        """From the moment at which the first step was planned to the first token: computing the
        prompt, with the waits between its chunks and after a preemption. None when there was no
        token."""
        if self.first_token_seconds is None or self.queued_seconds is None:
            return None
        return self.first_token_seconds - self.queued_seconds

    @property
    def seconds_per_output_token(self) -> float | None:
        """Mean time between output tokens after the first (TPOT), whichever samples they belong
        to; None below two tokens."""
        if self.first_token_seconds is None or self.completion_tokens < 2:
            return None
        return (self.total_seconds - self.first_token_seconds) / (self.completion_tokens - 1)
