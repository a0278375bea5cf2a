"""KV memory that sequences share, copy, publish, lose and get back: one rule at a time."""

from __future__ import annotations

import pytest

from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import PagePool
from aioserve.kv.tiers.swapping import SWAP_FROM_TOKENS
from aioserve.kv.tiers.tier import DEVICE, HOST, Tier
from aioserve.paging.layout import group_specs
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.pages import PageCopy
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench, work


def cached(**options) -> Bench:
    return Bench(prefix_caching=True, **options)


def copies(plan, from_tier: int, to_tier: int) -> list[PageCopy]:
    return [c for c in plan.copies if (c.from_tier, c.to_tier) == (from_tier, to_tier)]


# -- prefixes


def test_requests_planned_in_one_step_share_the_prefix_that_none_has_computed():
    bench = cached(max_num_batched_tokens=64)
    a = bench.submit([*range(16), 100])
    b = bench.submit([*range(16), 101])

    plan = bench.plan()

    assert work(plan) == [(a, 0, 17), (b, 16, 1)]
    assert bench.pages[0][:4] == bench.pages[1][:4]
    bench.commit(plan)
    tokens = bench.run()
    assert tokens[b] == expected_tokens([*range(16), 101], 8)[1:]


def test_those_that_took_over_what_a_failed_step_should_have_written_begin_again():
    bench = cached(max_num_batched_tokens=17)
    a = bench.submit([*range(16), 100])
    b = bench.submit([*range(16), 101])
    first, second = bench.plan(), bench.plan()
    assert work(second) == [(a, 17, 1), (b, 16, 1)]

    (end,) = bench.fail(first)

    assert end.sequence_id == a
    assert bench.commit(second) == []
    assert work(bench.plan()) == [(b, 0, 17)]


def test_a_failed_step_is_not_found_by_those_that_come_after():
    bench = cached()
    bench.submit(12)
    bench.fail(bench.plan())
    b = bench.submit(12)

    assert work(bench.plan()) == [(b, 0, 12)]


def test_those_that_took_nothing_from_a_failed_step_go_on():
    bench = cached()
    bench.submit(12)
    bench.run()
    a = bench.submit(range(50, 66))
    first = bench.plan()
    b, *children = bench.submit_all([*range(8), 99, 98], n=3)
    second = bench.plan()
    assert work(second)[:2] == [(a, 16, 1), (b, 8, 2)]

    ended = [entry.sequence_id for entry in bench.fail(first)]

    assert ended == [a]
    assert [p.sequence_id for p in bench.commit(second)] == [b, *children]


def test_a_page_that_a_failed_step_should_have_begun_is_not_found_when_a_later_one_completes_it():
    bench = cached(max_num_batched_tokens=2)
    bench.submit(12)
    first, second = bench.plan(), bench.plan()
    bench.fail(first)
    bench.commit(second)
    b = bench.submit(12)

    assert work(bench.plan()) == [(b, 0, 2)]


def test_a_copy_to_the_host_that_a_failed_step_should_have_made_is_not_found():
    bench = cached(num_pages=4, num_host_pages=8)
    bench.submit(12, 2)
    bench.run()
    bench.submit(range(50, 62), 2)
    plan = bench.plan()
    assert copies(plan, 0, 1)
    bench.fail(plan)

    assert bench.tree.num_pages_in(1) == 0


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_second_identical_request_computes_one_token(page_size):
    bench = cached(page_size=page_size)
    bench.submit(16)
    bench.run()
    b = bench.submit(16)

    plan = bench.plan()

    assert work(plan) == [(b, 15, 1)]
    assert bench.scheduler.counters.tokens_cached == 15
    bench.commit(plan)
    bench.run()


