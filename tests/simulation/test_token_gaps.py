"""Gaps between tokens: the same told one by one or many at once, and exact percentiles."""

from __future__ import annotations

from math import inf, isinf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.simulation.gaps import Spread, TokenGaps, spread_of, weighted_spread

answers = st.lists(st.integers(0, 4), unique=True, max_size=4)
stretches = st.lists(
    st.tuples(answers, st.lists(st.integers(1, 9), max_size=5), st.sets(st.integers(0, 4))),
    max_size=12,
)
"""Answers that run, what their next steps take, and which of all answers end then."""


@given(stretches)
def test_gaps_are_those_between_the_tokens_of_each_answer(
    told: list[tuple[list[int], list[int], set[int]]],
) -> None:
    now, gaps, stepwise = 0.0, TokenGaps(), TokenGaps()
    times: dict[int, list[float]] = {}
    every: list[float] = []
    for together, steps, ending in told:
        ends = [now := now + seconds for seconds in steps]
        gaps.add(together, ends)
        for end in ends:
            stepwise.add(tuple(together), [end])
        for answer in together:
            times.setdefault(answer, []).extend(ends)
        for answer in ending:
            theirs = np.diff(times.pop(answer, [])).tolist()
            every += theirs
            longest = max(theirs, default=None)
            assert gaps.ended(answer) == stepwise.ended(answer) == longest
    every += [gap for ends in times.values() for gap in np.diff(ends).tolist()]
    expected = spread_of(every)
    assert gaps.spread() == stepwise.spread()
    if expected is None:
        assert gaps.spread() is None
        return
    found = gaps.spread()
    assert found is not None
    assert found.mean == pytest.approx(expected.mean)
    assert (found.p50, found.p90, found.p99, found.max) == (
        expected.p50,
        expected.p90,
        expected.p99,
        expected.max,
    )


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=20),
)
def test_percentiles_are_numpys_of_all_the_values(counted: list[tuple[int, int]]) -> None:
    values, counts = (np.array(column) for column in zip(*counted, strict=True))
    found = weighted_spread(values.astype(float), counts)
    every = np.repeat(values.astype(float), counts)
    expected = [every.mean(), *np.percentile(every, (50, 90, 99)), every.max()]
    assert found is not None
    assert [found.mean, found.p50, found.p90, found.p99, found.max] == pytest.approx(expected)


@given(st.lists(st.floats(0, 9), max_size=9), st.integers(0, 9))
def test_what_never_came_makes_no_percentile_better(values: list[float], never: int) -> None:
    found, without = spread_of(values, never=never), spread_of(values)
    if found is None:
        assert not values
        assert not never
        return
    assert found.never == never
    assert isinf(found.max) == bool(never)
    if without is not None:
        assert found.mean == without.mean
        assert all(getattr(found, p) >= getattr(without, p) for p in ("p50", "p90", "p99", "max"))


def test_of_what_never_came_at_all_everything_is_infinite() -> None:
    assert spread_of([None], never=3) == Spread(inf, inf, inf, inf, inf, 3)
    # The 99th of 101 values in order is the last but one.
    assert spread_of([1.0] * 100, never=1) == Spread(1.0, 1.0, 1.0, 1.0, inf, 1)
    assert spread_of([1.0] * 99, never=1) == Spread(1.0, 1.0, 1.0, inf, inf, 1)
