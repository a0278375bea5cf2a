"""Rules of the scheduler that a random run rarely shows: who waits, who yields, who is served."""

from __future__ import annotations

import pytest

from aioserve.errors import InvariantError
from aioserve.request import FinishReason
from aioserve.scheduling.policy import Refusal, SchedulingPolicy, Verdict
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import PENDING_TOKEN
from tests.scheduling.bench import Bench, work


def test_a_long_prompt_is_computed_in_chunks_of_the_token_budget():
    bench = Bench()
    a = bench.submit(40)

    assert work(bench.plan()) == [(a, 0, 16)]
    assert work(bench.plan()) == [(a, 16, 16)]
    last = bench.plan()
    assert work(last) == [(a, 32, 8)]
    (row,) = last.items[0].rows
    assert (row.offset, row.slot) == (7, last.items[0].slot)


def test_decodes_come_before_prompts_and_take_their_token_first():
    bench = Bench()
    a = bench.submit(3)
    bench.step()
    b = bench.submit(40)

    assert work(bench.plan()) == [(a, 3, 1), (b, 0, 15)]


def test_a_step_planned_over_one_in_flight_asks_the_device_for_the_pending_token():
    bench = Bench()
    a = bench.submit(3)
    bench.plan()

    second = bench.plan()

    assert work(second) == [(a, 3, 1)]
    assert tuple(second.items[0].token_ids) == (PENDING_TOKEN,)


def test_no_token_beyond_the_last_is_planned_while_the_last_is_in_flight():
    bench = Bench()
    bench.submit(3, max_tokens=1)
    first = bench.plan()

    assert bench.scheduler.plan(0.0) is None
    (end,) = bench.commit(first)
    assert end.finish_reason is FinishReason.LENGTH


def test_a_token_sampled_after_the_end_is_dropped_and_its_pages_wait_for_the_step():
    bench = Bench(num_pages=4)
    a = bench.submit(3, end_ids=frozenset(range(256)))
    first, second = bench.plan(), bench.plan()

    (end,) = bench.commit(first)

    assert (end.sequence_id, end.finish_reason) == (a, FinishReason.STOP)
    assert (bench.pool.num_free, bench.pool.num_fenced) == (3, 1)
    assert bench.commit(second) == []
    assert (bench.pool.num_free, bench.pool.num_fenced) == (4, 0)


def test_the_oldest_never_gives_way_and_the_youngest_does():
    bench = Bench(num_pages=4)
    a, b = bench.submit(7, 9), bench.submit(7, 9)
    bench.step()
    bench.step()

    plan = bench.plan()

    assert plan.preempted == (b,)
    assert work(plan) == [(a, 8, 1)]


def test_a_policy_is_never_offered_the_oldest_as_a_victim():
    offered = []

    class Recording(SchedulingPolicy):
        def victim(self, running, need_pages, view):
            offered.append([request.arrival_index for request in running])
            return running[0]

    bench = Bench(num_pages=4, policy=Recording())
    bench.submit(7, 9)
    b = bench.submit(7, 9)
    bench.step()
    bench.step()

    assert bench.plan().preempted == (b,)
    assert offered == [[b]]


def test_a_preemption_that_leaves_no_work_stands_in_the_next_plan():
    bench = Bench(num_pages=4)
    a, b = bench.submit(7, 9), bench.submit(7, 9)
    bench.step()
    second = bench.plan()

    assert bench.scheduler.plan(0.0) is None  # the pages of b are fenced by the second step
    assert bench.scheduler.counters.preemptions == 1
    bench.commit(second)
    third = bench.plan()

    assert (work(third), third.preempted) == ([(a, 8, 1)], (b,))
    bench.commit(third)
    assert bench.plan().preempted == ()


def test_one_that_comes_within_the_budget_by_a_preemption_gets_its_page_too():
    class SecondOldest(SchedulingPolicy):
        def victim(self, running, need_pages, view):
            return running[0]

    bench = Bench(num_pages=5, policy=SecondOldest(), max_num_batched_tokens=32)
    a, b, c = bench.submit(7, 9), bench.submit(7, 9), bench.submit(4, 9)
    bench.step()
    bench.scheduler.state.max_num_batched_tokens = 2
    bench.step()  # a and b have filled their pages, and c its first one before

    plan = bench.plan()

    assert plan.preempted == (b,)
    assert work(plan) == [(a, 8, 1), (c, 4, 1)]
    assert [len(table) for table in bench.pages] == [3, 2]