def test_a_prompt_that_differs_within_a_page_copies_the_part_that_agrees():
    bench = cached()
    bench.submit(12)
    bench.run()
    b = bench.submit([*range(10), 99, 98])

    plan = bench.plan()

    assert work(plan) == [(b, 10, 2)]
    (copy,) = plan.copies
    assert (copy.from_tier, copy.to_tier, copy.num_tokens) == (0, 0, 2)
    assert copy.target == bench.pages[0][2]
    bench.commit(plan)
    assert bench.run()[b] == expected_tokens([*range(10), 99, 98], 8)[1:]


def test_partial_pages_are_computed_again_where_their_reuse_is_off():
    bench = cached(partial_page_reuse=False)
    bench.submit(12)
    bench.run()
    b = bench.submit([*range(10), 99, 98])

    plan = bench.plan()

    assert (work(plan), plan.copies) == ([(b, 8, 4)], ())


def test_the_page_that_is_copied_in_part_may_be_needed_for_the_copy_itself():
    bench = cached(num_pages=3)
    bench.submit(11, 1)
    bench.run()
    b = bench.submit([*range(7), 99, 98, 97], 2)

    plan = bench.plan()  # three pages needed: one found, none to spare for a part

    assert work(plan) == [(b, 4, 6)]
    bench.commit(plan)
    assert bench.run()[b] == expected_tokens([*range(7), 99, 98, 97], 2)[1:]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_answer_is_found_by_the_next_turn(depth):
    bench = cached()
    pipeline = StepPipeline(bench.scheduler, bench.device.execute, depth=depth)
    bench.submit(10, 10)
    answer = []
    while bench.sequences:
        pipeline.advance(0.0)
        if (outcome := pipeline.due) is not None:
            answer += [update.token_id for update in pipeline.finish(outcome, 0.0)]
    b = bench.submit([*range(10), *answer, 7, 7, 7])

    # Four full pages: the KV of the last token of a completion is never computed.
    assert work(bench.plan()) == [(b, 16, 7)]


def test_a_page_is_found_when_all_of_its_tokens_are_known_and_no_step_before():
    bench = cached()
    a = bench.submit(6)
    first = bench.plan()  # brings token 6
    second = bench.plan()  # computes it, and brings token 7
    bench.commit(first)

    third = bench.plan()  # computes token 7, which the host doesn't know yet

    assert bench.sequences[a].lease.computed == 8
    assert bench.view(a).computed_tokens == 7
    assert bench.tree.num_pages == 1
    bench.commit(second)
    bench.plan()
    assert bench.tree.num_pages == 2
    bench.commit(third)


def test_a_duplicate_of_a_cached_page_is_given_up_for_it_after_its_step():
    bench = cached(num_pages=5)
    bench.submit(12, 1)
    bench.run()
    b = bench.submit(12, 4)

    first = bench.plan()
    (pages,) = bench.pages

    # Its last prompt token is computed in a page of its own, which the tree has already.
    assert work(first) == [(b, 11, 1)]
    assert (bench.pool.num_free, bench.pool.num_fenced) == (1, 1)
    second = bench.plan()
    assert bench.pages[0][2] != pages[2]
    bench.commit(first)
    bench.commit(second)
    bench.run()


def test_whoever_gave_up_a_duplicate_for_what_a_failed_step_writes_begins_again():
    class Alternating(SchedulingPolicy):
        def chunk(self, request, budget_tokens, view):
            return 4 if request.arrival_index % 2 == view.step % 2 else 0

    bench = cached(policy=Alternating())
    a, b = bench.submit(13), bench.submit(13)
    bench.step()
    second, third = bench.plan(), bench.plan()
    assert (work(second), work(third)) == ([(a, 4, 4)], [(b, 4, 4)])

    (ended,) = bench.fail(second)

    assert ended.sequence_id == a
    assert bench.commit(third) == []
    assert bench.scheduler.num_waiting == 1
    assert bench.run()[b] == expected_tokens(range(13), 8)


def test_tenants_share_nothing():
    bench = cached()
    bench.submit(12, namespace=b"a")
    bench.run()
    b = bench.submit(12, namespace=b"b")

    assert work(bench.plan()) == [(b, 0, 12)]


