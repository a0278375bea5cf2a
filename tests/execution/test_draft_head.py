"""A head that would draw what the model draws: all its draft tokens are right.

That holds wherever its pages, and the states that it reads, come from.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings

from aioserve.execution.speculation.resolver import Resolver
from aioserve.testing import expected_tokens
from tests.doubles.draft_head import EntryHead, HeadOfEntries
from tests.execution.test_draft_model import (
    PROMPT,
    TRAFFIC,
    check_all_right,
    check_always_right,
    run,
)
from tests.scheduling.bench import Bench
from tests.tiers import examples


def bench_of(
    head: HeadOfEntries, *, most_tokens: int = 1000, num_pages: int = 64, **options: Any
) -> Bench:
    bench = Bench(num_pages=num_pages, **options)
    drafter = EntryHead(head, bench.device, num_pages=num_pages, most_tokens=most_tokens)
    bench.device._resolver = Resolver(drafter, drafter)
    return bench


@pytest.mark.parametrize("depth", [1, 2])
def test_all_drafts_of_a_head_that_knows_are_right(depth: int) -> None:
    bench = bench_of(HeadOfEntries())
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    assert check_all_right(bench) >= 30


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrong_draft_is_forgotten(depth: int) -> None:
    head = HeadOfEntries()
    head.wrong_at = frozenset([len(PROMPT) + 2])
    bench = bench_of(head)
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    counters = bench.scheduler.counters
    # The second of four, and those that follow it.
    assert sum(counters.drafted) - sum(counters.accepted) == 3
    assert sum(counters.accepted) >= 25


def test_states_of_a_prefix_that_was_computed_without_drafts_are_there() -> None:
    prompt = [*range(30)]
    bench = bench_of(HeadOfEntries(), prefix_caching=True)
    bench.submit(prompt, max_tokens=9)
    run(bench, 1)
    bench.submit([*prompt, *expected_tokens(prompt, 9), 5], max_tokens=20, max_draft_tokens=4)
    run(bench, 1)
    assert bench.scheduler.counters.tokens_cached >= 30
    assert check_all_right(bench) >= 12


def test_a_context_that_is_longer_than_the_heads_goes_on_without_drafts() -> None:
    bench = bench_of(HeadOfEntries(max_model_len=20))
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, 1).values()] == [expected_tokens(PROMPT, 40)]
    assert 8 <= check_all_right(bench) <= 20 - len(PROMPT)


def test_a_prompt_of_one_token_has_drafts_behind_the_first() -> None:
    bench = bench_of(HeadOfEntries())
    bench.submit([7], max_tokens=20, max_draft_tokens=3)
    assert [*run(bench, 1).values()] == [expected_tokens([7], 20)]
    assert check_all_right(bench) >= 10


@settings(max_examples=examples(200))
@given(**TRAFFIC)
def test_a_head_that_knows_is_always_right(**traffic: Any) -> None:
    check_always_right(partial(bench_of, HeadOfEntries()), **traffic)
