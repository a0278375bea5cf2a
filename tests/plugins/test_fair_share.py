"""Policy `fair_share`: what tenants are owed, and the limit on the lead over a tenant that also
waits."""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import ConfigError
from aioserve.scheduling.sequence import Phase
from aioserve_plugins.fair_share import FairShare
from tests.scheduling.bench import Bench
from tests.tiers import examples

MAX_PROMPT, MAX_OUTPUT, SEATS = 24, 6, 3
WEIGHTS = {"a": 2.0, "b": 0.5}

bursts = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 1, 5, 20]),
        st.sampled_from(["a", "b", "c", None]),
        st.integers(1, 12),
        st.integers(1, MAX_PROMPT),
        st.integers(1, MAX_OUTPUT),
    ),
    min_size=2,
    max_size=12,
)
"""Bursts: steps since the previous one, the tenant, the number of requests, their prompts and
completions."""


def serve_one_after_the_other(bench: Bench) -> list[int]:
    """Sequence ids in the order in which they start."""
    started: list[int] = []
    while bench.scheduler.state.sequences:
        plan = bench.plan()
        started += [i.sequence_id for i in plan.items if i.start == 0]
        bench.commit(plan)
    return started


@settings(max_examples=examples(40))
@given(bursts, st.sampled_from([None, WEIGHTS]), st.sampled_from([0.0, 1.0, 2.0]))
def test_tenants_that_both_wait_are_served_alike(todo, weights, output_cost):
    policy = FairShare(weights=weights, output_cost=output_cost)
    bench = Bench(policy=policy, num_pages=512, max_num_seqs=SEATS)
    weight = dict.fromkeys(["a", "b", "c", None], 1.0) | (weights or {})
    most_at_once = MAX_PROMPT + output_cost * SEATS * MAX_OUTPUT
    bound = 2 * most_at_once / min(weight.values())
    served = dict.fromkeys(weight, 0.0)
    leads: dict[tuple[str | None, str | None], list[float]] = {}
    begun: set[int] = set()
    step = 0
    arrivals = iter(todo)
    burst = next(arrivals)
    while burst is not None or bench.scheduler.state.sequences:
        while burst is not None and burst[0] <= step:
            _, tenant, count, prompt, output = burst
            for _ in range(count):
                bench.submit(prompt, output, tenant=tenant)
            burst, step = next(arrivals, None), 0
        step += 1
        if not bench.scheduler.state.sequences:
            continue
        waiting = {sequence.view.tenant for sequence in bench.scheduler.state.waiting}
        for pair in permutations(weight, 2):
            lead = served[pair[0]] - served[pair[1]]
            if waiting.issuperset(pair):
                leads.setdefault(pair, []).append(lead)
                assert max(leads[pair]) - min(leads[pair]) <= bound
            else:
                leads.pop(pair, None)
        tenants = {s.sequence_id: s.view.tenant for s in bench.scheduler.state.sequences.values()}
        plan = bench.plan()
        for item in plan.items:
            tenant = tenants[item.sequence_id]
            if item.sequence_id not in begun:
                begun.add(item.sequence_id)
                prompt = bench.scheduler.state.sequences[item.sequence_id].prompt_tokens
                served[tenant] += (prompt - item.start) / weight[tenant]
        for entry in bench.commit(plan):
            tenant = tenants[entry.sequence_id]
            served[tenant] += output_cost / weight[tenant]


LONG_OUTPUT, LEAD = 40, 24.0