def test_nobody_finds_what_a_sequence_computed_whose_logits_were_not_numbers():
    bench = cached()
    bench.submit(12)
    plan = bench.plan()
    outcome = bench.device.execute(plan)
    bench.scheduler.commit(
        plan, StepOutcome(step=0, token_ids=outcome.token_ids, row_errors={0: "NaN"}), 0.0
    )
    b = bench.submit(12)

    assert work(bench.plan()) == [(b, 0, 12)]


def commit_with_a_bad_row(bench: Bench, plan, row: int):
    outcome = bench.device.execute(plan)
    outcome = StepOutcome(step=plan.step, token_ids=outcome.token_ids, row_errors={row: "NaN"})
    progress = bench.scheduler.commit(plan, outcome, 0.0)
    bench.scheduler.sanity_check()
    return progress


def test_whoever_took_over_what_may_not_be_numbers_begins_again():
    bench = cached(max_num_batched_tokens=24)
    a = bench.submit([*range(16), 100])
    b = bench.submit([*range(16), *range(200, 220)])
    plan = bench.plan()
    assert work(plan) == [(a, 0, 17), (b, 16, 7)]

    (end,) = commit_with_a_bad_row(bench, plan, 0)

    assert (end.sequence_id, end.error) == (a, "NaN")
    assert work(bench.plan()) == [(b, 0, 24)]


def test_whoever_sampled_a_token_over_shared_pages_has_shown_that_they_are_good():
    bench = cached(max_num_batched_tokens=64)
    a = bench.submit([*range(16), 100])
    b = bench.submit([*range(16), 101])
    plan = bench.plan()

    progress = commit_with_a_bad_row(bench, plan, 0)

    assert {p.sequence_id: p.error for p in progress} == {a: "NaN", b: None}
    assert work(bench.plan()) == [(b, 17, 1)]
    c = bench.submit([*range(16), 102])
    assert (c, 16, 1) in work(bench.plan())


def test_whoever_copied_a_part_of_what_may_not_be_numbers_begins_again():
    bench = cached(max_num_batched_tokens=6)
    bench.submit(10)
    bench.step()
    x = bench.submit([0, 1, 99, 98, *range(50, 60)])
    plan = bench.plan()
    assert work(plan)[1] == (x, 2, 2)

    commit_with_a_bad_row(bench, plan, 0)

    assert bench.tree.num_pages == 0
    assert work(bench.plan()) == [(x, 0, 6)]


@pytest.mark.parametrize("end", ["cancelled", "preempted"])
def test_nobody_finds_a_bad_row_of_which_nobody_is_told(end):
    bench = cached()
    a = bench.submit(9)
    plan = bench.plan()
    if end == "cancelled":
        bench.scheduler.finish(a)
    else:
        bench.scheduler.state.preempt(bench.sequences[a], plan.step + 1)

    assert commit_with_a_bad_row(bench, plan, 0) == []

    bench.submit(9)
    assert work(bench.plan())[0][1] == 0


def test_bad_pages_that_were_found_in_the_cache_do_not_stay_there():
    bench = cached(max_num_batched_tokens=4)
    a = bench.submit(9)
    bench.step()
    bench.scheduler.finish(a)  # never sampled, so its page isn't known to be bad
    b = bench.submit(9)
    bench.step()
    assert commit_with_a_bad_row(bench, bench.plan(), 0) == []  # it may be the page's fault
    c = bench.submit(9)

    assert work(bench.plan()) == [(b, 0, 4)]
    bench.scheduler.finish(b)
    assert work(bench.plan()) == [(c, 0, 4)]


def test_cached_pages_are_evicted_for_those_that_run_and_those_that_start():
    bench = cached(num_pages=6)
    bench.submit(16, 4)
    bench.run()
    assert bench.pool.num_free == 2
    b = bench.submit(range(50, 66), 8)

    tokens = bench.run()

    assert tokens[b] == expected_tokens(range(50, 66), 8)


# -- several samples


