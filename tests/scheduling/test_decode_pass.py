"""When steps are passed at once, and what that leaves behind."""

from __future__ import annotations

from typing import Any

import pytest

from aioserve.scheduling.decode_pass import decode_pass
from aioserve.testing.fake_device import expected_tokens
from tests.scheduling.bench import Bench

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
    assert bench.scheduler.books.stopped_at is bench.waiting[0]
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