@settings(max_examples=examples(30))
@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.sampled_from(["a", "b", "c"]), st.integers(1, 8)),
        min_size=2,
        max_size=5,
    ),
    st.sampled_from([None, WEIGHTS, {"a": 4.0, "b": 8.0, "c": 4.0}]),
    st.sampled_from([3, 20]),
)
def test_with_a_lead_nobody_gets_further_ahead_however_long_answers_are(todo, weights, unit):
    """The lead since both began to wait is bounded: by `lead_tokens`, a prompt, and tokens
    generated meanwhile. These come from all slots while the longest context is computed, and in two
    steps more."""
    policy = FairShare(weights=weights, lead_tokens=LEAD)
    bench = Bench(policy=policy, num_pages=1024, max_num_seqs=SEATS)
    weight = dict.fromkeys(["a", "b", "c"], 1.0) | (weights or {})
    prompt = 8 * unit
    steps = -(-(prompt + LONG_OUTPUT) // (bench.scheduler.state.max_num_batched_tokens - SEATS)) + 2
    slack = (prompt + steps * 2.0 * SEATS) / min(weight.values())
    first: dict[tuple[str, str], float] = {}
    """Lead of the first tenant since both wait; below 0 if the second one leads."""
    pending = list(reversed(todo))
    step = 0
    while pending or bench.scheduler.state.sequences:
        while pending and pending[-1][0] <= step:
            _, tenant, units = pending.pop()
            for _ in range(3):
                bench.submit(units * unit, LONG_OUTPUT, tenant=tenant)
            step = 0
        step += 1
        if not bench.scheduler.state.sequences:
            continue
        bench.step()
        waiting = {sequence.view.tenant for sequence in bench.scheduler.state.waiting}
        policy._charge_all_generated()
        for pair in permutations(weight, 2):
            if waiting.issuperset(pair):
                lead = policy._counter(pair[0]) - policy._counter(pair[1])
                assert lead <= max(first.setdefault(pair, lead), LEAD) + slack
            else:
                first.pop(pair, None)
    assert bench.scheduler.policy_calls.faults_total == 0


ticks = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "step", "step", "pause", "resume", "finish"]),
        st.sampled_from(["a", "b", None]),
        st.integers(1, 40),
        st.integers(1, 2),
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=examples(40))
@given(ticks, st.sampled_from([0, 16]), st.sampled_from([2.0, 24.0]))
def test_all_end_and_none_is_kept_although_readers_stop_and_memory_is_short(todo, reserve, lead):
    policy = FairShare(lead_tokens=lead, max_idle_tenants=1)
    bench = Bench(
        policy=policy,
        num_pages=24,
        prefix_caching=True,
        max_num_seqs=SEATS,
        output_reserve_tokens=reserve,
    )
    for verb, tenant, size, samples in todo:
        live = list(bench.sequences)
        if verb == "submit":
            bench.submit_all([size % 3] * size, LONG_OUTPUT, n=samples, tenant=tenant)
        elif verb == "step" and (plan := bench.scheduler.plan(0.0)) is not None:
            bench.page_tables.take(plan)
            bench.commit(plan)
        elif verb != "step" and live:
            getattr(bench.scheduler, verb)(live[size % len(live)])
    for sequence_id in bench.sequences:
        bench.scheduler.resume(sequence_id)
    while bench.sequences:
        bench.step()
    assert bench.scheduler.policy_calls.faults_total == 0
    assert [policy._live, policy._charged, policy._longest] == [{}, {}, {}]
    assert policy._counters.keys() <= policy._idle.keys()


