"""A draft model that would draw what the model draws: all its draft tokens are right.

That holds wherever its pages come from.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve.drafting.model import ModelDrafter
from aioserve.errors import ConfigError, InvariantError
from aioserve.execution.speculation.drafts.computed_drafter import DraftOptions
from aioserve.execution.speculation.drafts.draft_model import DraftModel
from aioserve.execution.speculation.resolver import Resolver
from aioserve.kv.groups import making
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.view import RequestView, SchedulerView
from aioserve.steps.plan import StepPlan
from aioserve.testing import expected_tokens
from tests.doubles.draft_decoder import DraftDecoder, TokenPages
from tests.doubles.dropped_entries import DroppingGroup
from tests.scheduling.bench import Bench
from tests.tiers import examples

PROMPT = [7, 1, 8, 2, 8, 1]


def bench_of(
    decoder: DraftDecoder,
    *,
    most_tokens: int = 1000,
    num_pages: int = 64,
    draft_end_ids: Sequence[int] = (),
    **options: Any,
) -> Bench:
    bench = Bench(num_pages=num_pages, **options)
    drafter = DraftModel(
        cast(Any, decoder),
        cast(Any, TokenPages(num_pages, bench.device.page_size)),
        DraftOptions(
            num_slots=bench.device.num_slots,
            num_groups=bench.device.num_groups,
            max_model_len=decoder.max_model_len,
            max_sequences=bench.device.num_slots,
            max_draft_tokens=most_tokens,
            most_tokens=most_tokens,
            end_ids=draft_end_ids,
        ),
    )
    bench.device._resolver = Resolver(drafter, drafter)
    return bench


def run(bench: Bench, depth: int, source: random.Random | None = None) -> dict[int, list[int]]:
    """Keep `depth` steps in flight until nothing is left; return the tokens of every sequence.

    `source` chooses preempted sequences at random.
    """
    flying: deque[StepPlan] = deque()
    tokens: dict[int, list[int]] = {}
    state = bench.scheduler.state
    while flying or bench.sequences:
        if source is not None and state.running and source.random() < 0.05:
            state.preempt(source.choice(state.running), state.launched + 1)
        plan = bench.scheduler.plan(0.0) if len(flying) < depth else None
        bench.scheduler.sanity_check()
        if plan is not None:
            bench.page_tables.take(plan)
            flying.append(plan)
            continue
        for update in bench.commit(flying.popleft()):
            if update.token_id is not None:
                tokens.setdefault(update.sequence_id, []).append(update.token_id)
    return tokens


def check_all_right(bench: Bench) -> int:
    """Check that no draft token was wrong; return their number."""
    counters = bench.scheduler.counters
    assert counters.accepted == counters.drafted
    return sum(counters.drafted)


@pytest.mark.parametrize("depth", [1, 2])
def test_all_drafts_of_the_model_itself_are_right(depth: int) -> None:
    bench = bench_of(DraftDecoder())
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    assert check_all_right(bench) >= 30


@pytest.mark.parametrize("depth", [1, 2])
def test_a_wrong_draft_is_forgotten(depth: int) -> None:
    decoder = DraftDecoder()
    decoder.wrong_at = frozenset([len(PROMPT) + 2])
    bench = bench_of(decoder)
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    counters = bench.scheduler.counters
    assert sum(counters.drafted) >= 30
    # The second of four, and those that follow it.
    assert sum(counters.drafted) - sum(counters.accepted) == 3


def test_a_prefix_that_was_computed_without_drafts_is_no_hole() -> None:
    prompt = [*range(30)]
    bench = bench_of(DraftDecoder(), prefix_caching=True)
    bench.submit(prompt, max_tokens=9)
    run(bench, 1)
    assert not check_all_right(bench)
    bench.submit([*prompt, *expected_tokens(prompt, 9), 5], max_tokens=20, max_draft_tokens=4)
    run(bench, 1)
    assert bench.scheduler.counters.tokens_cached >= 30
    assert check_all_right(bench) >= 12


def test_what_is_shared_is_computed_once() -> None:
    prompt, decoder = [*range(40)], DraftDecoder()
    bench = bench_of(decoder, prefix_caching=True)
    bench.submit(prompt, max_tokens=9, max_draft_tokens=4)
    run(bench, 1)
    assert decoder.most_at_once == len(prompt) + 1
    decoder.most_at_once = 0
    bench.submit([*prompt[:39], 5, 6], max_tokens=9, max_draft_tokens=4)
    run(bench, 1)
    assert bench.scheduler.counters.tokens_cached == 39  # three of them in a copied page
    assert check_all_right(bench)
    assert decoder.most_at_once == 3


class Seldom(SchedulingPolicy):
    """Allows draft tokens once every few steps. The drafter hears late how they fared."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.asked = 0

    def draft(self, request: RequestView, limit: int, view: SchedulerView) -> int:
        self.asked += 1
        return 0 if self.asked % self.steps else limit


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_an_answer_that_was_computed_without_drafts_is_no_hole(
    page_size: int, depth: int, steps: int
) -> None:
    """Its pages replace those that draft tokens were written to."""
    policy = Seldom(steps)
    bench = bench_of(DraftDecoder(), prefix_caching=True, page_size=page_size, policy=policy)
    for limit in (0, 4):
        bench.submit(PROMPT, max_tokens=40, max_draft_tokens=limit)
        assert [*run(bench, depth).values()] == [expected_tokens(PROMPT, 40)]
    assert check_all_right(bench) >= 10


