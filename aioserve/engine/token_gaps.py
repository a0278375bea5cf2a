"""The gaps between the tokens of one request, counted and not kept, but for the last few.

Quantiles come from a histogram with buckets that grow with the gap, so that whatever is said is off
by a fraction of itself: DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile
sketch with relative-error guarantees", VLDB 2019, section 2). Bucket `i` has the gaps in
`(g**(i - 1), g**i]` microseconds, where `g = (1 + a) / (1 - a)`; its middle, `2 * g**i / (g + 1)`,
is off by at most `a` of each. Bucket 0 has those up to 1 µs too, which are told as 1 µs at most.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from math import ceil, log2

from aioserve.request import InterTokenLatency

__all__ = ["TokenGaps"]

ERROR = 0.01
GROWTH = (1 + ERROR) / (1 - ERROR)
BUCKETS_PER_OCTAVE = 1 / log2(GROWTH)
MAX_BUCKET = 1400
"""From 1.45e6 s on: longer gaps are counted with these."""
MAX_TIMES = 32
"""Of a sample, before they are counted."""


class TokenGaps:
    """Of all samples of one request together; at most `MAX_BUCKET + 1` numbers, whatever comes, and
    `MAX_TIMES` for each sample."""

    __slots__ = ("_buckets", "_count", "_max_seconds", "_sum_seconds", "_times")

    def __init__(self, num_samples: int) -> None:
        self._times = [array("d") for _ in range(num_samples)]
        """When the last tokens of each sample came, of whose gaps none is counted yet."""
        self._buckets: dict[int, int] = {}
        self._count = 0
        self._sum_seconds = 0.0
        self._max_seconds = 0.0

    def token_came(self, sample: int, now_seconds: float) -> None:
        """A token of a sample; `now_seconds` never goes back."""
        # Counted later, many at once: between two steps all that is read comes from cold caches.
        times = self._times[sample]
        times.append(now_seconds)
        if len(times) == MAX_TIMES:
            self._count_gaps(times)

    def _count_gaps(self, times: array[float]) -> None:
        """Count those between `times`, and keep the last of these."""
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
        """None where no sample has two tokens."""
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
        )

    def _quantile(self, share: float) -> float:
        """The gap that at least `share` of all are no longer than: the smallest such."""
        wanted, counted, bucket = ceil(share * self._count), 0, 0
        for bucket in sorted(self._buckets):
            counted += self._buckets[bucket]
            if counted >= wanted:
                break
        return min(2e-6 * GROWTH**bucket / (GROWTH + 1), self._max_seconds)
