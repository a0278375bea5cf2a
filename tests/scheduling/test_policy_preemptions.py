"""Wishes of a policy for running sequences, their limits, and the promise that all reach their
end."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.request import FinishReason
from aioserve.scheduling.pins import PINNED_SHARE
from aioserve.scheduling.policy import Preempt, Refusal, SchedulingPolicy, Verdict
from aioserve.scheduling.sequence import MAX_POLICY_PREEMPTIONS
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench, work
from tests.tiers import examples


def indexes(requests):
    return [request.arrival_index for request in requests]


def decoding(bench: Bench, count: int, max_tokens: int = 8, prompt: int = 4) -> list[int]:
    """Submit `count` sequences and run them until they are ready for their next token."""
    ids = [bench.submit([10 * i + j for j in range(prompt)], max_tokens) for i in range(count)]
    while any(bench.sequences[i].remaining > 1 or not bench.sequences[i].slot + 1 for i in ids):
        bench.step()
    return ids


class Asking(SchedulingPolicy):
    """Answers what the test sets, from then on."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def ask(self, question, default, *args):
        answer = self.answers.get(question)
        if answer is None:
            return default
        self.asked.append(question)
        return answer(*args)


class Decodes(Asking):
    def decode(self, running, view):
        return self.ask("decode", running, running, view)


class Preempts(Asking):
    def preempt(self, running, view):
        return self.ask("preempt", (), running, view)


def test_only_those_decode_whom_the_policy_names_and_in_its_order():
    policy = Decodes()
    bench = Bench(policy=policy)
    first, _, third = decoding(bench, 3)
    policy.answers["decode"] = lambda running, view: [running[2], running[0]]
    assert [item[0] for item in work(bench.plan())] == [third, first]


def test_without_a_wish_the_policy_is_not_asked():
    class Plain(SchedulingPolicy):
        def __getattribute__(self, name):
            asked.append(name)
            return super().__getattribute__(name)

    asked: list[str] = []
    bench = Bench(policy=Plain(), num_pages=8)
    for _ in range(3):
        bench.submit(8, 8)
    asked.clear()
    bench.run()
    wishes = {"decode", "preempt", "order_prefills", "reserve", "drop", "pin", "unpin"}
    wishes.add("begin_step")
    assert not wishes & set(asked)


def test_where_nobody_is_named_one_goes_on_unasked():
    bench = Bench(policy=Decodes(decode=lambda running, view: ()))
    ids = [bench.submit([i, i + 1], 5) for i in range(3)]
    assert {i: len(tokens) for i, tokens in bench.run().items()} == dict.fromkeys(ids, 5)


def test_one_that_made_others_give_their_pages_decodes_although_others_are_named():
    """Otherwise it would be named whenever it takes pages, and never when it has them."""
    policy = Decodes()
    bench = Bench(policy=policy, num_pages=5)
    first, second = (bench.submit([10 * i + j for j in range(4)], 12) for i in range(2))
    third = bench.submit([99], 12)
    policy.answers["decode"] = lambda running, view: running[:2]
    while bench.sequences[second].lease.computed < 7:
        bench.step()
    in_flight = bench.plan()  # after which both need a third page
    assert bench.scheduler.plan(0.0) is None  # the second gives its pages, after that step
    assert [s.sequence_id for s in bench.waiting] == [second]
    bench.commit(in_flight)
    policy.answers["decode"] = lambda running, view: [
        r for r in running if r.arrival_index == third
    ]
    plan = bench.plan()
    assert [item[0] for item in work(plan)] == [first, third]
    bench.commit(plan)
    assert [item[0] for item in work(bench.plan())] == [third]


def test_prompts_go_on_in_the_order_that_the_policy_gives():
    class Orders(SchedulingPolicy):
        def order_prefills(self, running, view):
            return [r for r in reversed(running) if r.tenant != "left out"]

        def chunk(self, request, budget_tokens, view):
            return min(budget_tokens, 4)

    bench = Bench(policy=Orders(), max_num_batched_tokens=12)
    a, b, c = (
        bench.submit([i] * 12, 1, tenant=tenant)
        for i, tenant in enumerate((None, "left out", None))
    )
    bench.step()  # all start
    assert [s.sequence_id for s in bench.running] == [a, b, c]
    assert [item[0] for item in work(bench.plan())] == [c, a]