def test_what_was_preempted_is_not_started_again_in_the_same_step():
    class SmallestFirst(SchedulingPolicy):
        def victim(self, running, need_pages, view):
            return min(running, key=lambda request: (request.pages, -request.arrival_index))

    bench = Bench(num_pages=7, policy=SmallestFirst(), max_num_batched_tokens=32)
    a, b, c, d = (bench.submit(tokens, 9) for tokens in (7, 7, 2, 5))
    bench.step()
    bench.step()  # a and b have filled their pages

    plan = bench.plan()

    assert plan.preempted == (c, d)
    assert work(plan) == [(a, 8, 1), (b, 8, 1)]
    assert bench.pool.num_free == 1  # c would fit


def test_nobody_is_preempted_for_pages_that_a_step_in_flight_gives_back_anyway():
    bench = Bench(num_pages=4)
    a, b, c = bench.submit(4), bench.submit(4), bench.submit(4)
    first = bench.plan()
    bench.scheduler.finish(c)
    assert (bench.pool.num_free, bench.pool.num_fenced) == (1, 1)

    second = bench.plan()

    assert (work(second), second.preempted) == ([(a, 4, 1)], ())
    bench.commit(first)
    assert (b, 4, 1) in work(bench.plan())


def test_a_sequence_without_a_page_sits_out_while_fenced_pages_are_on_their_way():
    bench = Bench(num_pages=4, max_num_batched_tokens=32)
    a, b, c = bench.submit(4), bench.submit(4), bench.submit(4)
    first = bench.plan()
    assert len(first.items) == 3
    second = bench.plan()  # one free page: the oldest gets it; c yields its own, fenced
    assert work(second) == [(a, 4, 1)]
    assert second.preempted == (c,)
    bench.commit(first)

    third = bench.plan()

    assert (b, 4, 1) in work(third)
    assert third.preempted == ()


def test_a_reader_that_is_behind_gives_its_pages_to_an_older_or_younger_one():
    bench = Bench(num_pages=4)
    a, b = bench.submit(7, 9), bench.submit(7, 9)
    bench.step()
    bench.scheduler.pause(a)
    bench.step()

    plan = bench.plan()

    assert plan.preempted == (a,)
    assert work(plan) == [(b, 8, 1)]


def test_a_prompt_starts_only_when_all_of_it_fits():
    bench = Bench(num_pages=10)
    a = bench.submit(20)
    bench.submit(24)

    assert work(bench.plan()) == [(a, 0, 16)]
    assert [item.sequence_id for item in bench.plan().items] == [a]


def test_memory_is_kept_for_the_answers_of_those_that_run():
    bench = Bench(num_pages=6, output_reserve_tokens=8)
    a = bench.submit(4, max_tokens=8)
    bench.submit(8, max_tokens=8)

    assert [item.sequence_id for item in bench.plan().items] == [a]


def test_a_large_request_at_the_head_is_not_overtaken():
    bench = Bench(num_pages=8)
    a = bench.submit(16)
    bench.step()
    bench.submit(20)
    bench.submit(1)

    assert [item.sequence_id for item in bench.plan().items] == [a]


def test_a_policy_that_starts_nothing_does_not_stop_the_engine():
    class Never(SchedulingPolicy):
        def admit(self, request, view):
            return Verdict.LATER

        def chunk(self, request, budget_tokens, view):
            return 0

    bench = Bench(policy=Never())
    a = bench.submit(20)
    assert work(bench.plan()) == [(a, 0, 16)]
    assert bench.scheduler.plan(0.0) is None


def test_a_request_that_the_policy_refuses_ends_at_once():
    class Refusing(SchedulingPolicy):
        def admit(self, request, view):
            return Verdict.NEVER

    bench = Bench(policy=Refusing())
    a = bench.submit(20)

    assert bench.scheduler.plan(0.0) is None
    (refused,) = bench.scheduler.take_ended_unplanned()
    assert (refused.sequence_id, refused.rejected) == (a, True)
    assert bench.scheduler.num_waiting == 0


def test_a_refusal_ends_every_sample_with_its_reason():
    class Refusing(SchedulingPolicy):
        def admit(self, request, view):
            return Refusal("later than wanted")

    bench = Bench(policy=Refusing())
    ids = bench.submit_all(20, n=2)

    assert bench.scheduler.plan(0.0) is None
    refused = bench.scheduler.take_ended_unplanned()
    assert [entry.sequence_id for entry in refused] == list(ids)
    assert {(entry.rejected, entry.error) for entry in refused} == {(True, "later than wanted")}
    assert not bench.sequences


