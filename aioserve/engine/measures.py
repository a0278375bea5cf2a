"""Measures of an engine: time on the event loop, prompt tokens that wait, and gaps between tokens.

Knows only numbers.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from math import ceil, exp, floor, log2

import msgspec

from aioserve.request import FinishReason
from aioserve.timings import GAP_BOUNDS_SECONDS, InterTokenLatency

__all__ = ["EndedRequests", "HostTimes", "TokenGaps", "Waiting"]

MEMORY_SECONDS = 10.0
"""Age at which a step weighs 1/e in estimates of waiting time."""

ERROR = 0.01
GROWTH = (1 + ERROR) / (1 - ERROR)
BUCKETS_PER_OCTAVE = 1 / log2(GROWTH)
MAX_BUCKET = 1400
"""Longer gaps than 1.45e6 s are counted in this last bucket."""
LAST_BUCKETS = tuple(
    floor(log2(bound * 1e6 * (GROWTH + 1) / 2) * BUCKETS_PER_OCTAVE) for bound in GAP_BOUNDS_SECONDS
)
"""Last bucket whose middle is within each of `GAP_BOUNDS_SECONDS`."""
MAX_REMEMBERED = 512
"""Most ended requests that are remembered one by one."""
MAX_TIMES = 32
"""Most token times that a sample keeps before their gaps are counted."""


class HostTimes(msgspec.Struct):
    """Totals of one core loop, on the clock of its event loop.

             plan, launch        commit, deliver
    loop     [ step 8 ]..........[ step 7 ][ plan, launch step 9 ]....
    steps    ──── step 7 ───────►────────── step 8 ──────────────────►
    """

    planning_seconds: float = 0.0
    """Time to plan steps and hand them to the runner."""
    commit_seconds: float = 0.0
    """Time to take in the outcomes of steps."""
    delivery_seconds: float = 0.0
    """Time to make text of tokens and put them into the readers' mailboxes."""
    step_seconds: float = 0.0
    """Time in which at least one step was in flight, as far as the loop knew."""


class Waiting:
    """Counts prompt tokens that wait for their first answer token, and estimates the time they
    wait.

    A request waits from its submission until its completion begins. While anything waits, the
    seconds of steps and the prompt tokens that began are added up; older ones weigh less. Their
    ratio is the estimate. Steps in which nothing waits say nothing about waiting, and aren't
    counted. The estimate covers every reason to wait, like long prompts ahead, or completions that
    hold their places.
    """

    __slots__ = ("_begun_tokens", "_seconds", "tokens")

    def __init__(self) -> None:
        self.tokens: int = 0
        """Prompt tokens whose completions haven't begun."""
        self._begun_tokens = 0.0
        self._seconds = 0.0

    def came(self, tokens: int) -> None:
        self.tokens += tokens

    def left(self, tokens: int) -> None:
        """Note that a request ended before its completion began."""
        self.tokens -= tokens

    def began(self, tokens: int) -> None:
        """Note that a completion began, for `tokens` prompt tokens."""
        self.tokens -= tokens
        self._begun_tokens += tokens

    def step_ended(self, seconds: float) -> None:
        """Note the duration of a step during which something waited."""
        share = exp(-seconds / MEMORY_SECONDS)
        self._seconds = self._seconds * share + seconds
        self._begun_tokens *= share

    def seconds_for(self, tokens: int) -> float | None:
        """Estimate the seconds until `tokens` more prompt tokens have begun; None while unknown."""
        if not self._seconds or self._begun_tokens < 1:
            return None
        return tokens * self._seconds / self._begun_tokens


