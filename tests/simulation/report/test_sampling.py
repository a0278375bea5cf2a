"""What is drawn of a long run says the same as all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.simulation.report.sampling import (
    cumulative_shares,
    means_over_time,
    peaks_over_time,
)

STEPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.5, 7.0]), st.floats(0.01, 5), st.integers(0, 99)),
    max_size=30,
)
"""Of each step: the pause before it, how long it takes, and a value."""


def columns(steps: list[tuple[float, float, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    pauses, durations, values = (np.array(column, float) for column in zip(*steps, strict=True))
    ended = np.cumsum(pauses + durations)
    return ended - durations, ended, values


@given(STEPS.filter(len), st.integers(1, 12))
def test_means_hold_the_whole_and_peaks_the_most(
    steps: list[tuple[float, float, int]], bins: int
) -> None:
    began, ended, values = columns(steps)
    edges = np.linspace(began[0], ended[-1], bins + 1)
    means = means_over_time(edges, began, ended, values)
    peaks = peaks_over_time(edges, began, ended, values)
    whole = (values * (ended - began)).sum()
    assert (means * np.diff(edges)).sum() == pytest.approx(whole, abs=1e-6)
    assert peaks.max() == values.max()
    for left, right, mean, peak in zip(edges[:-1], edges[1:], means, peaks, strict=True):
        shares = np.clip(np.minimum(ended, right) - np.maximum(began, left), 0, None)
        assert mean == pytest.approx((values * shares).sum() / (right - left), abs=1e-6)
        clearly_in = shares > 1e-9
        assert peak >= values[clearly_in].max(initial=0)
        assert peak == 0 or peak in values


def test_a_run_without_steps_is_flat() -> None:
    edges, nothing = np.linspace(0, 1, 4), np.empty(0)
    assert means_over_time(edges, nothing, nothing, nothing).tolist() == [0, 0, 0]
    assert peaks_over_time(edges, nothing, nothing, nothing).tolist() == [0, 0, 0]


@given(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=80),
    st.integers(0, 5),
    st.integers(2, 20),
)
def test_shares_of_few_points_are_those_of_all(
    values: list[float], never: int, most_points: int
) -> None:
    out_of = len(values) + never
    every, shares = cumulative_shares(values, out_of, len(values))
    assert every.tolist() == sorted(values)
    assert shares[-1] == len(values) / out_of
    some, of_some = cumulative_shares(values, out_of, most_points)
    assert len(some) <= most_points
    assert (some[0], some[-1]) == (min(values), max(values))
    assert set(zip(some, of_some, strict=True)) <= set(zip(every, shares, strict=True))
