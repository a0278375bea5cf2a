"""Steps passed at once: when they are, and the state that they leave."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import RequestView, SchedulerView, SchedulingPolicy
from aioserve.scheduling.scheduler import Scheduler
from aioserve.simulation.decode_pass import decode_pass
from aioserve.simulation.fast_forward import _within_pages
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench
from tests.tiers import examples

PROMPT = [*range(100, 109)]
LATER = [*PROMPT, *expected_tokens(PROMPT, 12), 7]
"""Begins with the answer to `PROMPT`."""
OTHER = [*LATER[:10], *range(200, 212)]


def with_one_waiting(prompt: list[int], namespace: bytes = b"") -> Bench:
    """Somebody decodes, and the next one, of that prompt, finds too few pages."""
    bench = Bench(num_pages=6, prefix_caching=True)
    bench.submit(PROMPT, 11)
    bench.step()
    bench.submit(prompt, 2, namespace=namespace)
    bench.step()
    return bench


def test_nothing_is_passed_while_the_next_one_may_come_to_find_what_is_written() -> None:
    assert decode_pass(with_one_waiting(LATER).scheduler) is None


@pytest.mark.parametrize(("prompt", "namespace"), [(OTHER, b""), (LATER, b"other")])
def test_steps_are_passed_while_the_next_one_can_only_find_what_it_would_now(
    prompt: list[int], namespace: bytes
) -> None:
    bench = with_one_waiting(prompt, namespace)
    steps = decode_pass(bench.scheduler)
    assert steps is not None
    count = steps.num_before_next_start(steps.pages_less(6))
    assert count == 6
    steps.take(count, [7], [0.1] * count, [1.0] * count, {})
    bench.scheduler.sanity_check()
    assert bench.scheduler.state.stopped_at is bench.waiting[0]
    assert bench.running[0].num_known == 11 + count


def with_a_prompt_in_flight(**options: Any) -> Bench:
    bench = Bench()
    bench.submit_all(PROMPT[:8], 11, **options)
    bench.plan()
    return bench


def test_steps_are_passed_behind_the_one_that_begins_an_answer() -> None:
    bench = with_a_prompt_in_flight()
    steps = decode_pass(bench.scheduler)
    assert steps is not None
    steps.take(3, [7], [0.1] * 3, [1.0, 2.0, 3.0], {})
    bench.scheduler.sanity_check()
    (sequence,) = bench.running
    assert sequence.ids(8, 3).tolist() == [7, 7, 7]
    assert (sequence.first_token_seconds, sequence.last_token_seconds) == (1.0, 3.0)


@pytest.mark.parametrize("count", range(1, 9))
def test_proven_are_the_pages_of_the_steps_that_are_done(count: int) -> None:
    bench = with_a_prompt_in_flight()
    steps = decode_pass(bench.scheduler)
    assert steps is not None
    steps.take(count, [7], [0.1] * count, [1.0] * count, {})
    (sequence,) = bench.running
    pages = -(-(7 + count) // 4)
    assert sequence.proven_pages.tolist() == sequence.lease.page_ids[:pages].tolist()
    assert sequence.lease.num_pages == -(-(8 + count) // 4)


@pytest.mark.parametrize(
    "options",
    [{"n": 2}, {"score_from": 1}, {"pooled": range(8)}, {"answers": False}],
    ids=["samples", "scores", "sums", "no answer"],
)
def test_nothing_is_passed_behind_a_prompt_that_brings_more_than_one_token(
    options: dict[str, Any],
) -> None:
    assert decode_pass(with_a_prompt_in_flight(**options).scheduler) is None


def test_those_that_the_last_step_ends_are_gone() -> None:
    bench = Bench()
    goes_on = bench.submit(PROMPT[:5], 11)
    ends = bench.submit(PROMPT[:5], 11, end_ids=frozenset([3]))
    bench.plan()
    steps = decode_pass(bench.scheduler)
    assert steps is not None
    plan = steps.take(4, [7, 8], [0.1] * 4, [1.0, 2.0, 3.0, 4.0], {ends: 3})
    bench.scheduler.sanity_check()
    assert plan is not None
    assert [item.sequence_id for item in plan.items] == [goes_on, ends]
    assert list(bench.sequences) == [goes_on]
    assert bench.sequences[goes_on].ids(5, 4).tolist() == [7] * 4


def after(
    lengths: list[tuple[int, int]], num_steps: int, page_size: int, num_pages: int
) -> tuple[Bench, deque[StepPlan]]:
    """Requests of such prompts and longest answers, so many steps later, with the last in flight.
    Each sequence is made of its own token."""
    bench = Bench(
        num_pages=num_pages, page_size=page_size, prefix_caching=True, max_num_batched_tokens=64
    )
    for place, (prompt, answer) in enumerate(lengths):
        bench.submit([100 + place] * prompt, answer)
    in_flight = deque[StepPlan]()
    go_on(bench.scheduler, in_flight, num_steps)
    return bench, in_flight


def go_on(scheduler: Scheduler, in_flight: deque[StepPlan], num_steps: int) -> None:
    for _ in range(num_steps):
        plan = scheduler.plan(0.0)
        if plan is not None:
            in_flight.append(plan)
        if in_flight and (plan is None or len(in_flight) > 1):
            done = in_flight.popleft()
            tokens = tuple(99 + item.sequence_id for item in done.items for _ in item.rows)
            scheduler.state.times.record(done, 0.1)
            scheduler.commit(done, StepOutcome(step=done.step, token_ids=tokens), float(done.step))


def shown(scheduler: Scheduler) -> list[Any]:
    state, memory = scheduler.state, scheduler.memory
    assert memory.tree is not None
    done, nodes = memory.pool.done_step, memory.tree.walk()
    # There are fewer ticks, in the same order; those of locked paths are to come.
    created = sorted({node.created for node in nodes})
    used = sorted({node.last_used for node in nodes if not node.num_locks})
    return [
        [
            (
                s.known_ids.tolist(),
                (s.pending, s.first_token_seconds, s.last_token_seconds, len(s.proven_pages)),
                (s.lease.computed, s.lease.published, s.lease.last_step, s.lease.num_pages),
            )
            for s in state.running
        ],
        [s.sequence_id for s in state.waiting],
        (state.counters, state.launched, done, scheduler.state.times.recent),
        (memory.pool.num_free, memory.pool.num_fenced, memory.num_cached),
        [
            (
                node.token_ids,
                [max(done, step) for step in node.written_steps],
                created.index(node.created),
                node.num_locks or used.index(node.last_used),
            )
            for node in nodes
        ],
    ]


@settings(deadline=None, max_examples=examples(100))
@given(
    st.lists(st.tuples(st.integers(1, 14), st.integers(5, 30)), min_size=3, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.integers(48, 60),
    st.integers(1, 7),
)
def test_what_is_left_behind_is_what_steps_one_by_one_would_leave(
    lengths: list[tuple[int, int]], page_size: int, num_tokens: int, most: int
) -> None:
    options = page_size, num_tokens // page_size
    walk, flying = after(lengths, 3, *options)
    for num_steps in range(3, 50):
        seen = decode_pass(walk.scheduler)
        go_on(walk.scheduler, flying, 1)
        if seen is None or not seen.num_flying or not (seen.late or num_steps % 16 == 0):
            continue
        bench, _ = after(lengths, num_steps, *options)
        scheduler, steps = bench.scheduler, decode_pass(bench.scheduler)
        assert steps is not None
        left = [s.max_length - 1 - s.num_known + (s in steps.late) for s in steps.sequences]
        count = min(most, *left)
        if count > 0:
            count, _ = _within_pages(scheduler, steps, count)
        if count < 1:
            continue
        first = steps.first_step - 1
        own = [99 + s.sequence_id for s in steps.sequences]
        ends = [float(step) for step in range(first, first + count)]
        steps.take(count, own, [0.1] * count, ends, {})
        scheduler.sanity_check()
        slow, in_flight = after(lengths, num_steps, *options)
        go_on(slow.scheduler, in_flight, count)
        assert shown(scheduler) == shown(slow.scheduler)


class Slow(SchedulingPolicy):
    """Computes a token of the first request's prompt in each step."""

    def chunk(self, request: RequestView, budget_tokens: int, view: SchedulerView) -> int:
        return 1 if request.arrival_index == 1 else budget_tokens


