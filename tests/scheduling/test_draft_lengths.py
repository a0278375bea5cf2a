"""Numbers of draft tokens to verify: as many as bring the most tokens a second."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.scheduling.speculation.draft_lengths import (
    PROBE_LENGTH,
    PROBE_STEPS,
    DraftLengths,
    DraftRecord,
    StepCosts,
)


def lengths_with(seconds: dict[int, float]) -> DraftLengths:
    lengths = DraftLengths()
    for verified in (False, True):
        for num_tokens, one in seconds.items():
            for _ in range(2):
                lengths.record(num_tokens, one, verified=verified)
    return lengths


def record_of(limit: int, acceptance: float) -> DraftRecord:
    record = DraftRecord(limit)
    source = np.random.default_rng(5)
    for _ in range(200):
        record.verified(1, 1, int(source.random() < acceptance))
    return record


FREE = {1: 1.0, 512: 1.0}
"""A further row costs nothing."""
BY_ROW = {1: 1.0, 512: 512.0}
"""A further row costs as much as the first."""


def test_rows_that_cost_nothing_are_all_taken() -> None:
    records = [record_of(8, 0.5), record_of(3, 0.9), DraftRecord(0)]
    assert lengths_with(FREE).choose(records, 4, 0, 100) == [8, 3, 0]


def test_rows_that_cost_as_much_as_a_sequence_are_none() -> None:
    records = [record_of(8, 0.9) for _ in range(8)]
    assert lengths_with(BY_ROW).choose(records, 0, 0, 100) == [0] * 8


@pytest.mark.parametrize(("per_row", "last"), [(1.0, 0), (0.0, 8)], ids=["by row", "for nothing"])
def test_what_a_step_without_drafts_takes_is_found_out(per_row: float, last: int) -> None:
    lengths, records = DraftLengths(), [record_of(8, 0.6) for _ in range(4)]
    for _ in range(12):
        chosen = lengths.choose(records, 0, 0, 100)
        num_tokens = len(records) + sum(chosen)
        lengths.record(num_tokens, 1.0 + per_row * num_tokens, verified=any(chosen))
    assert lengths.choose(records, 0, 0, 100) == [last] * 4


def test_a_drafter_that_takes_longer_than_its_drafts_save_is_not_asked() -> None:
    lengths, records = DraftLengths(), [record_of(8, 0.3)]
    asked = 0
    for _ in range(4 * PROBE_STEPS):
        chosen = lengths.choose(records, 0, 0, 100)
        asked += any(chosen)
        num_tokens = len(records) + sum(chosen)
        lengths.record(num_tokens, 1.0 + any(chosen), verified=any(chosen))
    assert 3 * PROBE_LENGTH <= asked <= 6 * PROBE_LENGTH


def test_beside_steps_that_always_verify_there_is_one_without_now_and_again() -> None:
    lengths, records = lengths_with(FREE), [record_of(8, 0.9)]
    chosen = [lengths.choose(records, 0, 0, 100)[0] for _ in range(4 * PROBE_STEPS)]
    assert 3 * PROBE_LENGTH <= chosen.count(0) <= 4 * PROBE_LENGTH
    assert chosen.count(8) == len(chosen) - chosen.count(0)


def test_the_likeliest_drafts_come_first() -> None:
    sure, unsure = record_of(8, 0.95), record_of(8, 0.4)
    some = lengths_with({1: 1.0, 2: 1.0, 10: 2.0, 64: 30.0}).choose([unsure, sure], 0, 0, 100)
    assert some[1] > some[0]
    assert lengths_with(FREE).choose([unsure, sure], 0, 0, 5) == [0, 5]


def test_a_step_full_of_prompts_has_no_time_for_drafts() -> None:
    costs = {1: 1.0, 16: 1.0, 64: 4.0, 512: 32.0}
    records = [record_of(4, 0.8)]
    assert lengths_with(costs).choose(records, 0, 0, 100) == [4]
    assert lengths_with(costs).choose([record_of(4, 0.5)] * 8, 0, 256, 100) == [0] * 8


def test_a_step_without_drafts_is_said_to_take_no_longer_than_one_with() -> None:
    """A few steps that were slow for no reason don't change that for long."""
    lengths, records = DraftLengths(), [record_of(8, 0.3)] * 8
    for _ in range(3):
        lengths.record(8, 20.0, verified=False)
    for num_tokens, seconds in ((8, 1.0), (16, 2.0), (72, 9.0)):
        for _ in range(3):
            lengths.record(num_tokens, seconds + 0.2, verified=True, longest=1, drafting=0.2)
    assert lengths.choose(records, 0, 0, 100) == [0] * 8


def test_one_without_drafts_has_one_now_and_again_and_ever_more_seldom() -> None:
    lengths, record = lengths_with(BY_ROW), record_of(8, 0.0)
    given = [lengths.choose([record], 0, 0, 100)[0] for _ in range(40 * PROBE_STEPS)]
    assert max(given) == 1
    tried = [step for step in range(1, len(given)) if given[step] > given[step - 1]]
    apart = np.diff(tried) // PROBE_STEPS
    assert tried[0] // PROBE_STEPS == 1
    assert apart.tolist() == [2, *[4] * 9]
    assert sum(given) == PROBE_LENGTH * len(tried)


def test_drafts_pay_again_when_they_are_right_again() -> None:
    record = record_of(8, 0.0)
    for _ in range(100):
        record.verified(1, 1, 1)
    assert record.acceptance > 0.9