def test_samples_of_a_prompt_begin_in_the_step_that_has_computed_it():
    bench = cached()
    a, b, c = bench.submit_all(18, n=3)
    assert work(bench.plan()) == [(a, 0, 16)]

    plan = bench.plan()

    assert work(plan) == [(a, 16, 2)]
    assert (plan.num_tokens, plan.num_sequences) == (2, 3)
    assert [row.offset for row in plan.items[0].rows] == [1, 1, 1]
    slots = [bench.sequences[s].slot for s in (a, b, c)]
    assert [row.slot for row in plan.items[0].rows] == slots


def test_a_shared_page_is_copied_before_the_first_write_by_all_but_the_last():
    bench = Bench()
    a, b, c = bench.submit_all(6, n=3)
    bench.step()

    plan = bench.plan()

    assert work(plan) == [(a, 6, 1), (b, 6, 1), (c, 6, 1)]
    assert [copy.num_tokens for copy in plan.copies] == [2, 2]
    assert len({table[0] for table in bench.pages}) == 1
    assert len({table[1] for table in bench.pages}) == 3
    bench.commit(plan)
    tokens = bench.run()
    for sample, sequence_id in enumerate((a, b, c)):
        assert tokens[sequence_id] == expected_tokens(range(6), 8, seed=sample)[2:]


def test_the_last_sample_that_shares_a_page_needs_none_for_itself():
    bench = Bench(num_pages=3)
    a, b = bench.submit_all(6, 2, n=2)
    bench.step()
    assert bench.pool.num_free == 1

    plan = bench.plan()

    assert (work(plan), plan.preempted) == ([(a, 6, 1), (b, 6, 1)], ())


def test_nothing_is_copied_where_the_prompt_fills_its_pages():
    bench = Bench()
    bench.submit_all(8, n=3)
    bench.step()

    assert bench.plan().copies == ()


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_eight_answers_to_a_long_prompt_take_memory_for_their_own_tokens_only(prefix_caching):
    bench = Bench(
        num_pages=400,
        page_size=16,
        prefix_caching=prefix_caching,
        max_num_batched_tokens=1000,
    )
    bench.submit_all(1000, 32, n=8)
    bench.step()
    assert bench.pool.num_held == 63
    for _ in range(31):
        bench.step()

    # 62 full pages are shared; each completion has its own from token 992 to 1031.
    assert bench.memory.usage().pages_copied_total == 7
    held = 62 + 8 * 3
    assert bench.pool.num_pages - bench.pool.num_free - bench.pool.num_fenced <= held


def test_ending_the_first_sample_before_the_prompt_is_computed_ends_them_all():
    bench = cached()
    a, *_ = bench.submit_all(18, n=3)
    bench.plan()

    bench.scheduler.finish(a)

    assert not bench.sequences


def test_an_unborn_sample_that_leaves_leaves_the_others():
    bench = cached()
    a, b, c = bench.submit_all(18, n=3)
    bench.step()

    bench.scheduler.finish(b)

    (item,) = bench.plan().items
    assert [row.slot for row in item.rows] == [bench.sequences[s].slot for s in (a, c)]


def test_samples_begin_only_when_all_of_them_have_a_seat():
    bench = Bench(max_num_seqs=4)
    a, b = bench.submit_all(4, n=2)
    bench.submit_all(4, n=3)

    (item,) = bench.plan().items
    assert [row.slot for row in item.rows] == [bench.sequences[s].slot for s in (a, b)]


def test_a_sample_that_has_just_begun_is_not_preempted_in_the_same_step():
    bench = Bench(num_pages=4, num_host_pages=4, preemption="swap", max_num_batched_tokens=64)
    a, b = bench.submit_all(6, n=2)
    bench.scheduler.pause(b)
    c = bench.submit(range(50, 60), 2)

    plan = bench.plan()

    assert (work(plan), plan.preempted) == ([(a, 0, 6)], ())
    assert plan.num_sequences == 2
    assert bench.commit(plan)
    assert bench.plan().preempted == (b,)
    assert c in bench.sequences


