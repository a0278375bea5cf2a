"""The simulator: every request ends once, and what is counted adds up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Refusal, RequestView, SchedulerView, SchedulingPolicy, Verdict
from aioserve.errors import ConfigError
from aioserve.paging.pages import capacity_tokens
from aioserve.simulation.metrics import metrics_of
from aioserve.simulation.records import Ending, SimulationResult
from aioserve.simulation.simulator import simulate
from aioserve.simulation.timeline import Span, Timeline
from aioserve.steps.plan import StepPlan
from aioserve.traces.trace_request import TraceRequest
from aioserve_plugins.priority import Priority


class LinearCost:
    """A second a step and a hundredth more for each token."""

    def step_seconds(self, plan: StepPlan) -> float:
        return 1.0 + plan.num_tokens / 100


class Whimsical(SchedulingPolicy):
    """Answers from a list of numbers, over and over: order, chunks, and who waits or is refused."""

    def __init__(self, whims: list[int]) -> None:
        self.whims = whims
        self.asked = 0

    def whim(self, below: int) -> int:
        self.asked += 1
        return self.whims[self.asked % len(self.whims)] % below

    def order(self, waiting: Sequence[RequestView], view: SchedulerView) -> list[RequestView]:
        requests = list(waiting)
        first = self.whim(len(requests) or 1)
        return requests[first:] + requests[: self.whim(len(requests) + 1)][:first]

    def admit(self, request: RequestView, view: SchedulerView) -> Verdict | Refusal:
        verdicts = (Verdict.NOW, Verdict.NOW, Verdict.LATER, Verdict.NEVER, Refusal("a whim"))
        return verdicts[self.whim(5)]

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        return self.whim(budget_tokens + 1)


def run(
    trace: list[TraceRequest], policy: SchedulingPolicy | None = None, **options: Any
) -> SimulationResult:
    given: dict[str, Any] = {"cost": LinearCost(), "num_pages": None, "page_size": 4}
    return simulate(trace, policy or SchedulingPolicy(), **(given | options))


def asking(
    number: int, arrival: float, prompt: int, output: int, ids: tuple[int, ...] = (), **more: Any
) -> TraceRequest:
    return TraceRequest(number, arrival, prompt, output, ids, 4, **more)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    requests = []
    for number in range(draw(st.integers(1, 12))):
        blocks = draw(st.integers(0, 6))
        first = draw(st.integers(0, 2)) * 10
        requests.append(
            asking(
                number,
                draw(st.sampled_from([0.0, 0.5, 3.0, 40.0])),
                blocks * 4 + draw(st.integers(1, 3)),
                draw(st.integers(0, 9)),
                tuple(range(first, first + blocks)),
                tenant=draw(st.sampled_from(["", "a", "b"])),
                session=draw(st.sampled_from(["", "s"])),
                max_tokens=draw(st.sampled_from([None, None, 1, 4, 9])),
                ttft_target_seconds=draw(st.sampled_from([None, 5.0])),
                deadline_seconds=draw(st.sampled_from([None, None, None, 0.7, 4.0, 30.0])),
            )
        )
    return requests


@settings(deadline=None)
@given(
    traces(),
    st.none() | st.lists(st.integers(0, 100), min_size=1, max_size=20),
    st.none() | st.integers(1, 20),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.none() | st.integers(1, 9),
)
def test_every_request_ends_once_and_all_counts_add_up(
    trace: list[TraceRequest],
    whims: list[int] | None,
    num_pages: int | None,
    page_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    overlap: bool,
    max_tokens: int | None,
) -> None:
    def once(timeline: Timeline | None = None) -> SimulationResult:
        return run(
            trace,
            None if whims is None else Whimsical(whims),
            num_pages=num_pages,
            page_size=page_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            output_reserve_tokens=2,
            prefix_caching=prefix_caching,
            overlap=overlap,
            max_tokens=max_tokens,
            timeline=timeline,
        )

    result = once()
    records = result.requests
    assert sorted(r.request.number for r in records) == list(range(len(trace)))
    fits = capacity_tokens(result.num_pages, page_size)
    for record in records:
        request = record.request
        answer = max(1, request.output_tokens)
        cap = max_tokens if request.max_tokens is None else request.max_tokens
        most = min(fits - request.prompt_tokens, cap or fits)
        assert (record.ending is Ending.TOO_LONG) == (most < 1)
        assert record.end_seconds is not None
        if record.ending in (Ending.FINISHED, Ending.CUT_SHORT):
            assert record.output_tokens == min(answer, most)
            assert (record.ending is Ending.CUT_SHORT) == (most < answer)
            assert record.started_seconds is not None
            assert record.first_token_seconds is not None
            assert request.arrival_seconds <= record.started_seconds < record.first_token_seconds
            assert record.first_token_seconds <= record.end_seconds
            assert (record.first_token_seconds == record.end_seconds) == (record.output_tokens == 1)
            assert record.wait_tokens is not None
            assert 0 <= record.wait_tokens <= result.tokens_computed
            assert 0 <= record.cached_tokens < request.prompt_tokens
        elif record.output_tokens == 0:
            assert record.first_token_seconds is None
    if whims is None:
        assert all(r.ending is not Ending.REFUSED for r in records)

    metrics = metrics_of(result)
    others = metrics.refused + metrics.too_long + (metrics.overdue or 0)
    assert metrics.requests == metrics.finished + others == len(trace)
    assert metrics.cut_short == sum(r.ending is Ending.CUT_SHORT for r in records)
    assert metrics.output_tokens == sum(r.output_tokens for r in records)
    started = [r for r in records if r.started_seconds is not None]
    assert metrics.blocks == sum(len(r.request.block_ids) for r in started)
    assert 0 <= metrics.block_hits <= metrics.blocks
    if not metrics.preemptions and not metrics.overdue:
        prompts = sum(r.request.prompt_tokens - r.cached_tokens for r in started)
        assert metrics.tokens_prefilled == prompts
        # The last token of an answer is computed only where the next step was planned before it was
        # known to be the last.
        needed = prompts + metrics.output_tokens - len(started)
        unknown = metrics.finished - metrics.cut_short if overlap else 0
        assert needed <= metrics.tokens_computed <= needed + unknown
    if not prefix_caching and not metrics.preemptions:
        assert metrics.block_hits == metrics.token_hit_share == 0 or not started
    assert result.busy_seconds == pytest.approx(result.steps + result.tokens_computed / 100)
    assert result.busy_seconds <= result.seconds + 1e-9
    mean, most = metrics.kv_occupancy_mean, metrics.kv_occupancy_max
    assert (mean is None) == (most is None) == (num_pages is None)
    if mean is not None and most is not None:
        assert 0 <= mean <= most <= 1
    assert metrics.policy_faults == 0
    assert sum(c.requests for c in metrics.tenants.values()) == sum(bool(r.tenant) for r in trace)
    assert (metrics.goodput is None) == (not any(r.has_target for r in trace))
    if metrics.goodput is not None:
        assert metrics.goodput.requests <= metrics.finished

    timeline = Timeline()
    again = metrics_of(once(timeline))
    assert msgspec.json.encode(metrics) == msgspec.json.encode(again)
    check_timeline(timeline, result)


def check_timeline(timeline: Timeline, result: SimulationResult) -> None:
    """Check that the timeline adds up to the counters."""
    assert len(timeline) == result.steps
    refused = any(record.ending is Ending.REFUSED for record in result.requests)
    missed = result.preemptions - len(timeline.preemptions)
    assert missed == 0 or (refused and missed > 0)
    assert timeline.column("pages_held").max(initial=0) == result.pages_held_max
    durations = timeline.column("ended_seconds") - timeline.column("began_seconds")
    assert durations.sum() == pytest.approx(result.busy_seconds)
    tokens = timeline.column("prefill_tokens") + timeline.column("decode_tokens")
    assert tokens.sum() == sum(s.tokens for s in timeline.spans) == result.tokens_computed
    if not result.preemptions:
        assert timeline.column("prefill_tokens").sum() == result.tokens_prefilled
    for step, after in pairwise(timeline.steps):
        assert step.ended_seconds <= after.began_seconds
    records = {record.request.number: record for record in result.requests}
    last: dict[int, Span] = {}
    for span in timeline.spans:
        record, before = records[span.request], last.get(span.request)
        assert span.began_seconds < span.ended_seconds
        if before is None:
            assert span.began_seconds == record.started_seconds
            assert not span.decodes
        else:
            assert before.ended_seconds <= span.began_seconds
            # Decoding steps in a row are one span.
            assert not (
                before.decodes and span.decodes and before.ended_seconds == span.began_seconds
            )
        last[span.request] = span
    for record in records.values():
        if record.ending is Ending.CUT_SHORT:
            assert last[record.request.number].ended_seconds == record.end_seconds
        elif record.ending is Ending.FINISHED and record.end_seconds is not None:
            assert last[record.request.number].ended_seconds >= record.end_seconds


def test_times_are_those_of_the_steps() -> None:
    # Step 1 computes 9 tokens, and steps 2 and 3 one each.
    record, late = run([asking(0, 2.0, 9, 3), asking(1, 100.0, 4, 1)]).requests
    assert record.started_seconds == 2.0
    assert record.first_token_seconds == pytest.approx(3.09)
    assert record.end_seconds == pytest.approx(5.11)
    assert late.started_seconds == 100.0


def test_a_request_that_comes_during_a_step_waits_for_the_one_planned_beside_it() -> None:
    trace = [asking(0, 0.0, 9, 3), asking(1, 0.5, 4, 1)]
    # Steps of 9 tokens, of 1, and of the newcomer's 4 beside another 1.
    first, second = run(trace).requests
    assert (second.started_seconds, second.first_token_seconds) == pytest.approx((2.10, 3.15))
    assert first.end_seconds == second.first_token_seconds
    _, alone = run(trace, overlap=False).requests
    assert (alone.started_seconds, alone.first_token_seconds) == pytest.approx((1.09, 2.14))


def test_a_wait_is_counted_in_tokens_of_others() -> None:
    first, second = run(
        [asking(0, 0.0, 10, 1), asking(1, 0.0, 5, 1)], max_num_batched_tokens=10
    ).requests
    # Beside the second runs a token of the first, whose end isn't known when the step is planned.
    assert (first.wait_tokens, second.wait_tokens) == (0, 11)


def test_a_wait_ends_with_the_first_token_and_not_with_the_first_chunk() -> None:
    class TwoTokensAStep(SchedulingPolicy):
        def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
            return budget_tokens if request.request_id == "0" else 2

    trace = [asking(0, 0.0, 10, 30), asking(1, 0.0, 6, 1)]
    first, second = run(trace, TwoTokensAStep(), overlap=False).requests
    assert first.started_seconds == second.started_seconds
    # Three chunks: beside the prompt of the first, and then beside one token of it each.
    assert (first.wait_tokens, second.wait_tokens) == (2, 12)


def test_a_tenant_that_waits_is_behind_by_what_others_got() -> None:
    trace = [asking(n, 0.0, 10, 1, tenant="aaab"[n]) for n in range(4)]
    # Both have requests waiting until the third step starts the last of "a".
    assert run(trace, max_num_batched_tokens=10).service_gap_tokens == 20
    assert run(trace[:3]).service_gap_tokens is None


def test_a_policy_sees_tenant_class_targets_and_deadline_of_each_request() -> None:
    seen: list[tuple[object, ...]] = []

    class Recording(SchedulingPolicy):
        def arrived(self, requests: Sequence[RequestView]) -> None:
            for r in requests:
                targets = r.ttft_target_seconds, r.tpot_target_seconds, r.deadline_seconds
                seen.append((r.tenant, dict(r.metadata), *targets))

    targets: dict[str, Any] = {
        "ttft_target_seconds": 2.0,
        "tpot_target_seconds": 0.5,
        "deadline_seconds": 9.0,
    }
    trace = [
        asking(0, 0.0, 8, 1, tenant="a", request_class="chat", **targets),
        asking(1, 0.0, 8, 1),
    ]
    run(trace, Recording())
    assert seen == [("a", {"class": "chat"}, 2.0, 0.5, 9.0), (None, {}, None, None, None)]


def test_a_request_is_ended_at_its_deadline_wherever_it_is() -> None:
    """Steps of one token take 1.01 s: the first token of the second comes after its deadline."""
    trace = [
        asking(0, 0.0, 1, 50, deadline_seconds=3.5),
        asking(1, 0.0, 1, 50, deadline_seconds=0.5),
        asking(2, 0.0, 1, 2, deadline_seconds=60.0),
        asking(3, 0.0, 1, 2),
    ]
    several: list[dict[str, Any]] = [{"max_num_seqs": 1}, {}, {"overlap": False}]
    for options in several:
        result = run(trace, **options)
        first, second, *others = result.requests
        assert (first.ending, first.end_seconds) == (Ending.OVERDUE, 3.5)
        assert first.output_tokens == 3
        assert (second.ending, second.end_seconds) == (Ending.OVERDUE, 0.5)
        assert (second.output_tokens, second.first_token_seconds) == (0, None)
        assert [other.ending for other in others] == [Ending.FINISHED] * 2
        metrics = metrics_of(result)
        assert (metrics.overdue, metrics.finished) == (2, 2)
        assert metrics.goodput is not None
        assert metrics.goodput.share == 0.5
        assert metrics.ttft_seconds is not None
        assert metrics.ttft_seconds.never == 1


def test_a_caller_in_a_closed_loop_goes_on_after_a_deadline() -> None:
    trace = [
        asking(0, 0.0, 1, 50, deadline_seconds=2.5),
        asking(1, 1.0, 1, 1, follows=0, think_seconds=2.0),
    ]
    assert run(trace, closed_loop=True).requests[1].request.arrival_seconds == 4.5


def test_a_policy_sees_the_priorities_of_a_trace() -> None:
    """One seat, taken by a request of 50 tokens: the urgent one doesn't wait for its end."""
    trace = [
        asking(0, 0.0, 8, 50, priority=1),
        asking(1, 2.5, 8, 2, priority=0),
        asking(2, 2.5, 8, 2, priority=-1),
    ]

    def waits(policy: SchedulingPolicy) -> list[float]:
        records = run(trace, policy, max_num_seqs=1).requests
        return [(r.first_token_seconds or 0.0) - r.request.arrival_seconds for r in records]

    assert min(waits(SchedulingPolicy())[1:]) > 40
    _, second, first = waits(Priority())
    assert first < 5 < second < 10


