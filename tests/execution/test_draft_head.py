"""A head that would draw what the model draws: all its guesses are right, wherever its pages and
the states that it reads come from."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.execution.guessing import Guessing
from aioserve.testing import expected_tokens
from tests.doubles.draft_head import EntryHead, HeadOfEntries
from tests.execution.test_draft_model import PROMPT, check_all_right, run
from tests.scheduling.bench import Bench


def bench_of(
    head: HeadOfEntries, *, most_tokens: int = 1000, num_pages: int = 64, **options: Any
) -> Bench:
    bench = Bench(num_pages=num_pages, **options)
    drafter = EntryHead(head, bench.device, num_pages=num_pages, most_tokens=most_tokens)
    bench.device._guessing = Guessing(drafter, drafter)
    return bench


@pytest.mark.parametrize("depth", [1, 2])
def test_all_guesses_of_a_head_that_knows_are_right(depth: int) -> None:
    bench = bench_of(HeadOfEntries())
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    assert check_all_right(bench) >= 30


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrong_guess_is_forgotten(depth: int) -> None:
    head = HeadOfEntries()
    head.wrong_at = frozenset([len(PROMPT) + 2])
    bench = bench_of(head)
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    counters = bench.scheduler.counters
    # The second of four, and those that were made behind it.
    assert sum(counters.drafted) - sum(counters.accepted) == 3
    assert sum(counters.accepted) >= 25


def test_states_of_a_prefix_that_was_computed_without_guesses_are_there() -> None:
    prompt = [*range(30)]
    bench = bench_of(HeadOfEntries(), prefix_caching=True)
    bench.submit(prompt, max_tokens=9)
    run(bench, 1)
    bench.submit([*prompt, *expected_tokens(prompt, 9), 5], max_tokens=20, max_draft_tokens=4)
    run(bench, 1)
    assert bench.scheduler.counters.tokens_cached >= 30
    assert check_all_right(bench) >= 12


def test_a_context_that_is_longer_than_the_heads_goes_on_without_guesses() -> None:
    bench = bench_of(HeadOfEntries(max_model_len=20))
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, 1).values()] == [expected_tokens(PROMPT, 40)]
    assert 8 <= check_all_right(bench) <= 20 - len(PROMPT)


def test_a_prompt_of_one_token_has_guesses_behind_the_first() -> None:
    bench = bench_of(HeadOfEntries())
    bench.submit([7], max_tokens=20, max_draft_tokens=3)
    assert [*run(bench, 1).values()] == [expected_tokens([7], 20)]
    assert check_all_right(bench) >= 10


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    prompts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
    lengths=st.lists(st.tuples(st.integers(1, 24), st.integers(0, 6), st.integers(1, 2))),
    num_pages=st.integers(18, 64),
    page_size=st.sampled_from([1, 2, 4]),
    windows=st.booleans(),
    prefix_caching=st.booleans(),
    preemption=st.sampled_from(["recompute", "swap"]),
    most_tokens=st.sampled_from([3, 1000]),
    depth=st.integers(1, 2),
)
def test_a_head_that_knows_is_always_right(
    seed: int,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[tuple[int, int, int]],
    num_pages: int,
    page_size: int,
    windows: bool,
    prefix_caching: bool,
    preemption: str,
    most_tokens: int,
    depth: int,
) -> None:
    """With prefix hits, forks, preemptions, states from the host, windows, and slots and pages that
    are used again."""
    source = random.Random(seed)
    groups: dict[str, Any] = {"num_window_groups": 1, "window": 5} if windows else {}
    bench = bench_of(
        HeadOfEntries(),
        most_tokens=most_tokens,
        num_pages=num_pages * (1 + windows),
        num_host_pages=16 if preemption == "swap" else 0,
        page_size=page_size,
        prefix_caching=prefix_caching,
        preemption=preemption,
        **groups,
    )
    fits = bench.memory.capacity_tokens
    expected: dict[int, list[int]] = {}
    tokens: dict[int, list[int]] = {}
    for prompt, (max_tokens, limit, n) in zip(prompts, lengths, strict=False):
        count = min(max_tokens, fits - len(prompt))
        if count < 1:
            continue
        ids = bench.submit_all(prompt, count, n=n, max_draft_tokens=limit)
        expected |= {i: expected_tokens(prompt, count, seed) for seed, i in enumerate(ids)}
        if source.random() < 0.3:
            tokens |= run(bench, depth, source)
    tokens |= run(bench, depth, source)
    assert tokens == expected
    check_all_right(bench)
