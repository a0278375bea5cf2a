"""Arrivals that are drawn: as many a second as asked for, as bursty, and the same for a seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError
from aioserve.traces.trace_request import TraceRequest, check_request
from aioserve.traces.workload import with_arrivals

LENGTHS = [TraceRequest(number, 0.0, 10, 5, (), 10) for number in range(5_000)]


def pauses(arrivals: str, rate: float, seed: int = 0) -> np.ndarray:
    drawn = with_arrivals(LENGTHS, arrivals, rate=rate, seed=seed)
    return np.diff([request.arrival_seconds for request in drawn])


@pytest.mark.parametrize(
    ("arrivals", "variation"), [("poisson", 1.0), ("gamma:1", 1.0), ("gamma:3", 3.0)]
)
def test_pauses_have_the_mean_and_the_variation_that_were_asked_for(
    arrivals: str, variation: float
) -> None:
    drawn = pauses(arrivals, 20.0)
    assert drawn.mean() == pytest.approx(1 / 20, rel=0.15)
    assert drawn.std() / drawn.mean() == pytest.approx(variation, rel=0.15)
    assert drawn.min() >= 0


@given(st.floats(1e-3, 1e3), st.integers(0, 5), st.sampled_from(["poisson", "gamma:0.1"]))
def test_the_same_seed_gives_the_same_arrivals_at_every_rate(
    rate: float, seed: int, arrivals: str
) -> None:
    few = LENGTHS[:20]
    drawn = with_arrivals(few, arrivals, rate=rate, seed=seed)
    times = [request.arrival_seconds for request in drawn]
    assert times[0] == 0.0
    assert times == sorted(times)
    for request in drawn:
        check_request("trace", request)
    base = [r.arrival_seconds for r in with_arrivals(few, arrivals, rate=1.0, seed=seed)]
    assert times == pytest.approx([seconds / rate for seconds in base])
    assert with_arrivals(few, arrivals, rate=rate, seed=seed + 1) != drawn


def test_recorded_arrivals_stay() -> None:
    assert with_arrivals(LENGTHS[:3], "recorded", rate=1.0) == LENGTHS[:3]


@pytest.mark.parametrize(
    ("arrivals", "rate", "message"),
    [
        ("weibull", 1.0, "arrivals must be one of recorded, poisson, gamma:CV, got 'weibull'"),
        ("poisson:2", 1.0, "arrivals must be one of"),
        ("gamma", 1.0, "arrivals must be one of"),
        ("gamma:x", 1.0, "arrivals: gamma must be a number, got 'x'"),
        ("gamma:0", 1.0, "arrivals: gamma must be more than 0, got 0.0"),
        ("gamma:1e-9", 1.0, "arrivals: gamma must be at least 0.01, got 1e-09"),
        ("gamma:101", 1.0, "arrivals: gamma must be at most 100, got 101.0"),
        ("poisson", 0.0, "rate must be more than 0, got 0.0"),
        ("poisson", 1e-9, "rate 1e-09 makes 5000 requests take .* s; it may be at most 1e"),
    ],
)
def test_what_makes_no_arrivals_is_named(arrivals: str, rate: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_arrivals(LENGTHS, arrivals, rate=rate)