def test_a_long_prompt_is_caught_up_with_piece_by_piece() -> None:
    decoder = DraftDecoder()
    bench = bench_of(decoder, most_tokens=10)
    for first in (0, 100):
        prompt = [*range(first, first + 35)]
        bench.submit(prompt, max_tokens=60, max_draft_tokens=4)
    run(bench, 1)
    assert check_all_right(bench) >= 40
    assert decoder.most_at_once == 10


def test_nothing_is_drafted_behind_an_end() -> None:
    tokens = expected_tokens(PROMPT, 9)
    bench = bench_of(DraftDecoder(), draft_end_ids=tokens[8:])
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=6, end_ids=frozenset(tokens[8:]))
    assert [*run(bench, 1).values()] == [tokens]
    counters = bench.scheduler.counters
    # The end is a draft token, too. It is right, and nothing is drafted after it.
    assert (counters.drafted, counters.accepted) == ([2, *[1] * 5], [1] * 6)


def test_nothing_is_drafted_once_the_end_is_known() -> None:
    """A step in flight when the end came is an example."""
    tokens = expected_tokens(PROMPT, 9)
    bench = bench_of(DraftDecoder(), draft_end_ids=tokens)
    bench.submit(PROMPT, max_tokens=9, max_draft_tokens=6)
    assert [*run(bench, 1).values()] == [tokens]
    assert not any(bench.scheduler.counters.drafted)


def test_a_context_that_is_longer_than_the_drafts_goes_on_without_drafts() -> None:
    bench = bench_of(DraftDecoder(max_model_len=20))
    bench.submit(PROMPT, max_tokens=40, max_draft_tokens=4)
    assert [*run(bench, 1).values()] == [expected_tokens(PROMPT, 40)]
    assert 8 <= check_all_right(bench) <= 20 - len(PROMPT)


def test_a_row_that_nothing_can_be_drawn_from_ends_the_drafts_of_its_slot() -> None:
    decoder = DraftDecoder()
    decoder.rows_without_token = frozenset([0])
    bench = bench_of(decoder)
    for prompt in (PROMPT, [3, *PROMPT]):
        bench.submit(prompt, max_tokens=12, max_draft_tokens=4)
    tokens = run(bench, 1)
    assert [*tokens.values()] == [expected_tokens(p, 12) for p in (PROMPT, [3, *PROMPT])]
    assert check_all_right(bench)


TRAFFIC: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**32),
    "prompts": st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8
    ),
    "lengths": st.lists(st.tuples(st.integers(1, 24), st.integers(0, 6), st.integers(1, 2))),
    "num_pages": st.integers(18, 64),
    "page_size": st.sampled_from([1, 2, 4]),
    "windows": st.booleans(),
    "prefix_caching": st.booleans(),
    "preemption": st.sampled_from(["recompute", "swap"]),
    "most_tokens": st.sampled_from([3, 1000]),
    "depth": st.integers(1, 2),
}


def check_always_right(
    make: Callable[..., Bench],
    *,
    seed: int,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[tuple[int, int, int]],
    num_pages: int,
    windows: bool,
    preemption: str,
    depth: int,
    **options: Any,
) -> None:
    """Check that a perfect drafter is always right, in a bench with the rest of `TRAFFIC`.

    Covers prefix hits, forks, preemptions, pages from the host, windows, and reused slots and
    pages.
    """
    source = random.Random(seed)
    groups: dict[str, Any] = {"num_window_groups": 1, "window": 5} if windows else {}
    bench = make(
        num_pages=num_pages * (1 + windows),
        num_host_pages=16 if preemption == "swap" else 0,
        preemption=preemption,
        **options,
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


@settings(max_examples=examples(200))
@given(**TRAFFIC)
def test_the_model_itself_is_always_right(**traffic: Any) -> None:
    check_always_right(partial(bench_of, DraftDecoder()), **traffic)


def test_a_drafter_whose_model_nobody_loaded_says_so() -> None:
    drafter = ModelDrafter(path="small")
    with pytest.raises(InvariantError, match="no engine has loaded the draft model 'small'"):
        drafter.draft(0, 1)
    with pytest.raises(ConfigError, match="path must be a str of 1 to 4096 characters, got ''"):
        ModelDrafter(path="")
    with pytest.raises(ConfigError, match=r"quantization must be one of .*, got 'int3'"):
        ModelDrafter(quantization=cast(Any, "int3"))


def test_a_slot_that_lost_entries_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(making.KINDS, "full", DroppingGroup)
    bench = bench_of(DraftDecoder())
    bench.submit(3 * PROMPT, max_tokens=9, max_draft_tokens=2)
    with pytest.raises(InvariantError, match="slot 0 goes on from position 16 at index 12"):
        run(bench, 1)