def test_drafts_that_the_drafter_seldom_makes_cost_little() -> None:
    costs = {8: 1.0, 9: 1.2, 16: 2.0, 72: 9.0}
    seldom = [record_of(8, 0.95) for _ in range(8)]
    often = [record_of(8, 0.95) for _ in range(8)]
    for record in seldom:
        for _ in range(400):
            record.verified(8, 1, 1)
    assert lengths_with(costs).choose(often, 0, 0, 100) == [0] * 8
    costs |= {9: 1.02, 10: 1.2}
    assert sum(lengths_with(costs).choose(often, 0, 0, 100)) <= 2
    assert sum(lengths_with(costs).choose(seldom, 0, 0, 100)) >= 8


def test_a_dry_run_stands_for_all_steps_since_it_was_made() -> None:
    verified, dry = record_of(8, 0.5), record_of(8, 0.5)
    for _ in range(16):
        verified.verified(16, 4, 4)
    dry.verified(16, 4, 4, dry_steps=16)
    assert dry.made == pytest.approx(verified.made)
    assert verified.steps - dry.steps == 16


@given(
    seconds=st.dictionaries(st.integers(1, 600), st.floats(1e-6, 1.0), max_size=9),
    records=st.lists(st.tuples(st.integers(0, 64), st.floats(0, 1)), max_size=9),
    others=st.integers(0, 64),
    prefilled=st.integers(0, 512),
    most=st.integers(-3, 200),
)
def test_limits_are_kept_whatever_was_measured(
    seconds: dict[int, float],
    records: list[tuple[int, float]],
    others: int,
    prefilled: int,
    most: int,
) -> None:
    lengths = lengths_with(seconds)
    all_records = [record_of(limit, chance) for limit, chance in records]
    chosen = lengths.choose(all_records, others, prefilled, most)
    assert len(chosen) == len(records)
    assert all(0 <= n <= limit for n, (limit, _) in zip(chosen, records, strict=True))
    assert sum(chosen) <= max(most, 0)


def test_costs_rise_with_the_tokens_and_one_slow_step_is_no_rule() -> None:
    costs = StepCosts()
    assert costs.of([1.0, 9.0]).tolist() == [1.0, 1.0]
    for _ in range(2):
        costs.record(4, 0.0)
    assert costs.of([4.0]).tolist() == [1.0]
    for num_tokens, seconds in ((1, 2.0), (8, 1.0), (16, 4.0)) * 2:
        costs.record(num_tokens, seconds)
    assert costs.of([1.0, 8.0, 12.0, 16.0, 99.0]).tolist() == [1.5, 1.5, 2.75, 4.0, 4.0]
    assert costs.of([0.5]).tolist() == [0.75]
    for _ in range(3):
        costs.record(1, 1.25)
        costs.record(8, 1.5)
        costs.record(8, 1000.0)
        costs.record(8, 0.001)
    assert costs.of(np.array([1.0, 8.0])).tolist() == [1.25, 1.5]


def test_a_slow_first_step_is_forgotten() -> None:
    costs = StepCosts()
    costs.record(9, 70.0)
    assert costs.of([9.0]).tolist() == [70.0]
    costs.record(9, 1.0)
    assert costs.of(np.array([9.0])).tolist() == [1.0]
    costs.record(5, 50.0)  # and never again
    assert costs.of(np.array([9.0])).tolist() == [1.0]


def test_fewer_drafts_are_asked_of_a_drafter_whose_drafts_take_long() -> None:
    chosen: list[int] = []
    for each in (0.0, 0.05, 0.15):
        lengths = lengths_with(FREE)
        for length in (1, 8, 1, 8):
            drafting = each * (length + 1)
            lengths.record(9, 1.0 + drafting, verified=True, longest=length, drafting=drafting)
        chosen.append(lengths.choose([record_of(8, 0.5)], 0, 0, 100)[0])
    assert chosen[0] == 8 > chosen[1] > chosen[2] > 0


def test_the_time_of_the_drafter_is_not_that_of_the_rows() -> None:
    lengths = DraftLengths()
    for _ in range(4):
        lengths.record(9, 3.0, verified=True, longest=8, drafting=2.0)
    assert lengths.verifying.of(np.array([9.0])).tolist() == [1.0]


@given(
    per_row=st.floats(0, 2),
    loads=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 300)), min_size=1, max_size=6),
)
def test_a_step_that_rests_is_one_whose_choice_would_be_none(
    per_row: float, loads: list[tuple[int, int]]
) -> None:
    asked, choosing = DraftLengths(), DraftLengths()
    records = [record_of(4, 0.5) for _ in range(4)]
    num_rests = 0
    for prefilled, num_steps in loads:
        records = [*records[1:], record_of(4, 0.9)]
        for _ in range(num_steps):
            chosen = choosing.choose(records, 0, prefilled, 100)
            rests = asked.rest(len(records) + prefilled, records[-1])
            assert chosen == ([0] * 4 if rests else asked.choose(records, 0, prefilled, 100))
            num_tokens, num_rests = len(records) + prefilled + sum(chosen), num_rests + rests
            for lengths in (asked, choosing):
                lengths.record(num_tokens, 1.0 + per_row * num_tokens, verified=any(chosen))
    longest = max(num_steps for _, num_steps in loads)
    assert num_rests or per_row < 1.5 or longest < 2 * PROBE_STEPS