# -- preemption and the host


def preempt_the_younger(**options) -> tuple[Bench, int, int]:
    """Two sequences of 8 tokens fill 4 pages: the second yields, having computed 8."""
    bench = Bench(num_pages=4, **options)
    a, b = bench.submit(7, 9), bench.submit(range(50, 57), 9)
    bench.step()
    bench.step()
    plan = bench.plan()
    assert plan.preempted == (b,)
    bench.commit(plan)
    return bench, a, b


def restart_of(bench: Bench, sequence_id: int):
    while True:
        plan = bench.plan()
        for item in plan.items:
            if item.sequence_id == sequence_id:
                return plan, item
        bench.commit(plan)


def test_a_preempted_sequence_is_recomputed_where_there_is_no_host_pool():
    bench, _, b = preempt_the_younger()
    _, item = restart_of(bench, b)

    assert (item.start, item.count) == (0, 9)


def test_a_preempted_sequence_is_recomputed_where_that_is_chosen_beside_a_host_pool():
    bench, _, b = preempt_the_younger(num_host_pages=4, preemption="recompute")
    assert bench.memory.usage().pages_swapped_out_total == 0
    _, item = restart_of(bench, b)

    assert (item.start, item.count) == (0, 9)


def test_a_swapped_sequence_goes_on_where_it_was():
    bench, _, b = preempt_the_younger(num_host_pages=4, preemption="swap")
    assert bench.memory.usage().pages_swapped_out_total == 2
    plan, item = restart_of(bench, b)

    assert (item.start, item.count) == (8, 1)
    assert len(copies(plan, 1, 0)) == 2
    bench.commit(plan)
    bench.run()
    assert bench.host.num_held == 0


def test_a_sequence_is_recomputed_where_the_host_pool_is_too_small():
    bench, _, b = preempt_the_younger(num_host_pages=1, preemption="swap")
    _, item = restart_of(bench, b)

    assert (item.start, item.count) == (0, 9)


def test_a_swapped_sequence_that_is_cancelled_gives_its_host_pages_back():
    bench, _, b = preempt_the_younger(num_host_pages=4, preemption="swap")
    assert bench.host.num_held == 2

    bench.scheduler.finish(b)

    assert bench.host.num_held == 0


def test_host_pages_wait_for_the_step_that_writes_them():
    bench = Bench(num_pages=4, num_host_pages=4, preemption="swap")
    bench.submit(7, 9)
    b = bench.submit(range(50, 57), 9)
    bench.step()
    bench.step()
    plan = bench.plan()
    assert plan.preempted == (b,)

    bench.scheduler.finish(b)

    assert (bench.host.num_held, bench.host.num_fenced) == (0, 2)
    bench.commit(plan)
    assert bench.host.num_free == 4


def test_pages_swapped_out_by_a_failed_step_are_recomputed():
    bench = Bench(num_pages=4, num_host_pages=4, preemption="swap")
    bench.submit(7, 9)
    b = bench.submit(range(50, 57), 9)
    bench.step()
    bench.step()
    plan = bench.plan()
    assert plan.preempted == (b,)
    bench.fail(plan)

    assert bench.host.num_held == 0
    assert work(bench.plan()) == [(b, 0, 9)]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_page_completed_over_what_a_failed_step_should_have_swapped_is_forgotten(cancelled):
    bench = Bench(
        num_host_pages=4, preemption="swap", prefix_caching=True, max_num_seqs=1, num_pages=16
    )
    a = bench.submit(5)
    for _ in range(3):  # 7 tokens in 2 pages
        bench.step()
    tokens = expected_tokens(range(5), 3)
    bench.scheduler.pause(a)
    b = bench.submit([9, 9])
    swapping = bench.plan()
    assert [(copy.from_tier, copy.to_tier) for copy in swapping.copies] == [(0, 1)]
    bench.scheduler.finish(b)
    bench.scheduler.resume(a)
    # Takes its half page back from the host, and fills and publishes it.
    over = bench.plan()
    assert work(over) == [(a, 7, 1)]
    if cancelled:
        bench.scheduler.finish(a)
        a = bench.submit([*range(5), *tokens])
        expected = expected_tokens([*range(5), *tokens], 8)
    else:
        expected = expected_tokens(range(5), 8)[3:]

    bench.fail(swapping)
    bench.commit(over)

    assert bench.run()[a] == expected