def test_a_policy_sees_when_the_first_token_came() -> None:
    seen: list[float | None] = []

    class Recording(SchedulingPolicy):
        def finished(self, requests: Sequence[RequestView]) -> None:
            seen.extend(request.first_token_seconds for request in requests)

    result = run([asking(0, 0.0, 8, 1), asking(1, 0.5, 8, 4)], Recording())
    assert seen == [record.first_token_seconds for record in result.requests]


def test_equal_blocks_are_found_and_answers_are_not() -> None:
    trace = [
        asking(0, 0.0, 8, 8, (0, 1)),
        asking(1, 50.0, 13, 1, (0, 1, 2)),
        asking(2, 60.0, 13, 1, (0, 1, 2)),
    ]
    records = run(trace).requests
    assert [r.cached_tokens for r in records] == [0, 8, 12]
    metrics = metrics_of(run(trace))
    assert (metrics.blocks, metrics.block_hits) == (8, 5)
    assert metrics.token_hit_share == 20 / 34


def test_a_session_finds_only_its_own() -> None:
    trace = [
        asking(number, 50.0 * number, 9, 1, (0, 1), session=session)
        for number, session in enumerate(["a", "b", "a"])
    ]
    assert [r.cached_tokens for r in run(trace).requests] == [0, 0, 8]