def test_a_policy_sees_whose_request_it_is_and_what_its_sender_wants():
    bench = Bench()
    options = {"tenant": "blue", "ttft_target_seconds": 0.5, "tpot_target_seconds": 0.05}
    ids = bench.submit_all(20, n=2, now_seconds=3.0, **options)
    plain = bench.submit(20)
    for index in ids:
        view = bench.view(index)
        assert {name: getattr(view, name) for name in options} == options
        assert view.arrival_seconds == 3.0
    view = bench.view(plain)
    assert {getattr(view, name) for name in options} == {None}


def test_the_first_token_keeps_its_time_through_preemption():
    bench = Bench(num_pages=4)
    bench.submit(7, 9)
    b = bench.submit(7, 9)
    view = bench.view(b)
    bench.commit(bench.plan(), now_seconds=2.0)
    assert view.first_token_seconds == 2.0
    bench.commit(bench.plan(), now_seconds=3.0)
    bench.commit(bench.plan(), now_seconds=4.0)
    assert view.preemptions == 1
    assert view.first_token_seconds == 2.0


def test_a_request_has_no_first_token_while_its_prompt_is_computed_or_its_token_in_flight():
    bench = Bench()
    view = bench.view(bench.submit(20))
    bench.commit(bench.plan(), now_seconds=1.0)
    assert view.first_token_seconds is None
    sampling = bench.plan()
    assert view.first_token_seconds is None
    bench.commit(sampling, now_seconds=2.5)
    assert view.first_token_seconds == 2.5


def test_a_cancelled_request_that_waits_is_never_computed():
    bench = Bench()
    a = bench.submit(20)
    bench.scheduler.finish(a)

    assert bench.scheduler.plan(0.0) is None
    assert bench.scheduler.counters.tokens_prefilled == 0


def test_a_paused_sequence_is_not_planned_until_it_is_resumed():
    bench = Bench()
    a = bench.submit(3)
    bench.step()
    bench.scheduler.pause(a)
    assert bench.scheduler.plan(0.0) is None
    bench.scheduler.resume(a)
    assert work(bench.plan()) == [(a, 3, 1)]


def test_a_sequence_that_would_not_fit_alone_is_a_bug_of_the_caller():
    with pytest.raises(InvariantError, match=r"max_length 40.* <= 16 tokens"):
        Bench(num_pages=4).submit(20, max_tokens=20)


def test_a_leaked_page_is_found():
    bench = Bench()
    bench.submit(5)
    bench.step()
    bench.pool.acquire(1)
    with pytest.raises(InvariantError, match=r"page 2 has 1 references .* 0 in page tables"):
        bench.scheduler.sanity_check()


def test_a_policy_hears_of_the_end_of_those_alone_that_it_heard_arrive():
    class Books(SchedulingPolicy):
        def __init__(self):
            self.arrivals = []
            self.ends = []

        def arrived(self, requests):
            self.arrivals += [request.arrival_index for request in requests]

        def finished(self, requests):
            self.ends += [request.arrival_index for request in requests]

    books = Books()
    bench = Bench(policy=books)
    a, b, c = bench.submit_all(20, n=3)
    bench.scheduler.finish(c)
    bench.fail(bench.plan())
    d, e = bench.submit_all(4, n=2)
    bench.run()

    assert not bench.sequences
    assert books.arrivals == [a, d, e]
    assert sorted(books.ends) == [a, d, e]
    assert b not in books.ends


@pytest.mark.parametrize(
    "outcome",
    [
        StepOutcome(step=1, token_ids=(5,)),
        StepOutcome(step=0, token_ids=()),
        StepOutcome(step=0, token_ids=(5, 6)),
        StepOutcome(step=0, token_ids=(5,), row_errors={1: "NaN"}),
    ],
    ids=["another step", "too few rows", "too many rows", "an error of no row"],
)
def test_the_outcome_of_another_step_is_refused_and_changes_nothing(outcome):
    bench = Bench()
    bench.submit(3)
    plan = bench.plan()

    with pytest.raises(InvariantError, match="step 0"):
        bench.scheduler.commit(plan, outcome, 0.0)

    bench.scheduler.sanity_check()
    assert len(bench.commit(plan)) == 1


def test_a_step_is_committed_after_all_before_it():
    bench = Bench()
    a = bench.submit(3)
    first, second = bench.plan(), bench.plan()
    early, outcome = bench.device.execute(first), bench.device.execute(second)

    with pytest.raises(InvariantError, match="step 1 is to be done, and the last one is -1"):
        bench.scheduler.commit(second, outcome, 0.0)

    bench.scheduler.sanity_check()
    updates = [*bench.scheduler.commit(first, early, 0.0)]
    updates += bench.scheduler.commit(second, outcome, 0.0)
    assert [update.sequence_id for update in updates] == [a, a]
