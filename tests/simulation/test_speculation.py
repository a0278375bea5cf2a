"""Speculation in simulated runs: draws say which draft tokens are right, and the scheduler does the
rest."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import RequestView, SamplingParams, SchedulerView, SchedulingPolicy
from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import AioserveError, ConfigError, TraceError
from aioserve.simulation.expected_tokens import counted_tokens, expected_tokens
from aioserve.simulation.metrics import metrics_of
from aioserve.simulation.records import SimulationResult, SpeculationMetrics
from aioserve.simulation.simulator import simulate
from aioserve.simulation.speculation import SimulatedDrafts, acceptance_by_place
from aioserve.simulation.timeline import Timeline
from aioserve.steps.plan import (
    DRAFT_TOKEN,
    ItemKind,
    SampleRow,
    SlotStart,
    StepPlan,
    WorkItem,
)
from aioserve.testing import replay
from aioserve.traces.formats import read_trace
from aioserve.traces.trace_request import TraceRequest
from tests.simulation.test_fast_forward import ROOFLINE
from tests.simulation.test_simulator import asking, traces
from tests.tiers import examples


class Constant:
    """Every step takes a second, and what it computed is kept."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def step_seconds(self, plan: StepPlan) -> float:
        self.plans.append(plan)
        return 1.0


class ByTokens:
    """A second for each token, and next to nothing for the step."""

    def step_seconds(self, plan: StepPlan) -> float:
        return plan.num_tokens + 0.01


