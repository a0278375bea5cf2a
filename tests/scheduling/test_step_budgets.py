"""Shares of a step that a policy keeps for some requests: no other request gets them, for decodes
or prompts."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import SchedulingPolicy, StepBudget, TokenShare
from aioserve.scheduling.view import RequestView, SchedulerView
from aioserve.simulation.simulator import simulate
from aioserve.steps.plan import StepPlan
from aioserve.testing.fake_device import expected_tokens
from aioserve.traces.synthetic import synthetic_trace
from tests.scheduling.bench import Bench

BUDGET = 16


class Recording(SchedulingPolicy):
    """Keeps its answers by step. Subclasses decide about the shares."""

    def __init__(self) -> None:
        self.answers: dict[int, tuple[list[tuple[set[int], int]], int]] = {}
        """Answers by step: the requests and tokens of each share, and the tokens of the step."""
        self.asked: list[int] = []

    def shares(self, view: SchedulerView) -> StepBudget | None:
        return None

    def begin_step(self, view: SchedulerView) -> StepBudget | None:
        self.asked.append(view.step)
        self.answers.pop(view.step, None)  # of a plan that came to nothing
        budget = self.shares(view)
        if budget is not None:
            shares = [({r.arrival_index for r in s.requests}, s.tokens) for s in budget.shares]
            self.answers[view.step] = (shares, budget.tokens or view.max_num_batched_tokens)
        return budget


class AtRandom(Recording):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def shares(self, view: SchedulerView) -> StepBudget | None:
        draw = self.random
        if draw.random() < 0.2:
            return None
        most = draw.randint(1, view.max_num_batched_tokens)
        left, shares = most, list[TokenShare]()
        requests: list[RequestView] = [*view.running, *view.waiting]
        draw.shuffle(requests)
        for _ in range(draw.randint(0, 3)):
            tokens = draw.randint(0, left)
            left -= tokens
            place = draw.randint(0, len(requests))
            shares.append(TokenShare(requests[:place], tokens))
            requests = requests[place:]
        return StepBudget(shares, most)


def over_shares(plan: StepPlan, shares: Sequence[tuple[set[int], int]]) -> int:
    """Tokens of a plan outside of any share."""
    used = Counter[int]()
    for item in plan.items:
        used[item.sequence_id] += item.count
    within = [min(tokens, sum(used[one] for one in requests)) for requests, tokens in shares]
    return plan.num_tokens - sum(within)


def run(bench: Bench, policy: Recording, *, depth: int) -> int:
    """Serve all, and check each plan. Return the number of plans with shares and more than one
    item."""
    pipeline = StepPipeline(bench.scheduler, lambda plan: plan, depth=depth)
    checked = 0
    received: dict[int, list[int]] = {one: [] for one in bench.sequences}
    expected = {
        one: expected_tokens(list(s.request.prompt_ids), s.max_length - s.prompt_tokens, 0)
        for one, s in bench.sequences.items()
    }
    for _ in range(5000):
        if not bench.sequences and not pipeline.num_in_flight:
            break
        alone = not pipeline.num_in_flight
        plan = pipeline.advance(0.0)
        bench.scheduler.sanity_check()
        if plan is not None and plan.step in policy.answers:
            shares, most = policy.answers[plan.step]
            owed = len(bench.scheduler.state.reserved_next_page)
            kept = over_shares(plan, shares) <= most - sum(n for _, n in shares) + owed
            is_forced = alone and len(plan.items) == 1
            assert is_forced or (plan.num_tokens <= most and kept)
            checked += bool(shares) and not is_forced
        if (due := pipeline.due) is not None:
            for update in pipeline.finish(bench.device.execute(due), 0.0):
                assert update.token_id is not None
                received[update.sequence_id].append(update.token_id)
    assert received == expected
    assert bench.scheduler.policy_calls.faults_total == 0
    return checked


@settings(deadline=None)
@given(
    st.integers(0, 2**20),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=8),
    st.sampled_from([14, 20, 200]),
    st.integers(1, 2),
    st.booleans(),
)
def test_no_request_gets_what_is_kept_for_others_and_all_get_their_tokens(
    seed: int,
    lengths: list[tuple[int, int]],
    num_pages: int,
    depth: int,
    prefix_caching: bool,
) -> None:
    policy = AtRandom(seed)
    options: dict[str, Any] = {"num_pages": num_pages, "prefix_caching": prefix_caching}
    bench = Bench(policy=policy, max_num_batched_tokens=BUDGET, **options)
    for number, (prompt, tokens) in enumerate(lengths):
        bench.submit([number % 3] * prompt, tokens)
    run(bench, policy, depth=depth)
    steps = bench.scheduler.counters.steps
    assert set(range(steps)) <= set(policy.asked)


class Gold(Recording):
    """Keeps six tokens of each step for one tenant."""

    kept = 6

    def shares(self, view: SchedulerView) -> StepBudget | None:
        mine = [r for r in (*view.running, *view.waiting) if r.tenant == "gold"]
        return StepBudget([TokenShare(mine, self.kept)])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tenant_has_its_share_of_each_step_in_decodes_and_in_prompts(depth: int) -> None:
    """Twelve decodes of others, and their prompts, want all sixteen tokens of each step."""

    def least_share(policy: SchedulingPolicy) -> tuple[int, set[str]]:
        """Least number of tokens that the tenant got when it could use more, and the kinds of work
        that it had."""
        bench = Bench(policy=policy, num_pages=4000, max_num_batched_tokens=BUDGET, max_num_seqs=64)
        for number in range(14):
            bench.submit([number], 200)
        for number in range(4):
            bench.submit([100 + number] * 600, 1)
        pipeline = StepPipeline(bench.scheduler, lambda plan: plan, depth=depth)
        gold: set[int] = set()
        least, kinds = BUDGET, set[str]()
        for step in range(120):
            if step in (20, 22, 50, 80):
                prompt = [200 + step] * (3 if step == 22 else 25)
                gold.add(bench.submit(prompt, 30, tenant="gold"))
            wanted = 0
            for one in gold & bench.sequences.keys():
                sequence = bench.sequences[one]
                wanted += 0 if sequence.exhausted else sequence.remaining
            plan = pipeline.advance(0.0)
            if plan is not None:
                mine = [item for item in plan.items if item.sequence_id in gold]
                got = sum(item.count for item in mine)
                kinds |= {item.kind.name for item in mine}
                if wanted > got:
                    least = min(least, got)
            if (due := pipeline.due) is not None:
                pipeline.finish(bench.device.execute(due), 0.0)
        return least, kinds

    least, kinds = least_share(Gold())
    assert least >= Gold.kept
    assert kinds == {"PREFILL", "DECODE"}
    assert least_share(SchedulingPolicy())[0] < Gold.kept


def test_a_request_goes_beyond_its_share_where_others_leave_tokens() -> None:
    policy = Gold()
    bench = Bench(policy=policy, max_num_batched_tokens=BUDGET)
    other = bench.submit(30, 4)
    gold = bench.submit([7] * 30, 4, tenant="gold")
    plan = bench.plan()
    assert {item.sequence_id: item.count for item in plan.items} == {other: 10, gold: 6}
    assert policy.asked == [plan.step]
    bench.commit(plan)
    bench.scheduler.finish(other)
    assert [item.count for item in bench.plan().items] == [BUDGET]


def test_a_whole_step_may_be_made_smaller() -> None:
    class Small(Recording):
        def shares(self, view: SchedulerView) -> StepBudget | None:
            return StepBudget(tokens=5)

    bench = Bench(policy=Small(), max_num_batched_tokens=BUDGET)
    bench.submit(30, 4)
    assert [item.count for item in bench.plan().items] == [5]


def test_chunk_is_told_what_the_budget_leaves() -> None:
    told: list[tuple[str | None, int]] = []

    class Told(Gold):
        def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
            told.append((request.tenant, budget_tokens))
            return budget_tokens

    bench = Bench(policy=Told(), max_num_batched_tokens=BUDGET)
    bench.submit(30, 4)
    bench.submit([7] * 30, 4, tenant="gold")
    bench.plan()
    assert told == [(None, 10), ("gold", 6)]


def test_where_a_share_leaves_nothing_to_anyone_one_request_goes_on_unasked() -> None:
    class Nobody(Recording):
        def shares(self, view: SchedulerView) -> StepBudget | None:
            return StepBudget([TokenShare((), view.max_num_batched_tokens)])

    bench = Bench(policy=Nobody(), max_num_batched_tokens=BUDGET)
    ids = [bench.submit([i] * 20, 5) for i in range(3)]
    assert {i: len(tokens) for i, tokens in bench.run().items()} == dict.fromkeys(ids, 5)


def test_a_bad_budget_names_the_policy_and_leaves_the_step_as_it_would_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Greedy(SchedulingPolicy):
        def begin_step(self, view: SchedulerView) -> StepBudget | None:
            return StepBudget([TokenShare((), 17)])

    bench = Bench(policy=Greedy(), max_num_batched_tokens=BUDGET)
    bench.submit(30, 4)
    with caplog.at_level(logging.ERROR):
        assert [item.count for item in bench.plan().items] == [BUDGET]
    assert "scheduling policy Greedy: begin_step answered 17, not an int in [0, 16]" in caplog.text


class TenthOfASecond:
    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def step_seconds(self, plan: StepPlan) -> float:
        self.plans.append(plan)
        return 0.01 + plan.num_tokens / 20_000


@pytest.mark.parametrize("overlap", [False, True])
def test_the_simulator_keeps_shares_too(overlap: bool) -> None:
    """Eight tenants of a made-up workload. The fourth has a sixteenth of the requests."""
    trace = synthetic_trace("tenants", 120, rate=40.0)

    class Fourth(Recording):
        def shares(self, view: SchedulerView) -> StepBudget | None:
            mine = [r for r in (*view.running, *view.waiting) if r.tenant == "tenant-3"]
            return StepBudget([TokenShare(mine, 100)]) if mine else None

    policy, cost = Fourth(), TenthOfASecond()
    result = simulate(
        trace, policy, cost=cost, num_pages=None, max_num_batched_tokens=256, overlap=overlap
    )
    assert result.policy_faults == 0
    assert len(cost.plans) == result.steps > len(policy.answers) > 50
    for plan in cost.plans:
        if plan.step in policy.answers:
            shares, most = policy.answers[plan.step]
            assert over_shares(plan, shares) <= most - 100