@settings(max_examples=examples(60))
@given(ticks, st.sampled_from([0, 16]), st.sampled_from([None, 2.0, 24.0]), st.booleans())
def test_every_tenant_is_charged_for_what_was_computed_for_it_once(todo, reserve, lead, leaves_out):
    """The request may be started by its policy, or by the mechanism if nothing else could run."""

    class Counting(FairShare):
        charges: ClassVar[defaultdict[str | None, float]]

        def order(self, waiting, view):
            return () if leaves_out else super().order(waiting, view)

        def _charge(self, request, tokens):
            self.charges[request.tenant] += tokens
            return super()._charge(request, tokens)

    Counting.charges = defaultdict(float)
    policy = Counting(lead_tokens=lead)
    bench = Bench(
        policy=policy,
        num_pages=24,
        prefix_caching=True,
        partial_page_reuse=False,  # what it saves is known when a request has started
        max_num_seqs=SEATS,
        output_reserve_tokens=reserve,
    )
    served: defaultdict[str | None, float] = defaultdict(float)
    begun: set[int] = set()

    def step() -> None:
        plan = bench.scheduler.plan(0.0)
        if plan is None:
            return
        for item in plan.items:
            sequence = bench.sequences[item.sequence_id]
            if item.sequence_id not in begun:
                begun.add(item.sequence_id)
                served[sequence.view.tenant] += sequence.prompt_tokens - item.start
        tenants = {number: s.view.tenant for number, s in bench.sequences.items()}
        for update in bench.commit(plan):
            served[tenants[update.sequence_id]] += 2

    for verb, tenant, size, _ in todo:
        live = list(bench.sequences)
        if verb == "submit":
            bench.submit([size % 3] * size, LONG_OUTPUT, tenant=tenant)
        elif verb == "step":
            step()
        elif live:
            getattr(bench.scheduler, verb)(live[size % len(live)])
    for sequence_id in bench.sequences:
        bench.scheduler.resume(sequence_id)
    while bench.sequences:
        step()
    assert policy.charges == served


def test_nobody_gives_way_to_one_whose_reader_is_behind():
    bench = Bench(policy=FairShare(lead_tokens=64), num_pages=512, max_num_seqs=2)
    slow = bench.submit([9] * 4, 400, tenant="slow")
    busy = [bench.submit([8] * 4, 400, tenant="busy")]
    bench.step()
    bench.scheduler.pause(slow)
    busy.append(bench.submit([7] * 4, 400, tenant="busy"))
    bench.step()
    assert bench.sequences[slow].phase is Phase.WAITING
    while bench.sequences.keys() & busy:
        bench.step()
    assert bench.scheduler.counters.preemptions == 1


def test_who_comes_anew_does_not_begin_where_one_is_whose_reader_is_behind():
    policy = FairShare()
    bench = Bench(policy=policy, num_pages=512, max_num_seqs=2)
    slow = bench.submit([9] * 4, 400, tenant="slow")
    bench.submit([8] * 4, 400, tenant="busy")
    bench.step()
    bench.scheduler.pause(slow)
    bench.submit([7] * 4, 400, tenant="busy")
    for _ in range(100):
        bench.step()
    assert bench.sequences[slow].phase is Phase.WAITING
    bench.submit([6] * 4, 400, tenant="new")
    bench.step()
    assert policy._counter("new") > policy._counter("slow") + 300


@pytest.mark.parametrize("caching", [False, True])
def test_prompts_longer_than_the_lead_make_nobody_give_way(caching):
    """Long prompts only change which tenant starts next."""
    policy = FairShare(lead_tokens=LEAD)
    bench = Bench(policy=policy, num_pages=256, max_num_seqs=3, prefix_caching=caching)
    for number in range(12):
        bench.submit([number] * (40 + 5 * (number % 7)), 8, tenant="ab"[number % 2])
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


@pytest.mark.parametrize(
    ("prompt", "lead", "budget", "expected"),
    [(2, 1000, 64, 8), (50, 64 + 120, 512, 3), (20, 1000, 24, 2)],
)
def test_no_more_give_way_than_bring_those_behind_up_and_can_start_in_the_step(
    prompt, lead, budget, expected
):
    policy = FairShare(lead_tokens=64)
    bench = Bench(policy=policy, num_pages=512, max_num_seqs=8, max_num_batched_tokens=budget)
    for _ in range(8):
        bench.submit(1, 400, tenant="ahead")
    bench.step()
    for _ in range(8):
        bench.submit([9] * prompt, 400, tenant="behind")
    bench.step()
    policy._charge_all_generated()
    policy._counters["ahead"] = policy._counter("behind") + lead
    bench.step()
    assert bench.scheduler.counters.preemptions == expected


