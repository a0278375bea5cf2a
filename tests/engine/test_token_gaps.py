"""Gaps between tokens, counted in buckets: within 1 % of the true gaps, in bounded memory."""

from __future__ import annotations

import itertools
import math

from hypothesis import example, given
from hypothesis import strategies as st

from aioserve.engine import measures
from aioserve.engine.measures import MAX_BUCKET, TokenGaps
from aioserve.timings import GAP_BOUNDS_SECONDS

GAPS = st.floats(0, 1e3) | st.floats(1e-7, 1e-2) | st.just(0.0)


def quantile(gaps: list[float], share: float) -> float:
    return sorted(gaps)[math.ceil(share * len(gaps)) - 1]


@given(st.lists(st.tuples(st.integers(0, 2), GAPS), max_size=300))
@example([(0, 0.0), *[(0, 0.001)] * 98, (0, 7.0), (0, 7.0)])
def test_what_is_told_is_within_one_percent_of_the_gaps_of_each_sample(came):
    found, now = TokenGaps(3), 0.0
    times: list[list[float]] = [[], [], []]
    for sample, gap in came:
        now += gap
        found.token_came(sample, now)
        times[sample].append(now)
    gaps = [b - a for of in times for a, b in itertools.pairwise(of)]
    told = found.summary()
    if not gaps:
        assert told is None
        return
    assert told is not None
    assert told.count == len(gaps)
    assert math.isclose(told.mean_seconds, sum(gaps) / len(gaps), rel_tol=1e-9)
    assert told.max_seconds == max(gaps)
    for share, value in ((0.5, told.p50_seconds), (0.99, told.p99_seconds)):
        exact = quantile(gaps, share)
        assert abs(value - exact) <= max(0.01 * exact * (1 + 1e-9), 1e-6)
    for bound, counted in zip(GAP_BOUNDS_SECONDS, told.counts, strict=True):
        least = sum(gap <= bound * 0.989 for gap in gaps)
        assert least <= counted <= sum(gap <= bound * 1.011 for gap in gaps)


def test_any_number_of_gaps_takes_bounded_memory():
    found, now = TokenGaps(1), 0.0
    for exponent in range(-300, 300):
        for step in range(10):
            now = now + 10.0**exponent * (1 + step / 10) if exponent < 9 else now * 1.01
            found.token_came(0, now)
    assert len(found._buckets) <= MAX_BUCKET + 1
    told = found.summary()
    assert told is not None
    assert told.count == 5999


def test_the_last_bucket_is_where_the_module_says():
    assert math.isclose(measures.GROWTH**MAX_BUCKET, 1.45e12, rel_tol=0.01)
