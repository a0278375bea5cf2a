"""Figures of a load: nothing that was sent is lost, and what failed makes no figure better."""

from __future__ import annotations

from array import array
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.simulation.records import Ending, RequestRecord
from aioserve.simulation.served import (
    Failure,
    ServedRequest,
    served_metrics_of,
    token_gaps_of,
)
from aioserve.traces.trace_request import TraceRequest


def served(
    number: int,
    ending: Ending | None = Ending.FINISHED,
    *,
    sent: float = 1.0,
    first: float | None = 2.0,
    end: float = 4.0,
    output: int = 3,
    failure: str = "",
    **fields: object,
) -> ServedRequest:
    record = RequestRecord(
        TraceRequest(number, sent, 10, 3, (), 10, tenant=f"c{number % 2}", ttft_target_seconds=1.5),
        ending,
        output,
        first_token_seconds=first,
        end_seconds=end,
        cached_tokens=4,
    )
    return ServedRequest(record, True, failure=failure, has_usage=True, **fields)  # type: ignore[arg-type]


def refused(number: int, detail: str = "") -> ServedRequest:
    one = served(number, Ending.REFUSED, first=None, output=0, failure="status 429")
    one.detail, one.has_usage = detail, False
    return one


def test_figures_are_those_of_the_records() -> None:
    load = [
        served(0, chunks=2, gap_seconds=array("d", [2.0]), late_seconds=0.001),
        served(1, Ending.CUT_SHORT, end=3.0, output=2, chunks=2, gap_seconds=array("d", [1.0])),
        refused(2, "the first"),
        refused(3, "the second"),
        served(4, Ending.FAILED, failure="cut off", output=1, chunks=1),
        served(5, None, output=1, chunks=1),
        ServedRequest(RequestRecord(TraceRequest(6, 9.0, 10, 3, (), 10))),
    ]
    metrics = served_metrics_of(load, 10.0, loop_lag_seconds=[0.001], busy_share=0.5)
    assert (metrics.requests, metrics.finished, metrics.cut_short) == (5, 2, 1)
    assert (metrics.refused, metrics.failed) == (2, 1)
    assert (metrics.unfinished, metrics.not_sent) == (1, 1)
    assert metrics.failures == {"status 429": Failure(2, "the first"), "cut off": Failure(1, "")}
    assert (metrics.prompt_tokens, metrics.cached_tokens, metrics.output_tokens) == (20, 8, 7)
    assert metrics.requests_per_second == 0.2
    assert metrics.total_tokens_per_second == 2.7
    # Three first tokens came after a second each, and two never.
    assert metrics.ttft_seconds is not None
    assert (metrics.ttft_seconds.p50, metrics.ttft_seconds.p90) == (1.0, inf)
    assert metrics.ttft_seconds.never == 2
    # The one that failed would have had a time per output token, and has none.
    assert metrics.tpot_seconds is not None
    assert (metrics.tpot_seconds.mean, metrics.tpot_seconds.never) == (1.0, 3)
    assert metrics.gap_seconds is not None
    assert metrics.gap_seconds.mean == 1.5
    assert metrics.tokens_per_chunk == pytest.approx(7 / 6)
    assert metrics.goodput is not None
    assert (metrics.goodput.requests, metrics.goodput.share) == (2, 0.4)
    assert {name: tenant.requests for name, tenant in metrics.tenants.items()} == {
        "c0": 3,
        "c1": 2,
    }
    assert metrics.generator.late_seconds is not None
    assert metrics.generator.late_seconds.max == 0.001
    assert metrics.generator.held_seconds is None
    assert metrics.generator.findings == []


def test_a_generator_that_did_not_keep_up_says_what_was_late() -> None:
    load = [served(0, late_seconds=0.2, held_seconds=1.0)]
    metrics = served_metrics_of(load, 1.0, loop_lag_seconds=[0.05], busy_share=0.95)
    assert metrics.generator.held_seconds is not None
    assert metrics.generator.findings == [
        "it was busy for 95% of the time",
        "requests were sent 200.0 ms late at the 99th percentile",
        "its event loop woke 50.0 ms late at the 99th percentile",
    ]


def test_what_could_not_be_counted_is_told() -> None:
    without_text = served(0, first=None)
    without_usage = served(1)
    without_usage.has_usage = False
    metrics = served_metrics_of([without_text, without_usage], 1.0)
    assert (metrics.without_text, metrics.without_usage) == (1, 1)
    assert metrics.ttft_seconds is not None
    assert metrics.ttft_seconds.never == 0


KINDS = st.sampled_from([*Ending, None, "not sent"])


@given(st.lists(KINDS, max_size=12))
def test_every_request_is_counted_once(kinds: list[Ending | str | None]) -> None:
    load = [
        ServedRequest(RequestRecord(TraceRequest(n, 0.0, 10, 3, (), 10)))
        if isinstance(kind, str)
        else served(n, kind, failure="x" if kind is Ending.FAILED else "")
        for n, kind in enumerate(kinds)
    ]
    metrics = served_metrics_of(load, 1.0)
    others = kinds.count(Ending.TOO_LONG) + kinds.count(Ending.OVERDUE)  # of the simulator alone
    parts = (metrics.finished, metrics.refused, metrics.failed, others)
    assert metrics.requests == sum(parts)
    assert metrics.requests + metrics.unfinished + metrics.not_sent == len(kinds)
    values, counts = token_gaps_of(load)
    assert len(values) == len(counts) == 0


def test_a_load_of_nothing_has_no_figures_and_no_error() -> None:
    metrics = served_metrics_of([], 0.0)
    assert (metrics.requests, metrics.requests_per_second) == (0, 0.0)
    assert metrics.ttft_seconds is None
    assert metrics.tokens_per_chunk is None