@pytest.mark.parametrize("how", [None, "auto", "recompute", "swap"])
def test_who_is_taken_off_the_device_gives_its_pages_back_and_goes_on_with_the_same_tokens(how):
    policy = Preempts()
    bench = Bench(policy=policy, num_host_pages=8)
    first, second = decoding(bench, 2)
    received = {i: len(bench.sequences[i].known_ids) - 4 for i in (first, second)}
    policy.answers["preempt"] = lambda running, view: [Preempt(running[0], how)]
    plan = bench.plan()
    assert plan.preempted == (first,)
    assert first not in [item[0] for item in work(plan)]
    assert [s.sequence_id for s in bench.waiting] == [first]
    assert bool(bench.host.num_held) == (how == "swap")
    bench.commit(plan)
    del policy.answers["preempt"]
    tokens = bench.run()
    for i, prompt in ((first, [0, 1, 2, 3]), (second, [10, 11, 12, 13])):
        expected = expected_tokens(prompt, 8, 0)
        assert tokens[i] == expected[-len(tokens[i]) :]
        assert len(tokens[i]) >= 8 - received[i] - 1


def test_one_is_preempted_at_a_wish_only_so_often_for_each_token():
    """Otherwise a prompt that takes three steps would begin again for ever."""
    policy = Preempts(preempt=lambda running, view: running)
    bench = Bench(policy=policy, max_num_batched_tokens=16)
    bench.submit(40, 3)
    for _ in range(3 * 3 * (MAX_POLICY_PREEMPTIONS + 2)):
        if not bench.sequences:
            break
        bench.step()
    assert not bench.sequences
    assert (
        MAX_POLICY_PREEMPTIONS
        <= bench.scheduler.counters.preemptions
        <= 3 * (MAX_POLICY_PREEMPTIONS + 1)
    )


def test_candidates_for_preemption_are_those_that_will_not_end_by_themselves():
    asked: list[list[int]] = []
    policy = Preempts()
    bench = Bench(policy=policy)
    ending = bench.submit(4, 2)
    going_on = bench.submit(4, 8)
    bench.step()
    plan = bench.plan()  # samples the last token of the first one
    policy.answers["preempt"] = lambda running, view: asked.append(indexes(running)) or ()
    bench.plan()
    assert asked == [[going_on]]
    assert ending in bench.sequences
    bench.commit(plan)


@pytest.mark.parametrize("of_any_age", [False, True])
def test_victims_are_those_behind_unless_the_policy_wants_to_see_all(of_any_age):
    class Sees(SchedulingPolicy):
        victim_of_any_age = of_any_age

        def victim(self, running, need_pages, view):
            seen.append(indexes(running))
            return running[0]

    seen: list[list[int]] = []
    bench = Bench(policy=Sees(), num_pages=6, page_size=4)
    ids = [bench.submit([10 * i, 10 * i + 1, 10 * i + 2], 9) for i in range(3)]
    bench.run()
    assert seen
    oldest_seen = min(min(one) for one in seen)
    assert oldest_seen == (ids[0] if of_any_age else ids[1])


def test_a_request_waits_until_what_the_policy_reserves_is_free():
    class Reserves(SchedulingPolicy):
        def reserve(self, request, view):
            return 5

    bench = Bench(policy=Reserves(), num_pages=8, page_size=4)
    first = bench.submit(4, 8)
    second = bench.submit([9, 9, 9, 9], 8)
    bench.step()
    assert [s.sequence_id for s in bench.running] == [first, second]
    third = bench.submit([8, 8, 8, 8], 8)
    bench.step()
    assert [s.sequence_id for s in bench.waiting] == [third]
    assert third in bench.run()


def test_none_for_a_reserve_is_the_engine_s_own():
    class Leaves(SchedulingPolicy):
        def reserve(self, request, view):
            reserved.append(view.pages_reserved)

    reserved: list[int] = []
    bench = Bench(policy=Leaves(), num_pages=12, page_size=4, output_reserve_tokens=8)
    bench.submit(4, 20)
    bench.step()
    bench.submit(4, 20)
    bench.step()
    assert reserved[0] == 0
    assert reserved[-1] == 2


