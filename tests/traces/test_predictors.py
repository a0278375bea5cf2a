"""Forecasts of answers: as good as they say, the same for the same seed, and within bounds."""

from __future__ import annotations

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import ConfigError
from aioserve.traces.trace_request import TraceRequest, check_request, with_scaled_lengths
from aioserve.traces.workload import with_predictions


def trace_of(answers: list[tuple[str, int]]) -> list[TraceRequest]:
    return [
        TraceRequest(number, float(number), 10, answer, (), 10, tenant=tenant)
        for number, (tenant, answer) in enumerate(answers)
    ]


def predicted(trace: list[TraceRequest], predictor: str, seed: int = 0) -> list[int | None]:
    found = with_predictions(trace, predictor, seed=seed)
    for request in found:
        check_request("trace", request)
    return [request.predicted_output_tokens for request in found]


traces = st.lists(
    st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 1 << 24)), max_size=20
).map(trace_of)


@given(traces, st.floats(0, 10), st.integers(0, 9))
def test_every_forecast_is_one_that_a_request_may_have(
    trace: list[TraceRequest], error: float, seed: int
) -> None:
    noisy = predicted(trace, f"noisy:{error}", seed)
    assert noisy == predicted(trace, f"noisy:{error}", seed)
    assert None not in noisy
    assert predicted(trace, "noisy:0") == predicted(trace, "oracle")
    assert predicted(trace, "oracle") == [max(1, request.output_tokens) for request in trace]
    assert predicted(trace, "constant:7") == [7] * len(trace)


def test_a_noisy_forecast_has_the_error_that_it_says() -> None:
    trace = trace_of([("", 1_000_000)] * 20_000)
    logs = np.log(np.array(predicted(trace, "noisy:0.5"), float) / 1_000_000)
    assert np.median(logs) == pytest.approx(0, abs=0.02)
    assert logs.std() == pytest.approx(0.5, rel=0.02)
    assert predicted(trace, "noisy:0.5", 0) != predicted(trace, "noisy:0.5", 1)


@given(traces)
def test_a_forecast_by_tenant_is_the_mean_of_what_came_before(trace: list[TraceRequest]) -> None:
    for index, found in enumerate(predicted(trace, "by-tenant")):
        before = trace[:index]
        theirs = [r for r in before if r.tenant == trace[index].tenant] or before
        if not theirs:
            assert found is None
        else:
            mean = fmean(max(1, r.output_tokens) for r in theirs)
            assert found is not None
            assert abs(found - mean) <= 0.5 + 1e-6


def test_a_forecast_by_tenant_goes_by_arrival_and_not_by_number() -> None:
    trace = list(reversed(trace_of([("a", 30), ("a", 10)])))
    assert predicted(trace, "by-tenant") == [30, None]


@pytest.mark.parametrize(
    ("predictor", "message"),
    [
        ("best", "predictor must be one of oracle, noisy:ERROR, constant:TOKENS, by-tenant, got"),
        ("oracle:1", "predictor must be one of"),
        ("noisy", "predictor must be one of"),
        ("noisy:", "predictor: noisy must be a number, got ''"),
        ("noisy:-1", "predictor: noisy must be from 0 on, got -1.0"),
        ("noisy:11", "predictor: noisy must be at most 10, got 11.0"),
        ("noisy:nan", "predictor: noisy must be from 0 on, got nan"),
        ("constant:0", "predictor: constant must be at least 1, got 0"),
        ("constant:1.5", "predictor: constant must be an int, got '1.5'"),
        (7, "predictor must be one of"),
    ],
)
def test_what_is_no_predictor_is_named(predictor: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_predictions(trace_of([("", 1)]), predictor)


def test_a_forecast_is_scaled_with_the_answer() -> None:
    trace = with_predictions(trace_of([("", 320)]), "oracle")
    assert with_scaled_lengths(trace, 1 / 16)[0].predicted_output_tokens == 20
