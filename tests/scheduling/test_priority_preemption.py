"""Preemption by precedence: the promises of the mechanism for any answers of a policy."""

from __future__ import annotations

import random
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.priority_preemption import who_gives_way
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.view import SchedulerView
from aioserve.steps.plan import StepPlan
from tests.scheduling.bench import Bench, work
from tests.tiers import examples

VIEW = SchedulerView(0, 0.0, *[0] * 11, _source=cast(Any, None))


class ByPriority(SchedulingPolicy):
    """The least that makes priorities preemptive."""

    def order(self, waiting, view):
        return sorted(waiting, key=lambda request: -request.priority)

    def precedence(self, request):
        return request.priority


class Noting(ByPriority):
    """Notes who was asked to give way to whom, and names all, in the order given."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    def displaces(self, request, running, view):
        self.asked.append((request.arrival_index, [r.arrival_index for r in running]))
        return running


def serve(bench: Bench, most_steps: int = 500) -> list[StepPlan]:
    plans = []
    while bench.sequences:
        plans.append(bench.plan())
        bench.commit(plans[-1])
        assert len(plans) < most_steps, "no end in sight"
    return plans


def test_a_policy_that_gives_no_precedence_displaces_nobody():
    class Default(ByPriority):
        precedence = SchedulingPolicy.precedence

        def displaces(self, request, running, view):
            raise AssertionError("asked in vain")

    bench = Bench(policy=Default(), max_num_seqs=1)
    bench.submit(4, 20, priority=0)
    bench.step()
    bench.submit(4, 4, priority=9)
    serve(bench)
    assert bench.scheduler.counters.preemptions == bench.scheduler.policy_calls.faults_total == 0


def test_the_seat_is_free_in_the_step_after_and_whoever_gave_way_comes_back_first():
    bench = Bench(policy=ByPriority(), max_num_seqs=2)
    a, b = bench.submit(4, 20), bench.submit(4, 20)
    bench.step()
    urgent = bench.submit(4, 2, priority=1)
    later = bench.submit(4, 2)
    bench.step()
    plan = bench.plan()
    assert plan.preempted == (b,)
    assert {s for s, *_ in work(plan)} == {a, urgent}
    bench.commit(plan)
    plans = serve(bench)
    assert [plan.preempted for plan in plans] == [()] * len(plans)
    first = [
        next(n for n, p in enumerate(plans) if s in {i[0] for i in work(p)}) for s in (b, later)
    ]
    assert first[0] < first[1]


def test_only_those_of_lower_precedence_are_asked_to_give_way():
    policy = Noting()
    bench = Bench(policy=policy, max_num_seqs=3)
    low, equal, high = (bench.submit(4, 20, priority=p) for p in (0, 1, 2))
    bench.step()
    urgent = bench.submit(4, 2, priority=1)
    serve(bench)
    assert policy.asked == [(urgent, [low])]
    assert {equal, high}.isdisjoint(policy.asked[0][1])


def test_those_of_equal_precedence_never_take_turns():
    bench = Bench(policy=ByPriority(), max_num_seqs=1)
    for _ in range(4):
        bench.submit(4, 10, priority=7)
    serve(bench)
    assert bench.scheduler.counters.preemptions == 0


def test_nobody_gives_way_if_that_is_not_enough():
    bench = Bench(policy=ByPriority(), num_pages=8, max_num_batched_tokens=64)
    bench.submit([1] * 14, 6, priority=2)
    bench.submit([2] * 6, 6, priority=0)
    bench.step()
    bench.submit([3] * 20, 4, priority=1)  # five pages: four are another's that is above it
    bench.step()
    plan = bench.plan()
    assert plan.preempted == ()
    bench.commit(plan)
    serve(bench)


def test_whoever_is_not_needed_is_spared():
    """The first one named has a page that doesn't help, and the next one has pages that do."""

    class SmallestFirst(ByPriority):
        def displaces(self, request, running, view):
            return sorted(running, key=lambda r: r.pages)

    bench = Bench(policy=SmallestFirst(), num_pages=9, max_num_batched_tokens=64)
    bench.submit([1] * 2, 12)
    large = bench.submit([2] * 26, 6)
    bench.step()
    bench.submit([3] * 18, 4, priority=1)
    bench.step()
    plan = bench.plan()
    assert plan.preempted == (large,)
    bench.commit(plan)
    serve(bench)


def test_pages_that_two_share_come_back_when_both_give_way():
    bench = Bench(policy=ByPriority(), num_pages=10, prefix_caching=True, max_num_batched_tokens=64)
    pair = bench.submit_all([1] * 21, 10, n=2)
    bench.step()
    bench.step()
    bench.submit([3] * 26, 4, priority=1)
    bench.step()
    plan = bench.plan()
    assert set(plan.preempted) == set(pair)
    bench.commit(plan)
    serve(bench)


def test_pages_that_come_back_anyway_make_nobody_give_way():
    """Fenced pages of one that was cancelled, and of one that has sampled its last token."""
    bench = Bench(policy=ByPriority(), num_pages=9, max_num_batched_tokens=64)
    ending, left, low = (bench.submit([i] * 10, n) for i, n in enumerate((2, 9, 9)))
    bench.step()
    plan = bench.plan()
    bench.scheduler.finish(left)
    urgent = bench.submit([7] * 18, 2, priority=1)
    second = bench.plan()
    bench.commit(plan)
    third = bench.plan()
    assert second.preempted == third.preempted == ()
    bench.commit(second)
    bench.commit(third)
    plans = serve(bench)
    assert all(not p.preempted for p in plans)
    assert {ending, low, urgent}


