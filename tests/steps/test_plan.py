"""Contents that a plan may have, and its totals."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import numpy as np
import pytest

from aioserve.errors import InvariantError
from aioserve.steps.outcome import DryRun, StepOutcome, UnfitOutcomeError, check_outcome
from aioserve.steps.plan import (
    ItemKind,
    PooledTokens,
    SampleRow,
    ScoredTokens,
    StepPlan,
    WorkItem,
)


def item(kind: ItemKind, start: int, count: int, *offsets: int, **more: Any) -> WorkItem:
    return WorkItem(
        kind=kind,
        sequence_id=1,
        slot=0,
        start=start,
        index=more.pop("index", start),
        count=count,
        token_ids=np.full(count, 5, np.int32),
        rows=tuple(SampleRow(offset=offset, slot=0) for offset in offsets),
        **more,
    )


PREFILL, DECODE, VERIFY = ItemKind.PREFILL, ItemKind.DECODE, ItemKind.VERIFY


def test_totals_are_those_of_the_items() -> None:
    scored = ScoredTokens(offset=0, target_ids=np.array([1, 2], np.int32))
    pooled = PooledTokens(offset=1, count=2)
    items = (
        item(DECODE, 9, 1, 0),
        item(PREFILL, 0, 6, 5, 5),
        item(PREFILL, 4, 3, scored=scored, pooled=pooled),
        item(VERIFY, 7, 4, 0),
    )
    plan = StepPlan(step=1, items=items)
    plan.check()
    totals = [getattr(plan, f"num_{what}") for what in ("tokens", "sequences", "rows", "scored")]
    assert totals == [14, 5, 4, 2]
    assert (plan.num_pooled, plan.num_decodes) == (1, 1)
    part = msgspec.structs.replace(plan, items=items[:1])
    assert (part.num_tokens, part.num_rows, part.num_scored) == (1, 1, 0)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([item(DECODE, 4, 2)], "DECODE, 2 tokens.* must have one token"),
        ([item(DECODE, 4, 1)], "DECODE, 1 tokens.* a row of its own alone"),
        ([item(VERIFY, 4, 2)], "VERIFY.* must have one row"),
        ([item(VERIFY, 4, 2, 1)], "VERIFY.* must have one row, of its first token"),
        ([item(PREFILL, 4, 2, 2)], "row of token 2"),
        ([item(PREFILL, 4, 2, index=5)], "computes from 4, and writes from index 5"),
        ([item(PREFILL, 4, 2, index=-1)], "computes from 4, and writes from index -1"),
    ],
)
def test_an_item_that_is_not_what_it_says_is_refused(items: list[WorkItem], message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        StepPlan(step=1, items=tuple(items)).check()


@pytest.mark.parametrize(
    ("outcome", "fits"),
    [
        ({"token_ids": (1, 2)}, True),
        ({"token_ids": (1, 2, 3, 4), "token_counts": {1: 3}}, True),
        ({"token_ids": (1, 2, 3, 4), "token_counts": {1: 3}, "logprobs": {4: None}}, False),
        ({"token_ids": (1, 2, 3), "token_counts": {0: 2}}, False),
        ({"token_ids": (1, 2, 3, 4, 5, 6), "token_counts": {1: 5}}, False),
        ({"token_ids": (1, 2, 3), "token_counts": {1: 3}}, False),
        ({"token_ids": (1,), "token_counts": {1: 0}}, True),
        ({"token_ids": (1,), "token_counts": {2: 0}}, False),
        ({"token_ids": (1,), "token_counts": {1: -1}}, False),
        ({"token_ids": (1, 2), "row_errors": {2: "no"}}, False),
    ],
)
def test_a_row_has_one_token_or_as_many_as_were_drafted(outcome: Any, fits: bool) -> None:
    plan = StepPlan(step=1, items=(item(DECODE, 9, 1, 0), item(VERIFY, 7, 4, 0)))
    if fits:
        check_outcome(plan, StepOutcome(step=1, **outcome))
        return
    with pytest.raises(InvariantError, match="2 rows"):
        check_outcome(plan, StepOutcome(step=1, **outcome))


def test_what_is_no_outcome_is_refused_as_one() -> None:
    plan = StepPlan(step=1, items=(item(DECODE, 9, 1, 0),))
    with pytest.raises(UnfitOutcomeError, match="step 1 got None"):
        check_outcome(plan, cast(Any, None))


@pytest.mark.parametrize(
    "junk", [{"token_ids": None}, {"token_counts": [1]}, {"row_errors": 3}, {"scored": None}]
)
def test_an_outcome_with_junk_in_it_is_refused_as_one(junk: Any) -> None:
    plan = StepPlan(step=1, items=(item(DECODE, 9, 1, 0),))
    with pytest.raises(UnfitOutcomeError, match="step 1 "):
        check_outcome(plan, StepOutcome(**({"step": 1, "token_ids": (1,)} | junk)))


@pytest.mark.parametrize("found", [(1, 2, 0), (2, 1, 2), (2, 1, -1)])
def test_drafts_are_not_more_right_than_there_were(found: tuple[int, int, int]) -> None:
    plan = StepPlan(step=1, items=(item(DECODE, 9, 1, 0),))
    dry_runs = {0: DryRun(*found)}
    with pytest.raises(UnfitOutcomeError, match="step 1 has DryRun"):
        check_outcome(plan, StepOutcome(step=1, token_ids=(1,), dry_runs=dry_runs))
    dry_runs = {1: DryRun(1, 1, 1)}
    with pytest.raises(UnfitOutcomeError, match="step 1 "):
        check_outcome(plan, StepOutcome(step=1, token_ids=(1,), dry_runs=dry_runs))
