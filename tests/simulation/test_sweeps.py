"""Figures from many runs, compared with numpy or with work by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from aioserve.errors import ConfigError
from aioserve.simulation.gaps import Spread
from aioserve.simulation.metrics import Goodput
from aioserve.simulation.sweeps import (
    Estimate,
    Objective,
    bounds_of,
    estimate,
    objectives,
    rate_between,
)
from tests.simulation.test_figures import METRICS


def test_an_interval_is_students() -> None:
    # 12.706 is the 97.5th percentile with one degree of freedom, 2.045 with 29.
    two = estimate([1.0, 3.0])
    assert (two.mean, two.half_width) == (2.0, pytest.approx(12.706))
    many = [float(n) for n in range(30)]
    assert estimate(many).half_width == pytest.approx(2.045 * np.std(many, ddof=1) / 30**0.5)
    assert estimate([7.0]) == Estimate(7.0, None)
    assert estimate([1.0, math.inf]) == Estimate(math.inf, None)


def test_an_interval_has_the_true_mean_in_95_of_100_cases() -> None:
    rng = np.random.default_rng(0)
    for count in (2, 5, 40):
        draws = rng.normal(10.0, 3.0, (2000, count)).tolist()
        found = [estimate(draw) for draw in draws]
        held = np.mean([abs(one.mean - 10.0) <= (one.half_width or 0.0) for one in found])
        assert held == pytest.approx(0.95, abs=0.02)


@given(st.lists(st.floats(0.1, 99), unique=True, max_size=9), st.floats(0, 99))
def test_the_largest_rate_is_the_last_before_the_first_that_fails(
    rates: list[float], breaks: float
) -> None:
    below, above = ([r for r in rates if (r < breaks) is kept] for kept in (True, False))
    bounds = bounds_of({rate: rate < breaks for rate in rates})
    assert bounds == (max(below, default=None), min(above, default=None))


def test_a_rate_above_one_that_fails_does_not_count() -> None:
    assert bounds_of({4: True, 1: True, 2: False}) == (1, 2)


@given(st.floats(1e-6, 1e8), st.floats(1e-6, 1e8), st.floats(1e-6, 1e8))
def test_rates_between_close_in_on_where_a_promise_breaks(
    low: float, high: float, breaks: float
) -> None:
    kept = {low: low < breaks, high: high < breaks}
    for _ in range(60):
        rate = rate_between(kept)
        if rate is None:
            break
        largest, missed = bounds_of(kept)
        assert largest is not None
        assert missed is not None
        assert largest < rate < missed
        kept[rate] = rate < breaks
    else:
        raise AssertionError("it goes on for ever")
    largest, missed = bounds_of(kept)
    if largest is not None and missed is not None:
        assert missed == pytest.approx(largest, rel=2e-3)


def test_an_objective_is_kept_up_to_its_limit() -> None:
    ttft, share = objectives("ttft_p99=2, attainment=0.9")
    assert (ttft, share) == (Objective("ttft_p99", 2.0), Objective("attainment", 0.9))
    for p99, kept in ((2.0, True), (2.001, False), (math.inf, False)):
        assert ttft.met(replace(METRICS, ttft_seconds=Spread(1, 1, 1, p99, 9))) is kept
    assert ttft.met(replace(METRICS, ttft_seconds=None))
    for part, kept in ((0.9, True), (0.89, False)):
        assert share.met(replace(METRICS, goodput=Goodput(1, part, 1.0))) is kept
    assert not share.met(replace(METRICS, goodput=None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "slo must be NAME=LIMIT, once for each of ttft, tpot, gap, queue, e2e with _ and one"),
        ("ttft=2", "slo must be NAME=LIMIT"),
        ("ttft_p98=2", "slo must be NAME=LIMIT"),
        ("ttft_p99=2,ttft_p99=3", "slo must be NAME=LIMIT, once for each"),
        ("ttft_p99=soon", "slo: ttft_p99 must be a number of more than 0 and at most 1e.09, got"),
        ("ttft_p99=0", "slo: ttft_p99 must be a number"),
        ("ttft_p99=inf", "slo: ttft_p99 must be a number"),
        (
            "attainment=90",
            "slo: attainment must be .* more than 0 and at most 1, got '90'",
        ),
    ],
)
def test_what_promises_nothing_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        objectives(text)
