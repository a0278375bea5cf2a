"""Steps that verify draft tokens: with any drafter, the tokens are those without one."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.drafting.drafter import DraftedSequence
from aioserve.errors import InvariantError
from aioserve.request import FinishReason
from aioserve.scheduling.policy import SchedulingPolicy, StepBudget, TokenShare
from aioserve.scheduling.speculation.draft_lengths import FIRST_STEPS
from aioserve.scheduling.view import RequestView, SchedulerView
from aioserve.steps.plan import ItemKind, StepPlan
from aioserve.testing import expected_tokens
from tests.doubles.drafters import DraftRule, ScriptedDrafter, anything, nothing_right, right_up_to
from tests.scheduling.bench import Bench

PROMPT = [7, 1, 8, 2, 8, 1]
TOKENS = expected_tokens(PROMPT, 40)


def answer(sequence: DraftedSequence, count: int) -> list[int]:
    return expected_tokens(sequence.known_ids[: sequence.prompt_tokens].tolist(), count)


def drafter(rule: DraftRule) -> ScriptedDrafter:
    return ScriptedDrafter(answer, rule)


def bench_of(rule: DraftRule, **options) -> Bench:
    return Bench(drafter=drafter(rule), **options)


def run(bench: Bench, depth: int, step_seconds: float = 1.0) -> dict[int, list[int]]:
    """Keep `depth` steps in flight until nothing is left; return the tokens of every sequence."""
    flying: deque[StepPlan] = deque()
    tokens: dict[int, list[int]] = {}
    while flying or bench.sequences:
        plan = bench.scheduler.plan(0.0) if len(flying) < depth else None
        bench.scheduler.sanity_check()
        if plan is not None:
            bench.page_tables.take(plan)
            flying.append(plan)
            continue
        plan = flying.popleft()
        bench.scheduler.charge(plan, step_seconds)
        for update in bench.commit(plan):
            assert update.token_id is not None
            tokens.setdefault(update.sequence_id, []).append(update.token_id)
    return tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_right", [0, 1, 3, 4])
def test_drafts_are_kept_up_to_the_first_that_is_wrong(num_right: int, depth: int) -> None:
    bench = bench_of(right_up_to(num_right), page_size=2, prefix_caching=True)
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [TOKENS]
    assert bench.scheduler.counters.tokens_generated == 40
    if num_right == 4:  # five tokens a step, once the first is there and five without were tried
        assert bench.scheduler.counters.steps <= 1 + 8 + 5
    # A wrong draft token leaves nothing in the prefix tree.
    bench.submit([*PROMPT, *TOKENS], max_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens([*PROMPT, *TOKENS], 4)]


def test_the_first_steps_of_each_answer_tell_what_to_expect_of_others() -> None:
    """Completions with right draft tokens have more of them verified, and would count for more."""
    bench = bench_of(right_up_to(4), page_size=2)
    for answers in (1, 2):
        bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
        run(bench, 1)
        assert bench.scheduler.state.speculation.lengths.usual.steps == answers * FIRST_STEPS


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_the_earliest_end_wins_and_what_is_behind_it_is_nothing(page_size: int, depth: int) -> None:
    bench = bench_of(right_up_to(6), page_size=page_size, prefix_caching=True)
    end = TOKENS[4]
    bench.submit(PROMPT, max_tokens=12, max_draft_tokens=6, end_ids=frozenset([end]))
    assert [*run(bench, depth).values()] == [TOKENS[:5]]
    assert bench.scheduler.counters.tokens_generated == 5
    bench.submit([*PROMPT, *TOKENS[:6]], max_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens([*PROMPT, *TOKENS[:6]], 4)]


def test_no_more_tokens_are_taken_than_an_answer_may_have() -> None:
    bench = bench_of(right_up_to(8))
    bench.submit(PROMPT, max_tokens=4, max_draft_tokens=8)
    bench.step()
    plan = bench.plan()
    assert [(item.kind, item.count) for item in plan.items] == [(ItemKind.VERIFY, 3)]
    updates = bench.commit(plan)
    assert [update.token_id for update in updates] == TOKENS[1:4]
    assert updates[-1].finish_reason is FinishReason.LENGTH
    assert not bench.sequences


def test_an_item_behind_drafts_that_are_in_flight_begins_where_the_runner_knows() -> None:
    bench = bench_of(right_up_to(1))
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=3)
    bench.step()
    flying = [bench.plan(), bench.plan()]
    starts = [(item.start, item.count) for plan in flying for item in plan.items]
    assert starts == [(6, 4), (10, 4)]
    assert [u.token_id for u in bench.commit(flying[0])] == TOKENS[1:3]
    assert [u.token_id for u in bench.commit(flying[1])] == TOKENS[3:5]
    assert [item.start for item in bench.plan().items] == [len(PROMPT) + 4]


def test_tokens_of_one_that_has_left_are_dropped() -> None:
    bench = bench_of(right_up_to(3))
    first = bench.submit(PROMPT, max_tokens=12, max_draft_tokens=3)
    bench.step()
    flying = bench.plan()
    bench.scheduler.finish(first)
    assert bench.commit(flying) == []
    assert bench.scheduler.counters.tokens_generated == 1


def test_an_outcome_with_more_tokens_than_were_asked_for_is_refused() -> None:
    bench = bench_of(right_up_to(3))
    bench.submit(PROMPT, max_tokens=12, max_draft_tokens=2)
    bench.step()
    plan = bench.plan()
    outcome = bench.device.execute(plan)
    several = msgspec.structs.replace(outcome, token_ids=(1, 2, 3, 4), token_counts={0: 4})
    with pytest.raises(InvariantError, match=r"1 rows, its outcome 4 tokens, of rows \{0: 4\}"):
        bench.scheduler.commit(plan, several, 0.0)
    several = msgspec.structs.replace(outcome, drafted={0: 3})
    with pytest.raises(InvariantError, match="1 rows, its outcome 3 tokens"):
        bench.scheduler.commit(plan, several, 0.0)


class Shares(SchedulingPolicy):
    """Keeps 14 tokens of each step for one tenant."""

    def begin_step(self, view: SchedulerView) -> StepBudget:
        own = [r for r in (*view.running, *view.waiting) if r.tenant == b"vip"]
        return StepBudget(shares=[TokenShare(own, 14)])


def test_drafts_take_no_token_that_a_policy_keeps_for_others() -> None:
    bench = bench_of(right_up_to(16), policy=Shares(), max_num_batched_tokens=16)
    bench.submit(PROMPT, max_tokens=60, max_draft_tokens=12)
    for _ in range(6):
        bench.step()
    bench.submit([*range(100)], max_tokens=4, tenant=b"vip")
    counts = {item.sequence_id: item.count for item in bench.plan().items}
    assert counts == {1: 2, 2: 14}


@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_go_on_where_the_prefix_cache_has_all_pages(page_size: int) -> None:
    bench = bench_of(
        right_up_to(8), num_pages=128 // page_size, page_size=page_size, prefix_caching=True
    )
    for request in range(6):
        bench.submit([request, 1, 2, 3], max_tokens=60, max_draft_tokens=8)
        before = bench.scheduler.counters.steps
        run(bench, 1)
        steps = bench.scheduler.counters.steps - before
    assert bench.pool.num_free < 40 // page_size
    assert steps <= 12


class Few(SchedulingPolicy):
    """Allows the numbers of draft tokens in `answers`, one after the other, and then none."""

    def __init__(self, *answers: object) -> None:
        self.answers = [*answers]
        self.limits: list[int] = []

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        self.limits.append(limit)
        return self.answers.pop(0) if self.answers else 0  # pyright: ignore[reportReturnType]


def test_a_policy_says_how_many_and_none_is_a_plain_decode() -> None:
    policy = Few(2, 4)
    bench = bench_of(right_up_to(9), policy=policy)
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    bench.step()
    items: list[tuple[ItemKind, int]] = []
    for _ in range(4):
        plan = bench.plan()
        items += [(item.kind, item.count) for item in plan.items]
        bench.commit(plan)
    decode = (ItemKind.DECODE, 1)
    assert items == [(ItemKind.VERIFY, 3), (ItemKind.VERIFY, 5), decode, decode]
    assert policy.limits == [4] * 4


@pytest.mark.parametrize("wrong", [-1, 5, "2", None, 2.0])
def test_a_policy_that_says_what_is_no_number_of_drafts_is_not_heard(
    wrong: object, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of(right_up_to(9), policy=Few(wrong))
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    bench.step()
    assert [item.count for item in bench.plan().items] == [5]
    assert "not an int in [0, 4]" in caplog.text


def test_a_failed_step_takes_back_what_it_wrote_before_the_place_in_its_plan() -> None:
    """The plan's place is the last possible one. If draft tokens were wrong, pages before it are
    written, too."""
    bench = bench_of(nothing_right, page_size=1, prefix_caching=True)
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    bench.step()
    first, second = bench.plan(), bench.plan()
    bench.commit(first)
    third = bench.plan()
    assert bench.fail(second)
    bench.commit(third)
    bench.submit([*PROMPT, *TOKENS[:20]], max_tokens=4)
    assert [*run(bench, 2).values()] == [expected_tokens([*PROMPT, *TOKENS[:20]], 4)]


def test_drafts_for_samples_of_a_prompt_whose_step_failed_write_to_no_page_of_both() -> None:
    bench = bench_of(right_up_to(9), page_size=1, prefix_caching=False)
    bench.submit_all(PROMPT, max_tokens=20, n=2, max_draft_tokens=3)
    first, second = bench.plan(), bench.plan()
    assert [(item.start, item.least_start) for item in second.items] == [(6, 6)] * 2
    assert bench.fail(first)
    assert bench.commit(second) == []


RULES = [right_up_to(99), right_up_to(2), nothing_right]


@given(
    source=st.randoms(use_true_random=False),
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 6), st.integers(1, 2))),
    num_pages=st.integers(18, 64),
    page_size=st.sampled_from([1, 2, 4]),
    windows=st.booleans(),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
    depth=st.integers(1, 2),
)
def test_no_draft_changes_a_token(
    source: random.Random,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[tuple[int, int, int]],
    num_pages: int,
    page_size: int,
    windows: bool,
    prefix_caching: bool,
    preemption: str,
    depth: int,
) -> None:
    groups = {"num_window_groups": 1, "window": 5} if windows else {}
    bench = bench_of(
        source.choice([*RULES, anything(source)]),
        num_pages=num_pages * (1 + windows),
        num_host_pages=16 if preemption == "swap" else 0,
        page_size=page_size,
        prefix_caching=prefix_caching,
        preemption=preemption,
        **groups,
    )
    fits = bench.memory.capacity_tokens
    expected: dict[int, list[int]] = {}
    for prompt, (max_tokens, limit, n) in zip(prompts, lengths, strict=False):
        count = min(max_tokens, fits - len(prompt))
        if count < 1:
            continue
        ids = bench.submit_all(prompt, count, n=n, max_draft_tokens=limit)
        expected |= {i: expected_tokens(prompt, count, seed) for seed, i in enumerate(ids)}
    tokens = run(bench, depth, step_seconds=source.choice([1.0, 0.0]))
    assert tokens == expected
    counters = bench.scheduler.counters
    assert counters.tokens_generated == sum(map(len, expected.values()))


class Keeping(SchedulingPolicy):
    """Pins all computed tokens of a request."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def pin(self, request: RequestView) -> int:
        self.told.append(request.computed_tokens)
        return request.computed_tokens


@pytest.mark.parametrize("limit", [0, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_is_told_to_be_computed_has_no_token_that_nobody_knows(limit: int, depth: int) -> None:
    """All of it may be pinned while steps in flight compute more."""
    policy = Keeping()
    bench = bench_of(right_up_to(9), policy=policy, prefix_caching=True, page_size=2)
    sequence_id = bench.submit(PROMPT, 30, max_draft_tokens=limit)
    bench.step()
    flying = [bench.plan() for _ in range(depth)]
    sequence = bench.sequences[sequence_id]
    assert sequence.lease.computed >= len(PROMPT) + depth * (1 + limit)
    assert bench.view(sequence_id).computed_tokens <= len(PROMPT) + 1
    bench.scheduler.finish(sequence_id)
    assert policy.told == [len(PROMPT) + 1]
    assert bench.scheduler.policy_calls.faults_total == 0
    assert bench.scheduler.state.pins.num_pages == len(PROMPT) // 2
    for plan in flying:
        bench.commit(plan)