def test_one_that_never_starts_displaces_no_more_than_can_run_at_once():
    """Others take each slot that is made for it."""

    class Teasing(ByPriority):
        def __init__(self) -> None:
            self.shown = True

        def order(self, waiting, view):
            self.shown = not self.shown
            low = [request for request in waiting if not request.priority]
            high = [request for request in waiting if request.priority]
            return [*high, *low] if self.shown or not low else low

    bench = Bench(policy=Teasing(), max_num_seqs=2)
    for _ in range(4):
        bench.submit(4, 12)
    bench.step()
    bench.submit_all(4, 2, n=2, priority=1)
    serve(bench)
    assert bench.scheduler.counters.preemptions <= 2


def test_one_of_higher_precedence_gets_its_turn_before_older_ones_that_have_no_room():
    """There is one token a step. The older one, which may take no one's page, would get each of
    them."""
    bench = Bench(policy=ByPriority(), num_pages=4, max_num_batched_tokens=1, max_num_seqs=2)
    old = bench.submit([1], 14)
    bench.step()
    bench.scheduler.pause(old)
    bench.submit([2] * 8, 4, priority=1)
    for _ in range(8):
        bench.step()
    bench.scheduler.resume(old)
    serve(bench)


def test_the_pages_of_an_older_one_go_to_one_of_higher_precedence_that_grows():
    bench = Bench(policy=ByPriority(), num_pages=6)
    old, urgent = bench.submit([1] * 8, 12), bench.submit([2] * 8, 12, priority=1)
    preempted = [s for plan in serve(bench) for s in plan.preempted]
    assert preempted == [old]
    assert urgent > old


class Drawn(ByPriority):
    """Names `count` of the requests, in a random order that stays."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self.named: list[int] = []

    def displaces(self, request, running, view):
        named = random.Random(self.seed).sample(running, len(running))[: self.count]
        self.named = [r.arrival_index for r in named]
        return named


def has_room(bench: Bench, sequence: SequenceState, leaving: set[int]) -> bool:
    """True if a waiting sequence has slots and pages once `leaving` are gone. Compares sets of
    pages: those of the others, and those that it finds."""
    state, memory, reserve = bench.scheduler.state, bench.memory, bench.scheduler.state.reserve
    others = [s for s in state.running if s.sequence_id not in leaving and not s.exhausted]
    claim = memory.claims.claim(sequence.lease, sequence.known_ids)
    memory.claims.drop(claim)
    taken = set(claim.match.page_ids.tolist()).union(*(s.lease.page_ids.tolist() for s in others))
    free = memory.pool.num_pages - len(taken) - claim.num_new_pages
    running = [sequence, *(s for s in others if not s.paused)]
    ahead = sum(map(reserve.pages_ahead, running)) if others else 0
    seats = sum(1 + len(s.pending_samples) for s in [sequence, *others])
    return free >= ahead and seats <= state.max_num_seqs


@settings(max_examples=examples(150), deadline=None)
@given(
    lows=st.lists(
        st.tuples(st.integers(1, 24), st.integers(0, 2), st.sampled_from([1, 1, 2])),
        min_size=1,
        max_size=6,
    ),
    urgent=st.tuples(st.integers(1, 30), st.integers(0, 3), st.sampled_from([1, 1, 2])),
    page_size=st.sampled_from([1, 4, 16]),
    spare_pages=st.integers(0, 12),
    seats=st.sampled_from([2, 4, 8, 8]),
    reserve=st.sampled_from([0, 8]),
    prefix_caching=st.booleans(),
    steps=st.integers(1, 4),
    policy=st.builds(Drawn, st.integers(0, 99), st.integers(0, 6)),
)
def test_those_who_give_way_are_enough_and_none_of_them_was_spare(
    lows, urgent, page_size, spare_pages, seats, reserve, prefix_caching, steps, policy
):
    bench = Bench(
        policy=policy,
        page_size=page_size,
        num_pages=-(-48 // page_size) + spare_pages,
        max_num_seqs=seats,
        max_num_batched_tokens=512,
        output_reserve_tokens=reserve,
        prefix_caching=prefix_caching,
    )
    for tokens, priority, n in lows:
        bench.submit_all([tokens % 3] * tokens, 12, n=n, priority=priority)
    for _ in range(steps):
        bench.step()
    tokens, priority, n = urgent
    bench.submit_all([tokens % 3] * tokens, 12, n=n, priority=priority)
    bench.step()
    scheduler = bench.scheduler
    stopped_at = scheduler.state.stopped_at
    if stopped_at is not None and stopped_at.phase is Phase.WAITING:
        policy.named = []  # it may have been asked for another, and not be asked for this one
        leaving = who_gives_way(scheduler.state, stopped_at, VIEW)
        ids, named = {s.sequence_id for s in leaving}, set(policy.named)
        assert all(s.precedence < stopped_at.precedence for s in leaving)
        if ids:
            assert ids <= named
            assert has_room(bench, stopped_at, ids)
            assert not any(has_room(bench, stopped_at, ids - {one}) for one in ids)
        else:
            assert has_room(bench, stopped_at, set()) or not has_room(bench, stopped_at, named)
        plan = bench.plan()
        assert ids <= set(plan.preempted)
        bench.commit(plan)
    serve(bench)
    assert scheduler.policy_calls.faults_total == 0


def test_one_that_is_preempted_counts_among_those_that_wait_above_others():
    bench = Bench(policy=ByPriority(), max_num_seqs=1)
    urgent = bench.submit(4, 20, priority=2)
    bench.step()
    bench.submit(4, 20, priority=0)
    bench.step()
    state = bench.scheduler.state
    assert not state.waits_above(0)
    state.preempt(state.sequences[urgent], state.launched + 1)
    assert state.waits_above(0)
    assert not state.waits_above(2)