class EndedRequests:
    """Counts requests that have ended, and remembers the last `MAX_REMEMBERED` of them."""

    __slots__ = ("_last", "counts")

    def __init__(self) -> None:
        self.counts: dict[str, int] = {reason.value: 0 for reason in FinishReason}
        """Requests that have ended, by the reason."""
        self._last: deque[tuple[float | None, str | None, float]] = deque(maxlen=MAX_REMEMBERED)
        """Seconds until the end of those that ended by themselves, tenants, and device seconds."""

    def ended(
        self, reason: FinishReason, tenant: str | None, seconds: float, device_seconds: float
    ) -> None:
        """Note the end of a request, `seconds` after it was submitted."""
        self.counts[reason.value] += 1
        is_whole = reason in (FinishReason.STOP, FinishReason.LENGTH)
        self._last.append((seconds if is_whole else None, tenant, device_seconds))

    def latency(self) -> tuple[float | None, float | None]:
        """Return mean, in seconds, and variance, in square seconds, of the time from submission to
        the end.

        Only remembered requests that ended with "stop" or "length" count. None without any.
        """
        found = [seconds for seconds, _, _ in self._last if seconds is not None]
        if not found:
            return None, None
        mean = sum(found) / len(found)
        return mean, sum([(seconds - mean) ** 2 for seconds in found]) / len(found)

    def service_gap(self, open_requests: Iterable[tuple[str | None, float]]) -> float | None:
        """Return the largest difference in device seconds between two tenants; None for fewer.

        A tenant's are those of its remembered requests, and of its `open_requests`: tenants and
        their device seconds so far.
        """
        service: dict[str | None, float] = {}
        for tenant, seconds in [*[each[1:] for each in self._last], *open_requests]:
            service[tenant] = service.get(tenant, 0.0) + seconds
        if len(service) < 2:
            return None
        return max(service.values()) - min(service.values())


class TokenGaps:
    """The gaps between the tokens of one request, all samples together, as a histogram.

    It keeps at most `MAX_BUCKET + 1` numbers, and `MAX_TIMES` for each sample.

    Quantiles come from buckets that grow with the gap, so their relative error is bounded. This is
    DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile sketch with
    relative-error guarantees", VLDB 2019, section 2). Bucket `i` has the gaps in `(g**(i - 1),
    g**i]` microseconds, where `g = (1 + a) / (1 - a)`. Its middle, `2 * g**i / (g + 1)`, is off by
    at most the fraction `a`. Bucket 0 also has shorter gaps, which are reported as at most 1 µs.
    """

    __slots__ = ("_buckets", "_count", "_max_seconds", "_sum_seconds", "_times")

    def __init__(self, num_samples: int) -> None:
        self._times = [array("d") for _ in range(num_samples)]
        """Times of the last tokens of each sample, whose gaps aren't counted yet."""
        self._buckets: dict[int, int] = {}
        self._count = 0
        self._sum_seconds = 0.0
        self._max_seconds = 0.0

    def token_came(self, sample: int, now_seconds: float) -> None:
        """Note a token of a sample; `now_seconds` never goes back."""
        # Gaps are counted later, many at once: between two steps the caches are cold.
        times = self._times[sample]
        times.append(now_seconds)
        if len(times) == MAX_TIMES:
            self._count_gaps(times)

    def _count_gaps(self, times: array[float]) -> None:
        """Count the gaps between `times`, and keep only the last time."""
        buckets = self._buckets
        for earlier, later in pairwise(times):
            gap = later - earlier
            self._count += 1
            self._sum_seconds += gap
            if gap > self._max_seconds:
                self._max_seconds = gap
            bucket = 0
            if gap > 1e-6:
                bucket = min(ceil(log2(gap * 1e6) * BUCKETS_PER_OCTAVE), MAX_BUCKET)
            buckets[bucket] = buckets.get(bucket, 0) + 1
        del times[:-1]

    def summary(self) -> InterTokenLatency | None:
        """Summarize the gaps; None if no sample has two tokens."""
        for times in self._times:
            self._count_gaps(times)
        if not self._count:
            return None
        return InterTokenLatency(
            count=self._count,
            mean_seconds=self._sum_seconds / self._count,
            p50_seconds=self._quantile(0.5),
            p99_seconds=self._quantile(0.99),
            max_seconds=self._max_seconds,
            counts=self._counts(),
        )

    def _counts(self) -> tuple[int, ...]:
        """Count the gaps no longer than each of `GAP_BOUNDS_SECONDS`."""
        buckets = self._buckets.items()
        return tuple([sum([n for bucket, n in buckets if bucket <= last]) for last in LAST_BUCKETS])

    def _quantile(self, share: float) -> float:
        """Return the smallest gap that a share of all gaps don't exceed, within the error of a
        bucket."""
        wanted, counted, bucket = ceil(share * self._count), 0, 0
        for bucket in sorted(self._buckets):
            counted += self._buckets[bucket]
            if counted >= wanted:
                break
        return min(2e-6 * GROWTH**bucket / (GROWTH + 1), self._max_seconds)