def test_a_running_request_that_is_dropped_ends_with_the_policy_s_reason():
    class Drops(SchedulingPolicy):
        def drop(self, request, view):
            return Refusal("too late", 2.0) if request.generated_tokens >= 3 else None

    bench = Bench(policy=Drops())
    sequence_id = bench.submit(4, 8)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.plan(0.0) is None
    bench.scheduler.sanity_check()
    (update,) = bench.scheduler.take_ended_unplanned()
    assert (update.sequence_id, update.rejected, update.finish_reason) == (
        sequence_id,
        True,
        FinishReason.ERROR,
    )
    assert (update.error, update.retry_after_seconds) == ("too late", 2.0)
    assert bench.pool.num_free == bench.pool.num_pages


class Pins(SchedulingPolicy):
    def __init__(self):
        self.unpinned: list[int] = []
        self.offered: list[tuple[int, ...]] = []

    def pin(self, request):
        return request.computed_tokens if request.tenant == "kept" else 0

    def unpin(self, pins, view):
        self.offered.append(tuple(pin.number for pin in pins))
        return [pin for pin in pins if pin.number in self.unpinned]


def pinned_bench(**options) -> tuple[Bench, Pins]:
    policy = Pins()
    return Bench(policy=policy, prefix_caching=True, page_size=4, **options), policy


def cached(bench: Bench, prompt: list[int]) -> int:
    sequence_id = bench.submit([*prompt, 99], 1)
    found = bench.view(sequence_id).cached_tokens
    bench.scheduler.finish(sequence_id)
    return found


def fill(bench: Bench, start: int = 100, prompt: int = 24) -> None:
    """Submit enough other requests to evict everything evictable."""
    for i in range(8):
        bench.submit([start + 50 * i + j for j in range(prompt)], 1)
        bench.run()


def test_what_is_pinned_is_not_evicted_for_others_until_the_pin_ends():
    bench, policy = pinned_bench(num_pages=16)
    kept, gone = list(range(8)), list(range(50, 58))
    for prompt, tenant in ((kept, "kept"), (gone, None)):
        bench.submit(prompt, 2, tenant=tenant)
        bench.run()
    fill(bench)
    assert cached(bench, gone) == 0
    assert cached(bench, kept) == 8
    policy.unpinned = [1]
    fill(bench, start=1000)
    assert cached(bench, kept) == 0
    assert not bench.scheduler.state.pins.leases


def test_pins_hold_no_more_than_their_share_and_the_oldest_goes_first():
    bench, policy = pinned_bench(num_pages=16)
    for i in range(4):
        bench.submit([100 * i + j for j in range(8)], 1, tenant="kept")
        bench.run()
        assert bench.scheduler.state.pins.num_pages <= PINNED_SHARE * 16
    bench.submit(4, 1)
    bench.run()
    assert policy.offered[-1] == (3, 4)


def test_pins_give_way_to_those_that_run():
    bench, _ = pinned_bench(num_pages=8)
    bench.submit(list(range(8)), 1, tenant="kept")
    bench.run()
    assert bench.scheduler.state.pins.num_pages == 2
    tokens = bench.submit([9, 9, 9], 28)  # which takes all pages in the end
    assert len(bench.run()[tokens]) == 28
    assert bench.scheduler.counters.preemptions == 0


def test_pins_give_way_to_the_next_one_when_nothing_runs():
    bench, _ = pinned_bench(num_pages=8)
    bench.submit(list(range(8)), 1, tenant="kept")
    bench.run()
    large = bench.submit([7] * 30, 2)
    assert len(bench.run()[large]) == 2


def test_pins_give_way_to_one_that_may_displace_others_although_it_finds_part_of_its_prompt():
    """The pages that it finds can be evicted as well, and are no room for the rest of the
    prompt."""

    class Urgent(Pins):
        def precedence(self, request):
            return request.priority

    bench = Bench(policy=Urgent(), prefix_caching=True, num_pages=16, max_num_batched_tokens=64)
    bench.submit(list(range(100, 116)), 1, tenant="kept")
    bench.run()
    bench.submit(list(range(200, 217)), 1)
    bench.run()
    bench.submit(list(range(300, 328)), 12)
    bench.step()
    urgent = bench.submit([*range(200, 216), *range(400, 412)], 4, priority=1)
    bench.step()  # which has no room for it
    assert bench.scheduler.state.pins.num_pages == 4
    bench.step()
    assert bench.view(urgent).is_running
    assert bench.scheduler.state.pins.num_pages == 0
    assert bench.scheduler.counters.preemptions == 0