def test_scarce_memory_preempts_and_loses_no_token() -> None:
    trace = [asking(number, 0.0, 8, 24) for number in range(4)]
    result = run(trace, num_pages=12, output_reserve_tokens=0)
    assert result.preemptions > 0
    assert result.pages_held_max <= 12
    assert [r.output_tokens for r in result.requests] == [24] * 4


def test_prompts_that_fit_no_memory_are_set_aside_and_answers_end_where_it_is_full() -> None:
    trace = [asking(0, 0.0, 32, 1), asking(1, 0.0, 31, 1), asking(2, 0.0, 30, 9)]
    result = run(trace, num_pages=8)
    endings = [record.ending for record in result.requests]
    assert endings == [Ending.TOO_LONG, Ending.FINISHED, Ending.CUT_SHORT]
    assert [record.output_tokens for record in result.requests] == [0, 1, 2]
    metrics = metrics_of(result)
    assert (metrics.too_long, metrics.finished, metrics.cut_short) == (1, 2, 1)


def test_an_answer_is_cut_short_where_its_caller_asked_for_less() -> None:
    trace = [asking(0, 0.0, 5, 9), asking(1, 0.0, 5, 9, max_tokens=7), asking(2, 0.0, 5, 2)]
    records = run(trace, max_tokens=3).requests
    assert [record.output_tokens for record in records] == [3, 7, 2]
    cut, finished = Ending.CUT_SHORT, Ending.FINISHED
    assert [record.ending for record in records] == [cut, cut, finished]


