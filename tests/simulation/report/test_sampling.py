"""Charts of a long run are drawn from a sample, which says the same as all of it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.simulation.gaps import quantile
from aioserve.simulation.report.overtime import means_of_steps, means_over_time, peaks_over_time

STEPS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 0.5, 7.0]), st.floats(0.01, 5), st.integers(0, 99)),
    max_size=30,
)
"""Steps: the pause before each, its duration, and a value."""


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


@given(STEPS.filter(len), st.integers(1, 12))
def test_what_always_was_the_same_is_the_mean_of_the_steps_however_long_the_pauses(
    steps: list[tuple[float, float, int]], bins: int
) -> None:
    began, ended, _ = columns(steps)
    edges = np.linspace(began[0], ended[-1], bins + 1)
    means = means_of_steps(edges, began, ended, np.full(len(began), 7.0))
    ran = means_over_time(edges, began, ended, np.ones(len(began))) > 1e-6
    assert means[ran] == pytest.approx(7.0)
    assert np.isnan(means[~ran]).all()


VALUES = st.lists(st.floats(0.001, 100), min_size=1, max_size=80)
SHARES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0])


@given(VALUES, SHARES)
def test_a_quantile_is_the_percentile_that_the_metrics_have(
    values: list[float], share: float
) -> None:
    found = quantile(sorted(values), share)
    assert found == pytest.approx(float(np.percentile(values, share * 100)))


@given(st.lists(st.tuples(st.floats(0.001, 100), st.integers(1, 9)), min_size=1), SHARES)
def test_a_value_that_is_there_often_counts_as_often(
    counted: list[tuple[float, int]], share: float
) -> None:
    counted.sort()
    values, counts = (np.array(column) for column in zip(*counted, strict=True))
    every = np.repeat(values, counts).tolist()
    assert quantile(values, share, counts=counts) == pytest.approx(quantile(every, share))


@given(VALUES, st.integers(0, 40), SHARES)
def test_the_missing_are_larger_than_all(values: list[float], missing: int, share: float) -> None:
    values.sort()
    place = share * (len(values) + missing - 1)
    found = quantile(values, share, missing=missing)
    if place > len(values) - 1 + 1e-6:
        assert found is None
    elif place <= len(values) - 1:
        assert found == pytest.approx(float(np.interp(place, range(len(values)), values)))


def test_of_nothing_there_is_no_quantile() -> None:
    assert quantile([], 0.5) is None
    assert quantile([], 0.5, missing=3) is None
