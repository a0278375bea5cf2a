"""The bundled policies keep the contract, and do what each of them is for."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import pytest

from aioserve import ConfigError, RequestView
from aioserve.plugins import PluginRegistry
from aioserve.steps.plan import StepPlan
from aioserve.testing import check_policy
from aioserve_plugins.cache_aware import CacheAware
from aioserve_plugins.deadline import Deadline
from aioserve_plugins.fair_share import FairShare
from aioserve_plugins.fcfs import FirstComeFirstServed
from aioserve_plugins.priority import Priority
from aioserve_plugins.round_robin import RoundRobin
from aioserve_plugins.shortest_first import ShortestFirst
from tests.scheduling.bench import Bench, work
from tests.tiers import examples

BY_NAME = {
    "cache_aware": CacheAware,
    "deadline": Deadline,
    "fair_share": FairShare,
    "fcfs": FirstComeFirstServed,
    "priority": Priority,
    "round_robin": RoundRobin,
    "shortest_first": ShortestFirst,
}


LONG_BOUNDS = (CacheAware, Deadline, Priority, ShortestFirst)
"""Policies whose defaults declare more than `check_policy` tries."""


def planned(bench: Bench) -> StepPlan:
    """Plan and commit one step."""
    plan = bench.plan()
    bench.commit(plan)
    return plan


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "make_policy",
    [
        *(policy for policy in BY_NAME.values() if policy not in LONG_BOUNDS),
        lambda: Priority(patience_tokens=20_000),
        lambda: Priority(patience_tokens=None),
        lambda: Priority(patience_tokens=0),
        lambda: Priority(patience_tokens=300),
        lambda: Priority(patience_tokens=300, preempt=False, first="highest"),
        lambda: RoundRobin(patience=0),
        lambda: RoundRobin(patience=0.5, chunk_size=2),
        lambda: RoundRobin(chunk_size=1),
        lambda: RoundRobin(chunk_size=8),
        lambda: RoundRobin(chunk_size=3, adaptive=True),
        lambda: CacheAware(patience=64),
        lambda: CacheAware(patience=0.3),
        lambda: CacheAware(patience=2.5, lookups=1),
        lambda: CacheAware(patience=2.5, lookups=5),
        lambda: ShortestFirst(patience=64),
        lambda: ShortestFirst(patience=0.3),
        lambda: ShortestFirst(patience=2.5, lookups=1),
        lambda: ShortestFirst(patience=2.5, lookups=5),
        lambda: Deadline(patience=64),
        lambda: Deadline(patience=0.3),
        lambda: Deadline(patience=2.5, window=3, default_ttft_seconds=0.05),
        lambda: Deadline(reject=False, patience=2.5),
        lambda: FairShare(weights={"a": 3}, output_cost=0.5, max_idle_tenants=0),
        lambda: FairShare(lead_tokens=5.0),
        lambda: FairShare(lead_tokens=None),
    ],
)
def test_each_keeps_the_contract_and_its_starvation_bound(make_policy):
    check_policy(make_policy, max_examples=examples(12))


@pytest.mark.parametrize("name", BY_NAME)
def test_each_is_found_by_its_name(name):
    registry = PluginRegistry()
    assert type(registry.policy(name)) is BY_NAME[name]
    assert registry.policies[name].spec.description


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        (RoundRobin, {"chunk_size": 0}, "chunk_size must be an int of at least 1, got 0"),
        (RoundRobin, {"chunk_size": 1.5}, "chunk_size must be an int of at least 1, got 1.5"),
        (RoundRobin, {"adaptive": 1}, "adaptive must be True or False, got 1"),
        (RoundRobin, {"patience": -1}, "patience must be finite and at least 0, got -1"),
        (CacheAware, {"patience": 0}, "patience must be positive and finite, got 0"),
        (CacheAware, {"patience": "1"}, "patience must be positive and finite, got '1'"),
        (CacheAware, {"lookups": 0}, "lookups must be an int of at least 1, got 0"),
        (ShortestFirst, {"patience": float("inf")}, "patience must be positive and finite"),
        (ShortestFirst, {"patience": float("nan")}, "patience must be positive and finite"),
        (ShortestFirst, {"lookups": -2}, "lookups must be an int of at least 1, got -2"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(policy, options, message):
    with pytest.raises(ConfigError, match=message):
        policy(**options)


def requests_in(thing: object) -> int:
    """Number of requests that an object of a policy holds on to."""
    if isinstance(thing, RequestView):
        return 1
    if isinstance(thing, Mapping):
        return sum(requests_in(part) for pair in thing.items() for part in pair)
    if isinstance(thing, list | tuple | set | deque):
        return sum(map(requests_in, thing))
    slots = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
    own = [getattr(thing, name) for name in slots if isinstance(getattr(thing, name, None), list)]
    return requests_in(getattr(thing, "__dict__", {})) + requests_in(own)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("leave", [False, True])
def test_none_holds_on_to_a_request_that_has_ended(name, leave):
    """Its prompt goes with it, even if no request comes for hours."""
    policy = BY_NAME[name]()
    bench = Bench(policy=policy, num_pages=20, max_num_seqs=3, prefix_caching=True)
    held = 0
    for number in range(24):
        bench.submit([number % 5] * 20 + [number] * (number % 7), 6, tenant="ab"[number % 2])
        bench.step()
        held = max(held, requests_in(policy))
    for sequence_id in [*bench.sequences][:: 1 if leave else 2]:
        bench.scheduler.finish(sequence_id)
    while bench.sequences:
        bench.step()
    assert requests_in(policy) == 0
    assert held or name in ("fcfs", "priority")


# -- round_robin


def test_every_prompt_gets_its_chunk_in_turn():
    bench = Bench(policy=RoundRobin(chunk_size=4), max_num_batched_tokens=8, page_size=1)
    a, b, c = (bench.submit(ids) for ids in ([0] * 20, [1] * 20, [2] * 20))
    plans = [work(planned(bench)) for _ in range(3)]
    assert plans == [
        [(a, 0, 4), (b, 0, 4)],
        [(a, 4, 4), (c, 0, 4)],
        [(b, 4, 4), (c, 4, 4)],
    ]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    bench = Bench(policy=RoundRobin(chunk_size=4), max_num_batched_tokens=8)
    long = bench.submit([0] * 60)
    bench.step()
    short = bench.submit([1] * 4)
    assert work(planned(bench)) == [(long, 4, 4), (short, 0, 4)]


def test_decodes_are_not_held_up_and_prompts_share_what_is_left():
    bench = Bench(policy=RoundRobin(chunk_size=4), max_num_batched_tokens=8)
    decoding = bench.submit([1])
    bench.step()
    a, b = bench.submit([0] * 20), bench.submit([2] * 20)
    assert work(planned(bench)) == [(decoding, 1, 1), (a, 0, 4), (b, 0, 3)]


def test_room_that_nobody_can_use_is_left_once():
    bench = Bench(
        policy=RoundRobin(chunk_size=4),
        num_pages=26,
        max_num_batched_tokens=8,
        output_reserve_tokens=16,
    )
    a, b = bench.submit([0] * 40), bench.submit([1] * 40)
    bench.step()
    bench.submit([2] * 8, max_tokens=20)
    sizes = [planned(bench).num_tokens for _ in range(6)]
    assert {a, b} <= bench.scheduler.state.sequences.keys()
    assert sizes == [4, 8, 8, 8, 8, 8]


@pytest.mark.parametrize(("decoding", "tokens"), [(0, 64), (1, 56), (4, 32), (6, 16), (7, 16)])
def test_an_adaptive_step_has_less_for_prompts_the_more_sequences_decode(decoding, tokens):
    policy = RoundRobin(chunk_size=16, adaptive=True)
    bench = Bench(policy=policy, max_num_seqs=8, max_num_batched_tokens=64, num_pages=256)
    for _ in range(decoding):
        bench.submit(1, 20)
    if decoding:
        bench.step()
    for _ in range(8 - decoding):
        bench.submit(100)
    counts = [count for _, start, count in work(planned(bench)) if not start]
    assert sum(counts) == tokens
    assert max(counts) <= 16


def test_a_prompt_waits_for_the_page_that_another_one_computes_and_finds_it():
    bench = Bench(policy=RoundRobin(chunk_size=4), prefix_caching=True, max_num_batched_tokens=16)
    cached(bench, [5] * 9)
    first = bench.submit([*[7] * 12, 1])
    alike = bench.submit([*[7] * 12, 2])
    other = bench.submit([9] * 4)
    plans = [work(planned(bench)) for _ in range(4)]
    assert plans[0] == [(first, 0, 4), (other, 0, 4)]
    assert (alike, 12, 1) in plans[2]


def test_a_prompt_waits_for_a_page_no_longer_than_its_patience():
    policy = RoundRobin(chunk_size=4, patience=0)
    bench = Bench(policy=policy, prefix_caching=True, max_num_batched_tokens=16)
    cached(bench, [5] * 9)
    first = bench.submit([*[7] * 12, 1])
    alike = bench.submit([*[7] * 12, 2])
    assert [item[0] for item in work(planned(bench))] == [first, alike]


# -- cache_aware


def cached(bench: Bench, prompt: list[int]) -> None:
    """Serve a prompt, so that its pages are in the prefix cache."""
    bench.submit(prompt, max_tokens=1)
    bench.run()


def test_the_longest_cached_prefix_starts_first():
    bench = Bench(policy=CacheAware(), prefix_caching=True)
    cached(bench, [7] * 17)
    fresh = bench.submit([1] * 17)
    known = bench.submit([*[7] * 16, 8])
    longer = bench.submit([*[7] * 8, *[9] * 9])
    assert work(planned(bench)) == [(known, 16, 1), (longer, 8, 9), (fresh, 0, 6)]


def test_what_is_found_counts_for_more_than_a_little_less_to_compute():
    bench = Bench(policy=CacheAware(), prefix_caching=True, max_num_batched_tokens=64)
    cached(bench, [7] * 17)
    short = bench.submit([1] * 4)
    known = bench.submit([*[7] * 16, *[8] * 5])
    assert [item[0] for item in work(planned(bench))] == [known, short]


def test_a_request_whose_prefix_another_one_computes_comes_after_the_others():
    bench = Bench(policy=CacheAware(), prefix_caching=True, max_num_batched_tokens=64)
    first = bench.submit([*[1] * 8, 2, 3])
    alike = bench.submit([*[1] * 8, 4, 5])
    other = bench.submit([9] * 10)
    items = work(planned(bench))
    assert items == [(first, 0, 10), (other, 0, 10), (alike, 8, 2)]


def test_requests_that_may_not_share_are_not_put_off_for_each_other():
    bench = Bench(policy=CacheAware(), prefix_caching=True, max_num_batched_tokens=64)
    first = bench.submit([1] * 10)
    alike = bench.submit([1] * 10, namespace=b"x")
    other = bench.submit([9] * 10)
    assert work(planned(bench)) == [(first, 0, 10), (alike, 0, 10), (other, 0, 10)]


def test_nobody_overtakes_a_request_that_has_waited_for_its_patience():
    bench = Bench(policy=CacheAware(patience=1), prefix_caching=True, max_num_seqs=1)
    cached(bench, [7] * 9)
    bench.submit([0] * 16, max_tokens=6)
    bench.step()
    patient = bench.submit([1] * 5)
    for _ in range(5):
        bench.step()
    cheap = bench.submit([*[7] * 8, 1])
    assert [item[0] for item in work(planned(bench))] == [patient]
    assert cheap in bench.scheduler.state.sequences


# -- shortest_first


def test_the_fewest_tokens_to_compute_start_first():
    bench = Bench(policy=ShortestFirst(), prefix_caching=True, max_num_batched_tokens=64)
    cached(bench, [7] * 17)
    long = bench.submit([1] * 12)
    short = bench.submit([2] * 4)
    known = bench.submit([*[7] * 16, 8])
    assert [item[0] for item in work(planned(bench))] == [known, short, long]


def test_the_shortest_of_all_that_wait_starts_first_however_late_it_came():
    bench = Bench(policy=ShortestFirst(lookups=1), max_num_batched_tokens=64)
    for _ in range(100):
        bench.submit(9)
    late = bench.submit(1)
    assert work(planned(bench))[0] == (late, 0, 1)