def test_the_step_after_an_answers_end_is_planned_before_the_end_is_known() -> None:
    # Two tokens, of which the second ends it; one step more is under way by then.
    known = run([asking(0, 0.0, 5, 2, max_tokens=2)])
    unknown = run([asking(0, 0.0, 5, 2)])
    assert [r.tokens_computed for r in (known, unknown)] == [6, 7]
    assert known.requests[0].end_seconds == unknown.requests[0].end_seconds
    assert run([asking(0, 0.0, 5, 2)], overlap=False).tokens_computed == 6


def test_memory_without_a_limit_has_no_share_that_is_held() -> None:
    metrics = metrics_of(run([asking(0, 0.0, 30, 3)], num_pages=None))
    assert metrics.kv_occupancy_mean is metrics.kv_occupancy_max is None


def test_steps_that_a_bad_policy_left_to_the_fallback_are_counted() -> None:
    class Raises(SchedulingPolicy):
        def admit(self, request: RequestView, view: SchedulerView) -> Verdict:
            raise KeyError("planted")

    metrics = metrics_of(run([asking(n, 100.0 * n, 4, 1) for n in range(40)], Raises()))
    assert metrics.finished == metrics.policy_faults == 40


def test_a_request_that_was_refused_has_waited_until_then() -> None:
    class Late(SchedulingPolicy):
        def admit(self, request: RequestView, view: SchedulerView) -> Verdict:
            if request.request_id == "0":
                return Verdict.NOW
            return Verdict.NEVER if view.processed_tokens > 20 else Verdict.LATER

    trace = [asking(0, 0.0, 8, 30), asking(1, 0.0, 8, 30)]
    refused = run(trace, Late()).requests[1]
    assert refused.ending is Ending.REFUSED
    assert refused.wait_tokens is not None
    assert 20 < refused.wait_tokens < 30