def test_pins_of_what_a_failed_step_should_have_written_end():
    bench, _ = pinned_bench(num_pages=16)
    sequence_id = bench.submit(list(range(8)), 1, tenant="kept")
    plan = bench.plan()
    bench.scheduler.finish(sequence_id)
    assert bench.scheduler.state.pins.num_pages == 2
    bench.fail(plan)
    assert not bench.scheduler.state.pins.leases
    assert cached(bench, list(range(8))) == 0


def test_a_view_shows_who_runs_who_waits_and_what_the_last_steps_were():
    class Looks(SchedulingPolicy):
        def admit(self, request, view):
            seen.append(
                (
                    indexes(view.running),
                    indexes(view.waiting),
                    (view.num_decoding, view.num_prefilling),
                    [(s.prefill_tokens, s.decodes, s.seconds) for s in view.last_steps],
                )
            )
            return Verdict.NOW

        def chunk(self, request, budget_tokens, view):
            return min(budget_tokens, 15)

    seen: list[tuple] = []
    bench = Bench(policy=Looks(), max_num_batched_tokens=64)
    first = bench.submit(6, 8)
    plan = bench.plan()
    bench.scheduler.charge(plan, 0.5)
    bench.commit(plan)
    second = bench.submit(list(range(50, 100)), 8)
    plan = bench.plan()
    bench.scheduler.charge(plan, 0.25)
    bench.commit(plan)
    third = bench.submit(3, 8)
    bench.step()
    assert seen[0] == ([], [first], (0, 0), [])
    assert seen[1] == ([first], [second], (1, 0), [(6, 0, 0.5)])
    assert seen[2] == ([first, second], [third], (1, 1), [(6, 0, 0.5), (15, 1, 0.25)])


@settings(max_examples=examples(30))
@given(
    fixed=st.floats(0.001, 0.1),
    per_prefill=st.floats(1e-5, 1e-2),
    per_decode=st.floats(1e-5, 1e-2),
    seed=st.integers(0, 1000),
)
def test_an_estimate_is_the_line_through_the_steps_that_were_measured(
    fixed, per_prefill, per_decode, seed
):
    estimates: list[float | None] = []

    class Estimates(SchedulingPolicy):
        def order(self, waiting, view):
            estimates.append(view.estimate(prefill_tokens=10, decodes=4))
            return waiting

    def seconds(prefill: int, decodes: int) -> float:
        return fixed + per_prefill * prefill + per_decode * decodes

    choose = random.Random(seed)
    bench = Bench(policy=Estimates(), max_num_seqs=64, num_pages=2048, max_num_batched_tokens=64)
    for _ in range(80):
        bench.submit(choose.randint(2, 20), choose.randint(2, 30))
        plan = bench.plan()
        counts = [item.count for item in plan.items]
        prefill, decodes = sum(c for c in counts if c > 1), counts.count(1)
        bench.scheduler.charge(plan, seconds(prefill, decodes))
        bench.commit(plan)
    assert estimates[0] is None
    assert estimates[-1] == pytest.approx(seconds(10, 4), rel=1e-3)


def test_steps_that_failed_say_nothing_of_how_long_others_take():
    class Estimates(SchedulingPolicy):
        def order(self, waiting, view):
            seen.append((view.estimate(prefill_tokens=8, context_tokens=8), view.last_steps))
            return waiting

    seen: list[tuple] = []
    bench = Bench(policy=Estimates())
    failed: list[int] = []
    for number in range(40):
        bench.submit(4 + number % 5, 1)
        plan = bench.plan()
        bench.scheduler.charge(plan, 0.001 if number % 3 else 0.01 * plan.num_tokens)
        if number % 3:
            failed.append(plan.step)
            bench.fail(plan)
        else:
            bench.commit(plan)
    estimate, steps = seen[-1]
    assert estimate == pytest.approx(0.08)
    assert steps
    assert not {one.step for one in steps} & set(failed)


def test_a_request_tells_when_its_last_token_came_and_how_long_tokens_take():
    bench = Bench()
    sequence_id = bench.submit(4, 8)
    view = bench.view(sequence_id)
    assert (view.is_running, view.last_token_seconds, view.mean_gap_seconds) == (False, None, None)
    for now in (1.0, 2.5, 5.0):
        bench.commit(bench.plan(now), now)
    assert view.is_running
    assert (view.first_token_seconds, view.last_token_seconds) == (1.0, 5.0)
    assert view.mean_gap_seconds == 2.0