@pytest.mark.parametrize(("prompt", "swapped"), [(SWAP_FROM_TOKENS - 9, 0), (SWAP_FROM_TOKENS, 1)])
def test_long_contexts_are_swapped_and_short_ones_recomputed(prompt, swapped):
    pages = 2 * (prompt // 4 + 1)
    bench = Bench(num_pages=pages, num_host_pages=pages, max_num_batched_tokens=2048)
    bench.submit(prompt, 12)
    bench.submit(range(1, prompt + 1), 12)
    while not bench.scheduler.counters.preemptions:
        bench.step()

    assert (bench.memory.usage().pages_swapped_out_total > 0) == bool(swapped)


def test_an_evicted_prefix_goes_to_the_host_and_comes_back_on_a_hit():
    bench = cached(num_pages=4, num_host_pages=8)
    bench.submit(12, 2)
    bench.run()
    bench.submit(range(50, 62), 2)
    bench.run()  # evicts
    assert bench.tree.num_pages_in(1) > 0
    c = bench.submit(12, 2)

    plan = bench.plan()

    assert copies(plan, 1, 0)
    assert work(plan)[0][1] >= 8
    bench.commit(plan)
    assert bench.run()[c] == expected_tokens(range(12), 2)[1:]


def test_what_is_still_being_written_does_not_go_to_the_host():
    bench = cached(num_pages=4, num_host_pages=4)
    a = bench.submit(8, 2)
    first = bench.plan()
    bench.scheduler.finish(a)
    bench.submit(range(50, 64), 2)
    assert bench.scheduler.plan(0.0) is None  # a's pages are evicted, and still fenced

    assert bench.tree.num_pages_in(1) == bench.tree.num_pages == 0
    bench.fail(first)
    bench.run()


def test_the_default_victim_is_the_one_that_loses_least():
    seen = {}

    class Recording(SchedulingPolicy):
        def victim(self, running, need_pages, view):
            seen.update({r.arrival_index: (r.reclaimable_pages, r.lost_tokens) for r in running})
            return super().victim(running, need_pages, view)

    bench = cached(num_pages=9, policy=Recording(), max_num_batched_tokens=64)
    prefix = range(100, 108)
    bench.submit(8, 8)
    b = bench.submit([*prefix, 1, 2, 3], 8)
    c = bench.submit([*prefix, 4, 5], 8)
    d = bench.submit([9] * 9, 8)
    bench.step()

    plan = bench.plan()

    # The two pages that b and c share would neither come back nor be lost.
    assert seen == {b: (1, 3), c: (1, 2), d: (3, 9)}
    assert plan.preempted == (c,)


def test_options_that_do_not_go_together_are_refused():
    with pytest.raises(ValueError, match="needs a second tier"):
        KVMemory.of((4,), 16, preemption="swap")
    with pytest.raises(ValueError, match="page_size of the first, 16, got 4 in tier host"):
        KVMemory([Tier(DEVICE, PagePool(4, 16)), Tier(HOST, PagePool(4, 4))])
    with pytest.raises(ValueError, match=r"must have 2 group pages .* got 0 in tier device"):
        KVMemory([Tier(DEVICE, PagePool(4, 16))], groups=group_specs(2, 5))
    with pytest.raises(ValueError, match="window must be at least 1 with num_window_groups"):
        group_specs(2, 0)
    with pytest.raises(ValueError, match="at most 2 tiers, got"):
        KVMemory.of((4, 4, 4), 16)