def test_progress_counts_up_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    run([asking(n, n, 5, 2) for n in range(3)], on_progress=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1] == (3, 3)


def test_an_empty_trace_has_nothing_to_measure() -> None:
    metrics = metrics_of(run([]))
    assert metrics.requests == metrics.steps == 0
    assert metrics.ttft_seconds is None
    assert metrics.block_hit_share is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_pages", 0),
        ("page_size", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 0),
        ("output_reserve_tokens", -1),
        ("max_tokens", 0),
        ("eviction", "random"),
    ],
)
def test_options_that_make_no_sense_are_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{option} must .*{value}"):
        run([asking(0, 0.0, 4, 1)], None, **{option: value})


def test_a_step_that_takes_no_time_is_refused() -> None:
    class Free:
        def step_seconds(self, plan: StepPlan) -> float:
            return 0.0

    with pytest.raises(ConfigError, match="more than 0 seconds, got 0"):
        run([asking(0, 0.0, 4, 1)], cost=Free())


def test_pages_are_swapped_to_the_host_where_it_has_some() -> None:
    trace = [asking(n, 0.0, 30, 60) for n in range(4)]
    options = {"num_pages": 40, "prefix_caching": False, "output_reserve_tokens": 0}
    recomputed = run(trace, **options)
    assert recomputed.preemptions > 0
    assert recomputed.pages_swapped_out is recomputed.pages_swapped_in is None
    swapped = run(trace, num_host_pages=100, preemption="swap", **options)
    assert swapped.pages_swapped_out == swapped.pages_swapped_in
    assert swapped.pages_swapped_out
    assert swapped.tokens_prefilled < recomputed.tokens_prefilled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preemption": "drop"}, "preemption must be one of auto, recompute, swap, got 'drop'"),
        ({"preemption": "swap"}, "preemption='swap' needs num_host_pages of at least 1, got 0"),
        (
            {"num_host_pages": 9, "num_pages": None},
            "num_host_pages=9 has no effect without a limit",
        ),
        (
            {"num_host_pages": 9, "prefix_caching": False, "preemption": "recompute"},
            "num_host_pages=9 has no effect with prefix_caching=False and preemption='recompute'",
        ),
        ({"num_host_pages": -1}, "num_host_pages must be at least 0, got -1"),
        ({"closed_loop": 1}, "closed_loop must be a bool, got 1"),
    ],
)
def test_host_pages_that_nothing_is_copied_to_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run([asking(0, 0.0, 4, 1)], **options)