@pytest.mark.parametrize("reserve", [0, 64])
@pytest.mark.parametrize("cached", [False, True])
def test_as_many_give_way_as_the_one_behind_needs_pages_for(reserve, cached):
    """Found pages that no other request uses are no room for it. The completions of requests that
    leave need no more room."""
    policy = FairShare(lead_tokens=64)
    bench = Bench(
        policy=policy,
        num_pages=60,
        max_num_seqs=8,
        prefix_caching=True,
        output_reserve_tokens=reserve,
    )
    bench.submit([9] * 100, 1, tenant="behind")
    bench.run()
    for number in range(2):
        bench.submit([number] * 4, 70, tenant="ahead")
    for _ in range(8):
        bench.step()
    behind = bench.submit([9 if cached else 8] * 100 + [7] * 20, 60, tenant="behind")
    bench.step()
    began = policy._counter("ahead") - policy._counter("behind")
    while bench.sequences[behind].phase is Phase.WAITING:
        bench.step()
        policy._charge_all_generated()
    assert policy._counter("ahead") - policy._counter("behind") <= began + 64 + 4 + 2 * 2 * 2


def test_without_a_lead_long_answers_run_to_their_end_and_with_one_they_give_way():
    def behind(**options: Any) -> int:
        """Tokens of the modest tenant when the greedy one, who came first, has had 300."""
        bench = Bench(policy=FairShare(**options), num_pages=512, max_num_seqs=2)
        for _ in range(4):
            bench.submit(4, 400, tenant="greedy")
        bench.step()
        modest = [bench.submit([9] * 4, 400, tenant="modest") for _ in range(2)]
        got = 0
        for _ in range(150):
            got += sum(entry.sequence_id in modest for entry in bench.step())
        return got

    assert behind(lead_tokens=None) == 0
    assert behind(lead_tokens=64) > 100


def test_what_one_tenant_was_given_while_it_was_alone_is_not_held_against_it():
    """A newcomer doesn't count it: the first completions go on until they are ahead by the lead
    since then."""
    bench = Bench(policy=FairShare(lead_tokens=64), num_pages=512, max_num_seqs=2)
    alone = [bench.submit(4, 400, tenant="alone") for _ in range(2)]
    for _ in range(101):
        bench.step()
    late = [bench.submit([9] * 4, 400, tenant="late") for _ in range(2)]
    got = [{entry.sequence_id for entry in bench.step()} for _ in range(40)]
    assert all(ids == set(alone) for ids in got[:14])
    assert any(ids & set(late) for ids in got[14:20])


def test_nobody_gives_way_where_that_is_not_enough():
    """The tenant that is behind needs all pages. A third tenant holds some of them, and is behind
    as well."""
    policy = FairShare(lead_tokens=8)
    bench = Bench(policy=policy, num_pages=24, max_num_seqs=3)
    bench.submit(4, 60, tenant="ahead")
    bench.submit([8] * 4, 60, tenant="ahead")
    for _ in range(10):
        bench.step()
    bench.submit([9] * 4, 60, tenant="behind")
    bench.step()
    policy._counters["behind"] = 0.0
    bench.submit([7] * 90, 4, tenant="large")
    policy._counters["large"] = 0.0
    policy._counters["ahead"] = 40.0
    for _ in range(6):
        bench.step()
    assert bench.scheduler.counters.preemptions == 0


def test_tenants_take_turns_whatever_one_of_them_has_queued():
    bench = Bench(policy=FairShare(), max_num_seqs=1)
    greedy = [bench.submit(4, 1, tenant="greedy") for _ in range(4)]
    modest = [bench.submit(4, 1, tenant="modest") for _ in range(2)]
    order = [greedy[0], modest[0], greedy[1], modest[1], greedy[2], greedy[3]]
    assert serve_one_after_the_other(bench) == order