class AtMost(SchedulingPolicy):
    """Policy that allows at most `most` draft tokens."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limits: list[int] = []

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        self.limits.append(limit)
        return min(limit, self.most)


def run(
    trace: list[TraceRequest], policy: SchedulingPolicy | None = None, **options: Any
) -> SimulationResult:
    given: dict[str, Any] = {"cost": Constant(), "num_pages": None, "page_size": 4}
    given |= {"speculation_max_tokens": 4, "acceptance": 0.7}
    return simulate(trace, policy or SchedulingPolicy(), **(given | options))


def speculation(result: SimulationResult) -> SpeculationMetrics:
    assert result.speculation is not None
    return result.speculation


@settings(deadline=None)
@given(
    traces(),
    st.none() | st.integers(5, 20),
    st.sampled_from([1, 3, 4]),
    st.integers(1, 4),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0, "1,0.5,0"]),
)
def test_all_completions_are_as_long_as_without(
    trace: list[TraceRequest],
    num_pages: int | None,
    page_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    prefix_caching: bool,
    overlap: bool,
    max_tokens: int,
    acceptance: float | str,
) -> None:
    trace = [msgspec.structs.replace(one, deadline_seconds=None) for one in trace]
    options = {
        "num_pages": num_pages,
        "page_size": page_size,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "output_reserve_tokens": 2,
        "prefix_caching": prefix_caching,
        "overlap": overlap,
    }
    drafting = run(trace, speculation_max_tokens=max_tokens, acceptance=acceptance, **options)
    without = run(trace, speculation_max_tokens=0, acceptance=None, **options)
    for one, other in zip(drafting.requests, without.requests, strict=True):
        assert (one.request.number, one.ending) == (other.request.number, other.ending)
        assert one.output_tokens == other.output_tokens
    found = speculation(drafting)
    assert 0 <= found.accepted_tokens <= found.drafted_tokens
    assert all(a <= d for a, d in zip(found.accepted, found.drafted, strict=False))
    assert without.speculation is None
    again = run(trace, speculation_max_tokens=max_tokens, acceptance=acceptance, **options)
    assert again == drafting


@settings(deadline=None, max_examples=examples(30))
@given(traces(), st.none() | st.integers(8, 20), st.booleans(), st.integers(0, 5))
def test_steps_are_taken_one_by_one_whether_a_timeline_asks_for_it_or_not(
    trace: list[TraceRequest], num_pages: int | None, overlap: bool, seed: int
) -> None:
    def once(timeline: Timeline | None) -> SimulationResult:
        return run(
            trace,
            cost=ROOFLINE,
            num_pages=num_pages,
            overlap=overlap,
            acceptance_seed=seed,
            timeline=timeline,
        )

    assert once(None) == once(Timeline())


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_drafts_are_right_as_often_as_was_said(acceptance: float) -> None:
    trace = [asking(number, 0.0, 5, 2000) for number in range(3)]
    found = speculation(run(trace, acceptance=acceptance, acceptance_seed=7))
    for place, (drafted, right) in enumerate(zip(found.drafted, found.accepted, strict=False)):
        chance = acceptance ** (place + 1)
        assert right / drafted == pytest.approx(chance, abs=5 * (chance / drafted) ** 0.5)


def test_a_chance_of_one_brings_all_drafts_and_one_of_none_brings_none() -> None:
    trace = [asking(0, 0.0, 5, 101)]
    # A draft token behind the end isn't right.
    always = run(trace, acceptance=1.0)
    assert speculation(always).drafted_tokens - speculation(always).accepted_tokens <= 8
    assert always.steps < 101 / 3
    never = speculation(run(trace, acceptance=0))
    assert never.accepted_tokens == 0
    assert never.tokens_per_step == 1.0
    by_place = speculation(run(trace, acceptance="1,0"))
    assert by_place.drafted[0] - by_place.accepted[0] <= 2
    assert by_place.accepted[1:] == (0,) * (len(by_place.accepted) - 1)


@given(st.integers(0, 50), st.integers(0, 3), st.sampled_from([0.3, 0.9]))
def test_luck_is_that_of_a_request_and_a_place_whatever_step_it_is_in(
    number: int, seed: int, acceptance: float
) -> None:
    request = asking(number, 0.0, 5, 30)
    drafts = SimulatedDrafts(acceptance, seed)
    steps = 0

    def num_right(sequence_id: int, slot: int, position: int, count: int) -> int:
        """Draft tokens that are right, of `count` for the places from `position` on."""
        nonlocal steps
        steps += 1
        drafts.submitted(sequence_id, request)
        drafting = DraftedSequence(known_ids=np.zeros(position, np.int32), prompt_tokens=5)
        start = SlotStart(slot=slot, params=SamplingParams(), seed=0, drafting=drafting)
        ids = np.full(1 + count, DRAFT_TOKEN, np.int32)
        rows = (SampleRow(offset=0, slot=slot),)
        places = slot, position - 1, position - 1, 1 + count
        item = WorkItem(ItemKind.VERIFY, sequence_id, *places, ids, rows)
        plan = StepPlan(step=steps, started_slots=(start,), items=(item,))
        _, outcome = drafts.taken(plan, {sequence_id: 7}, {sequence_id: 34})
        return len(outcome.token_ids) - 1

    right = [num_right(0, 0, position, 1) for position in range(6, 35)]
    for position in range(6, 35):
        run = [*right[position - 6 :], 0].index(0)
        for count in (2, 8):
            assert num_right(3, 2, position, count) == min(count, run)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("acceptance", [0.0, 0.6, 1.0])
def test_a_step_costs_what_begins_behind_the_last_token_that_held(
    overlap: bool, acceptance: float
) -> None:
    cost = Constant()
    run([asking(0, 0.0, 5, 40)], cost=cost, overlap=overlap, acceptance=acceptance)
    first, *others = [item for plan in cost.plans for item in plan.items]
    assert (first.kind, first.start, first.count) == (ItemKind.PREFILL, 0, 5)
    assert others[0].start == first.end
    for item, behind in pairwise(others):
        brought = behind.start - item.start
        assert 1 <= brought <= item.count
        if acceptance == 0.0:
            assert brought == 1
        if acceptance == 1.0 and item.end < 5 + 40:
            assert brought == item.count


def test_drafts_that_cost_as_much_as_they_bring_shrink_to_almost_none() -> None:
    trace = [asking(number, 0.0, 5, 300) for number in range(4)]
    drafting = run(trace, cost=ByTokens(), acceptance=0.5)
    without = run(trace, cost=ByTokens(), acceptance=None, speculation_max_tokens=0)
    assert drafting.seconds <= 1.03 * without.seconds
    free = run(trace, acceptance=0.5)
    assert speculation(free).drafted_tokens > 5 * speculation(drafting).drafted_tokens


def test_a_policy_says_how_many_at_most() -> None:
    trace = [asking(number, 0.0, 5, 50) for number in range(2)]
    none, one = AtMost(0), AtMost(1)
    assert speculation(run(trace, none)).drafted == ()
    assert len(speculation(run(trace, one)).drafted) == 1
    assert {*none.limits, *one.limits} <= set(range(1, 5))


def test_the_head_computes_each_draft() -> None:
    trace = [asking(0, 0.0, 5, 50)]
    cost = Constant()
    run(trace, cost=cost, acceptance=1.0)
    (item,) = next(plan.items for plan in cost.plans if plan.num_verified)
    known = msgspec.structs.replace(item, kind=ItemKind.PREFILL)
    drafted, all_known = (StepPlan(step=1, items=(one,) * 200) for one in (item, known))
    assert ROOFLINE.step_seconds(drafted) > ROOFLINE.step_seconds(all_known)


def test_a_trace_tells_how_often_drafts_were_right(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    header = "arrival_s,context_tokens,generated_tokens,acceptance"
    path.write_text(f"{header}\n0,8,60,1\n0,8,60,0\n")
    trace = read_trace(path)
    assert [request.acceptance for request in trace] == [1, 0]
    both = speculation(run(trace, acceptance=None))
    assert both.accepted_tokens > 0
    assert speculation(run(trace[1:], acceptance=None)).accepted_tokens == 0
    assert speculation(run(trace[1:], acceptance=1.0)).accepted_tokens > 40
    row = {"timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [1]}
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row | {"acceptance": 0.25}))
    assert read_trace(path)[0].acceptance == 0.25
    path.write_text(json.dumps(row | {"acceptance": 1.25}))
    with pytest.raises(TraceError, match=r"acceptance"):
        read_trace(path)
    path = tmp_path / "wrong.csv"
    path.write_text(f"{header}\n0,8,60,nan\n")
    with pytest.raises(TraceError, match=r"acceptance must be in \[0, 1\], got 'nan'"):
        read_trace(path)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"acceptance": None}, TraceError, "request 0 has no acceptance of its own"),
        ({"speculation_max_tokens": 0}, ConfigError, "acceptance=0.7 has no effect"),
        ({"speculation_max_tokens": 65}, ConfigError, "speculation_max_tokens must be at most 64"),
        ({"speculation_max_tokens": -1}, ConfigError, "speculation_max_tokens must be at least 0"),
        ({"acceptance": 1.5}, ConfigError, r"acceptance must be a chance in \[0, 1\]"),
        ({"acceptance": "0.5,x"}, ConfigError, "got '0.5,x'"),
        ({"acceptance": True}, ConfigError, "acceptance must be a chance"),
        ({"acceptance": ",".join("1" * 65)}, ConfigError, "at most 64 chances, got 65"),
        ({"acceptance_seed": -1}, ConfigError, "acceptance_seed must be at least 0"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: dict[str, Any], error: type[AioserveError], text: str
) -> None:
    with pytest.raises(error, match=text):
        run([asking(0, 0.0, 5, 5)], **options)


def test_chances_are_one_for_all_or_one_for_each_place() -> None:
    assert acceptance_by_place(0.5) == (0.5,)
    assert acceptance_by_place(1) == (1.0,)
    assert acceptance_by_place("0.9, 0.5") == (0.9, 0.5)
    assert acceptance_by_place(None) is None


def test_tokens_of_a_step_are_a_geometric_sum_and_what_was_counted_by_place() -> None:
    assert [expected_tokens(0.8, k) for k in (0, 1, 3)] == pytest.approx([1, 1.8, 2.952])
    assert expected_tokens(1.0, 4) == 5
    assert counted_tokens([10, 8, 4], [8, 6, 1]) == pytest.approx([1.8, 2.55, 2.8])
    assert counted_tokens([2, 1, 0], [1]) == [1.5, 1.5]
    assert counted_tokens([], []) == []
    found = speculation(run([asking(0, 0.0, 5, 3000)], acceptance=0.75))
    for k, tokens in enumerate(counted_tokens(found.drafted, found.accepted), 1):
        assert tokens == pytest.approx(expected_tokens(0.75, k), rel=0.1)


def test_a_seed_draws_whose_drafts_are_right_of_a_trace_that_is_recorded() -> None:
    trace = [asking(number, 0.0, 5, 80) for number in range(3)]
    options: dict[str, Any] = {"num_pages": 64, "speculation_max_tokens": 4, "acceptance": 0.5}
    options["cost"] = Constant()
    found = [replay(trace, SchedulingPolicy(), seed=seed, **options) for seed in (None, 0, 1)]
    assert found[0] == found[1] != found[2]


def test_results_without_drafts_say_nothing_of_them() -> None:
    trace = [asking(0, 0.0, 5, 20)]
    plain = metrics_of(run(trace, speculation_max_tokens=0, acceptance=None))
    assert "speculation" not in msgspec.to_builtins(plain)
    drafting = msgspec.to_builtins(metrics_of(run(trace)))
    assert drafting["speculation"]["drafted_tokens"] > 0
    assert list(drafting)[:-1] == list(msgspec.to_builtins(plain))