def with_one_late_behind_its_prompt() -> tuple[Bench, deque[StepPlan]]:
    """Return a bench in which two requests share the pages of the second one's prompt, and its
    steps in flight.

    The first shares them while the end of its own prompt is in flight. The last does so too, and
    had no page for the step in flight. Both continue in pages of their own.
    """
    bench = Bench(policy=Slow(), num_pages=10, prefix_caching=True, max_num_batched_tokens=64)
    for token_id, answer in ((7, 30), (7, 30), (5, 7)):
        bench.submit([token_id] * 8, answer)
    in_flight = deque[StepPlan]()
    go_on(bench.scheduler, in_flight, 6)
    bench.submit([7] * 8, 30)
    go_on(bench.scheduler, in_flight, 2)
    return bench, in_flight


@pytest.mark.parametrize("count", range(1, 9))
def test_one_that_is_late_begins_its_run_as_late_as_it_would_step_by_step(count: int) -> None:
    bench, _ = with_one_late_behind_its_prompt()
    steps = decode_pass(bench.scheduler)
    assert steps is not None
    assert [s.sequence_id for s in steps.late] == [4]
    count, _ = _within_pages(bench.scheduler, steps, count)
    own = [99 + s.sequence_id for s in steps.sequences]
    ends = [float(steps.first_step - 1 + place) for place in range(count)]
    steps.take(count, own, [0.1] * count, ends, {})
    slow, in_flight = with_one_late_behind_its_prompt()
    go_on(slow.scheduler, in_flight, count)
    assert shown(bench.scheduler) == shown(slow.scheduler)