def test_a_tenant_of_twice_the_weight_gets_twice_the_service():
    bench = Bench(policy=FairShare(weights={"gold": 2}), max_num_seqs=1)
    gold = [bench.submit(4, 1, tenant="gold") for _ in range(8)]
    plain = [bench.submit(4, 1, tenant="plain") for _ in range(8)]
    started = serve_one_after_the_other(bench)[:9]
    assert [len(set(ids) & set(started)) for ids in (gold, plain)] == [6, 3]


def test_nobody_saves_up_service_by_asking_for_none():
    bench = Bench(policy=FairShare(), max_num_seqs=1)
    busy = [bench.submit(4, 1, tenant="busy") for _ in range(8)]
    for _ in range(4):
        bench.step()
    late = [bench.submit(4, 1, tenant="late") for _ in range(4)]
    started = serve_one_after_the_other(bench)
    assert [index in late for index in started] == [False, True] * 4
    assert sorted(started) == [*busy[4:], *late]


def test_who_comes_anew_begins_where_the_one_served_least_is():
    bench = Bench(policy=FairShare(output_cost=0), max_num_seqs=1, max_num_batched_tokens=64)
    _, heavy = (bench.submit(16, 1, tenant="heavy") for _ in range(2))
    _, light = (bench.submit(2, 1, tenant="light") for _ in range(2))
    bench.step()
    bench.step()
    new = [bench.submit(2, 1, tenant="new") for _ in range(2)]
    assert serve_one_after_the_other(bench) == [light, *new, heavy]


def test_what_the_cache_saved_is_not_charged_and_generated_tokens_are():
    bench = Bench(policy=FairShare(), max_num_seqs=1, prefix_caching=True)
    bench.submit([7] * 17, 1, tenant="a")
    bench.run()
    policy = bench.scheduler.policy_calls.policy
    assert isinstance(policy, FairShare)
    assert policy._counters["a"] == 17 + 2
    bench.submit([7] * 17, 3, tenant="b")
    began = policy._counters["a"]
    bench.run()
    assert policy._counters["b"] == began + 1 + 2 * 3


def test_further_samples_share_the_charge_for_their_prompt():
    bench = Bench(policy=FairShare())
    bench.submit_all(9, 2, n=3, tenant="a")
    bench.run()
    policy = bench.scheduler.policy_calls.policy
    assert isinstance(policy, FairShare)
    assert policy._counters["a"] == 9 + 2 * 2 * 3


def test_a_preempted_request_is_charged_once():
    policy = FairShare()
    bench = Bench(num_pages=4, policy=policy)
    a, b = bench.submit(7, 9, tenant="a"), bench.submit(7, 9, tenant="b")
    views = [bench.view(index) for index in (a, b)]
    while bench.scheduler.state.sequences[b].phase is not Phase.WAITING:
        bench.step()
    bench.run()
    assert [view.preemptions for view in views] == [0, 1]
    assert policy._counters == {"a": 7 + 2 * 9, "b": 7 + 2 * 9}


def test_tenants_that_left_are_remembered_up_to_a_number_and_no_request_is():
    policy = FairShare(max_idle_tenants=2)
    bench = Bench(policy=policy)
    for tenant in ("a", "b", "c", "a", "d"):
        bench.submit(4, 1, tenant=tenant)
        bench.run()
    assert list(policy._counters) == ["a", "d"]
    assert not policy._live
    assert not policy._charged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"a": 0}}, "weights must be positive and finite, got 0 for 'a'"),
        ({"weights": {"a": "1"}}, "weights must be positive and finite, got '1' for 'a'"),
        ({"weights": 5}, "weights must be a mapping of tenants to numbers, got 5"),
        ({"output_cost": -1}, "output_cost must be finite and at least 0, got -1"),
        ({"output_cost": float("nan")}, "output_cost must be finite and at least 0, got nan"),
        ({"lead_tokens": 0}, "lead_tokens must be positive and finite, got 0"),
        ({"max_idle_tenants": -1}, "max_idle_tenants must be an int >= 0, got -1"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        FairShare(**options)
