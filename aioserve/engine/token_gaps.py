"""The gaps between the tokens of one request, counted and not kept.

Quantiles come from a histogram with buckets that grow with the gap, so that whatever is said is off
by a fraction of itself: DDSketch (Masson, Rim, Lee: "DDSketch: a fast and fully-mergeable quantile
sketch with relative-error guarantees", VLDB 2019, section 2). Bucket `i` has the gaps in
`(g**(i - 1), g**i]` microseconds, where `g = (1 + a) / (1 - a)`; its middle, `2 * g**i / (g + 1)`,
is off by at most `a` of each. Bucket 0 has those up to 1 µs too, which are told as 1 µs at most.
"""

from __future__ import annotations

from math import ceil, log2

from aioserve.request import InterTokenLatency

__all__ = ["TokenGaps"]

ERROR = 0.01
GROWTH = (1 + ERROR) / (1 - ERROR)
BUCKETS_PER_OCTAVE = 1 / log2(GROWTH)
MAX_BUCKET = 1400
"""From 1.45e6 s on: longer gaps are counted with these."""


class TokenGaps:
    """Of all samples of one request together; at most `MAX_BUCKET + 1` numbers, whatever comes."""

    __slots__ = ("_buckets", "_count", "_last_seconds", "_max_seconds", "_sum_seconds")

    def __init__(self, num_samples: int) -> None:
        self._last_seconds: list[float | None] = [None] * num_samples
        self._buckets: dict[int, int] = {}
        self._count = 0
        self._sum_seconds = 0.0
        self._max_seconds = 0.0

    def token_came(self, sample: int, now_seconds: float) -> None:
        """A token of a sample; `now_seconds` never goes back."""
        last = self._last_seconds[sample]
        self._last_seconds[sample] = now_seconds
        if last is None:
            return
        gap = now_seconds - last
        self._count += 1
        self._sum_seconds += gap
        if gap > self._max_seconds:
            self._max_seconds = gap
        bucket = 0
        if gap > 1e-6:
            bucket = ceil(log2(gap * 1e6) * BUCKETS_PER_OCTAVE)
            if bucket > MAX_BUCKET:
                bucket = MAX_BUCKET
        if bucket in self._buckets:
            self._buckets[bucket] += 1
        else:
            self._buckets[bucket] = 1

    def summary(self) -> InterTokenLatency | None:
        """None where no sample has two tokens."""
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
