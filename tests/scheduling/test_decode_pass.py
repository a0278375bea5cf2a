"""When steps are passed at once, and what that leaves behind."""

from __future__ import annotations

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
    count = steps.num_before_next_start(steps.pages_taken(6))
    assert count == 6
    steps.take(count, [7], [0.1] * count, 1.0)
    bench.scheduler.sanity_check()
    assert bench.scheduler.books.stopped_at is bench.waiting[0]
    assert bench.running[0].num_known == 11 + count
