"""A plan as host arrays: ids and positions of tokens, locations of their KV, and their sampling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.execution.step_arrays import PlanReader, StepArrays
from aioserve.request import SamplingParams
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import (
    PENDING_TOKEN,
    ItemKind,
    PooledTokens,
    SampleRow,
    ScoredTokens,
    SlotStart,
    StepPlan,
    WorkItem,
)
from tests.placed import PlacedItem, placed_item, placed_plan

PARAMS = SamplingParams()
WARM = SamplingParams(temperature=0.7, top_k=5, top_p=0.9)
NUM_SLOTS = 64


def start(slot: int, params: SamplingParams = PARAMS, seed: int = 0) -> SlotStart:
    return SlotStart(slot=slot, params=params, seed=seed)


def item(
    slot: int, at: int, token_ids: Sequence[int], rows: Sequence[tuple[int, int]] = ()
) -> WorkItem:
    """Make an item. `rows` are (offset, slot)."""
    return placed_item(
        sequence_id=slot,
        slot=slot,
        start=at,
        count=len(token_ids),
        token_ids=np.array(token_ids, np.int32),
        page_ids=np.zeros(8, np.int32),
        rows=tuple(SampleRow(offset=offset, slot=slot) for offset, slot in rows),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[StepPlan, int]:
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    only_decodes = draw(st.booleans())
    items: list[WorkItem] = []
    slots = iter(range(NUM_SLOTS))
    starts = []
    free_page = 0
    for _ in range(draw(st.integers(1, 5))):
        slot = next(slots)
        at, count = draw(st.integers(0, 70)), 1 if only_decodes else draw(st.integers(1, 40))
        index = at - draw(st.sampled_from([0, at // 3]))
        pages = -(-(index + count) // page_size) + draw(st.integers(0, 2))
        ids: list[int] = [1000 * slot + position for position in range(at, at + count)]
        if draw(st.booleans()):
            ids[-1] = PENDING_TOKEN
        rows = []
        offsets = [0] if only_decodes else draw(st.lists(st.integers(0, count - 1), max_size=4))
        for offset in sorted(offsets):
            rows.append(SampleRow(offset=offset, slot=slot if only_decodes else next(slots)))
            params = SamplingParams(temperature=offset / 100, top_k=offset)
            starts.append(start(rows[-1].slot, params, seed=2**64 - 1 - offset))
        page_ids = np.arange(free_page, free_page + pages, dtype=np.int32)[::-1]
        items.append(
            placed_item(
                sequence_id=slot,
                slot=slot,
                start=at,
                index=index,
                count=count,
                token_ids=np.array(ids, np.int32),
                page_ids=page_ids,
                rows=tuple(rows),
            )
        )
        free_page += pages
    return placed_plan(step=1, started_slots=tuple(starts), items=tuple(items)), page_size


@given(plans())
def test_every_token_and_row_is_where_its_item_says(drawn: tuple[StepPlan, int]) -> None:
    plan, page_size = drawn

    step = PlanReader(page_size, NUM_SLOTS).read(plan)

    row, pending, sampled = 0, [], []
    batch, samples = step.batch, step.samples
    assert batch is not None
    for index, item in enumerate(plan.items):
        assert isinstance(item, PlacedItem)
        assert batch.query_start[index] == row
        assert batch.context_lens[index] == item.index + item.count
        for sample in item.rows:
            at = len(sampled)
            assert batch.logit_rows[at] == row + sample.offset
            assert samples.slots[at] == sample.slot
            assert samples.positions[at] == item.start + sample.offset + 1
            assert samples["temperature"][at] == sample.offset / 100
            assert samples["top_k"][at] == sample.offset
            assert samples.seeds[at] == 2**64 - 1 - sample.offset
            sampled.append(sample)
        for offset, token_id in enumerate(item.token_ids):
            position = item.start + offset
            assert batch.token_ids[row] == token_id
            if token_id == PENDING_TOKEN:
                pending.append((row, item.slot))
            assert batch.positions[row] == position
            place = item.index + offset
            page = item.page_ids[place // page_size]
            assert batch.token_locations[0, row] == page * page_size + place % page_size
            row += 1
        pages = -(-(item.index + item.count) // page_size)
        assert batch.page_table[0, index, :pages].tolist() == item.page_ids[:pages].tolist()
    assert batch.query_start.tolist()[len(plan.items) :] == [row] == [len(batch.token_ids)]
    assert batch.max_context == max(item.index + item.count for item in plan.items)
    assert batch.end_position == max(item.start + item.count for item in plan.items)
    assert list(zip(batch.pending_rows, batch.pending_slots, strict=True)) == pending
    assert len(batch.logit_rows) == len(samples) == len(sampled)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[StepPlan], int]:
    """Draw steps in which a few sequences come, go, get a page, and sometimes compute several
    tokens."""
    page_size = draw(st.sampled_from([1, 2, 16]))
    lengths = {slot: draw(st.integers(1, 40)) for slot in range(draw(st.integers(1, 4)))}
    pages: dict[int, np.ndarray] = {}
    plans = []
    for step in range(draw(st.integers(1, 12))):
        chosen = draw(st.lists(st.sampled_from(sorted(lengths)), min_size=1, unique=True))
        items = []
        for slot in chosen:
            count = draw(st.sampled_from([1, 1, 1, 1, 3]))
            at, lengths[slot] = lengths[slot], lengths[slot] + count
            needed = -(-lengths[slot] // page_size)
            held = pages.get(slot, np.zeros(0, np.int32))
            if len(held) < needed or draw(st.booleans()):  # or replaced by other pages
                first = draw(st.integers(0, 500))
                most = needed + draw(st.integers(0, 40))
                pages[slot] = np.arange(first, first + most, dtype=np.int32)[::-1]
            ids = [draw(st.sampled_from([PENDING_TOKEN, 7, 8])) for _ in range(count)]
            offsets = draw(st.sampled_from([(0,), (0,), (0,), (), (0, 0)]))
            items.append(
                placed_item(
                    sequence_id=slot,
                    slot=slot,
                    start=at,
                    count=count,
                    token_ids=np.array(ids, np.int32),
                    page_ids=pages[slot],
                    rows=tuple(SampleRow(offset=offset, slot=slot) for offset in offsets),
                )
            )
        plans.append(placed_plan(step=step, items=tuple(items)))
    return plans, page_size


def arrays_of(step: StepArrays) -> dict[str, Any]:
    batch, samples = step.batch, step.samples
    assert batch is not None
    found = {name: getattr(batch, name).tolist() for name in batch.__slots__}
    found["page_table"] = batch.page_table.copy()
    return found | {name: array.tolist() for name, array in samples.arrays().items()}


@given(runs())
def test_a_step_reads_the_same_whatever_was_read_before(drawn: tuple[list[StepPlan], int]) -> None:
    plans, page_size = drawn
    started = tuple(start(slot, WARM, slot) for slot in range(4))
    begin = placed_plan(step=99, started_slots=started, items=())
    reader = PlanReader(page_size, NUM_SLOTS)
    reader.read(begin)
    steps, before = [], []

    for plan in plans:
        steps.append(reader.read(plan))
        before.append(arrays_of(steps[-1]))
        alone = PlanReader(page_size, NUM_SLOTS)
        alone.read(begin)
        expected = arrays_of(alone.read(plan))
        table, expected_table = before[-1]["page_table"], expected.pop("page_table")
        for row, item in enumerate(plan.items):
            needed = -(-(item.start + item.count) // page_size)
            assert table[0, row, :needed].tolist() == expected_table[0, row, :needed].tolist()
        assert {name: before[-1][name] for name in expected} == expected

    for step, arrays in zip(steps, before, strict=True):  # arrays of steps in flight don't change
        now = arrays_of(step)
        assert now.pop("page_table").tolist() == arrays.pop("page_table").tolist()
        assert now == arrays


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_without_a_page_are_refused(count: int) -> None:
    reader = PlanReader(2, NUM_SLOTS)
    reader.read(placed_plan(step=0, started_slots=(start(3), start(4)), items=()))
    whole = item(4, 2, [7], [(0, 4)])
    for at in (14, 15, 16):  # eight pages of two tokens
        one = item(3, at, [7] * count, [(0, 3)])
        plan = placed_plan(step=at, items=(whole, one))
        if at + count <= 16:
            reader.read(plan)
            continue
        with pytest.raises(InvariantError, match=f"slot 3 has 8 pages.*index {at + count - 1}"):
            reader.read(plan)


def test_a_step_that_is_refused_leaves_no_trace_in_those_behind_it() -> None:
    first, other = np.arange(4, dtype=np.int32), np.arange(10, 14, dtype=np.int32)

    def decodes(step: int, page_ids: np.ndarray, at: Sequence[int]) -> StepPlan:
        found = [
            msgspec.structs.replace(item(slot, at[slot], [7], [(0, slot)]), page_ids=page_ids)
            for slot in (0, 1)
        ]
        return placed_plan(step=step, items=tuple(found))

    reader = PlanReader(2, NUM_SLOTS)
    reader.read(placed_plan(step=0, started_slots=(start(0), start(1)), items=()))
    reader.read(decodes(1, first, (2, 4)))
    with pytest.raises(InvariantError, match="slot 1 has 4 pages"):
        reader.read(decodes(2, other, (3, 8)))
    batch = reader.read(decodes(3, other, (3, 5))).batch
    assert batch is not None
    assert batch.token_locations.tolist() == [[23, 25]]


def test_copies_keep_their_order_and_name_their_caches() -> None:
    copies = (
        PageCopy(0, 1, 1, 2, 3),
        PageCopy(0, 4, 0, 1, 16),
        PageCopy(1, 2, 0, 7, 3),
    )
    step = PlanReader(16, NUM_SLOTS).read(placed_plan(step=1, items=(), copies=copies))
    assert step.batch is None
    assert step.copies.dtype == np.int32
    assert step.copies.tolist() == [[0, 1, 1, 2, 3], [0, 4, 0, 1, 16], [1, 2, 0, 7, 3]]


def test_a_slot_keeps_its_parameters_until_it_starts_anew() -> None:
    reader = PlanReader(16, NUM_SLOTS)
    decode = (item(3, 0, [7], [(0, 3)]),)
    first = placed_plan(step=1, started_slots=(start(3, WARM, 8),), items=decode)
    for plan in (first, placed_plan(step=2, items=decode)):
        samples = reader.read(plan).samples
        assert (samples["temperature"][0], samples["top_k"][0], samples["top_p"][0]) == (
            0.7,
            5,
            0.9,
        )
        assert samples.seeds[0] == 8
    anew = placed_plan(step=3, ended_slots=(3,), started_slots=(start(3, PARAMS, 9),), items=decode)
    samples = reader.read(anew).samples
    assert (samples["temperature"][0], samples["top_k"][0], samples["top_p"][0]) == (1.0, 0, 1.0)
    assert samples.seeds[0] == 9


def test_a_slot_that_has_not_started_or_has_ended_samples_nothing() -> None:
    reader = PlanReader(16, NUM_SLOTS)
    decode = item(3, 0, [7], [(0, 3)])
    with pytest.raises(InvariantError, match=r"slots \[3\] sample, but have not started"):
        reader.read(placed_plan(step=1, items=(decode,)))
    reader.read(placed_plan(step=2, started_slots=(start(3),), items=(decode,)))
    with pytest.raises(InvariantError, match=r"slots \[3\] sample"):
        reader.read(placed_plan(step=3, ended_slots=(3,), items=(decode,)))
    # A step that failed may end a slot that the runner never heard of.
    reader.read(placed_plan(step=4, ended_slots=(3, 5), items=()))


def test_an_outcome_has_a_token_for_each_row() -> None:
    plan = placed_plan(
        step=7,
        started_slots=(start(0), start(1), start(2)),
        items=(item(0, 4, [7], [(0, 0), (0, 1)]), item(9, 0, [1, 2]), item(2, 6, [9], [(0, 2)])),
    )
    step = PlanReader(16, NUM_SLOTS).read(plan)
    outcome = step.outcome([11, 12, 0], {2: "no"})
    assert outcome == StepOutcome(step=7, token_ids=(11, 12, 0), row_errors={2: "no"})


def test_rows_to_score_and_rows_to_pool_come_behind_those_that_are_sampled():
    first = msgspec.structs.replace(
        item(3, 4, [10, 11, 12, 13], [(3, 3)]), pooled=PooledTokens(offset=1, count=3)
    )
    second = msgspec.structs.replace(
        item(5, 0, [20, 21]),
        scored=ScoredTokens(offset=0, target_ids=np.array([21, 22], np.int32)),
        pooled=PooledTokens(offset=0, count=1),
    )
    third = item(6, 8, [30], [(0, 6)])
    one = msgspec.structs.replace(
        item(7, 0, [40], [(0, 7)]),
        kind=ItemKind.PREFILL,
        pooled=PooledTokens(offset=0, count=1),
    )
    plan = placed_plan(
        step=1,
        started_slots=tuple(start(slot) for slot in (3, 5, 6, 7)),
        items=(first, second, third),
    )
    reader = PlanReader(16, NUM_SLOTS)
    step = reader.read(plan)

    assert step.batch is not None
    assert step.batch.logit_rows.tolist() == [3, 6, 4, 5, 1, 2, 3, 4]
    assert step.pooled == (3, 1)
    assert len(step.samples) == 2

    # A step that looks like decodes but isn't.
    step = reader.read(placed_plan(step=2, items=(one,)))
    assert step.batch is not None
    assert step.batch.logit_rows.tolist() == [0, 0]
    assert step.pooled == (1,)


def test_what_this_runner_cannot_compute_is_refused_by_name():
    reader = PlanReader(16, NUM_SLOTS)
    reader.read(placed_plan(step=0, started_slots=(start(3),), items=()))
    verified = msgspec.structs.replace(item(3, 2, [9, 9], [(0, 3)]), kind=ItemKind.VERIFY)
    with pytest.raises(InvariantError, match="step 1 verifies draft tokens, which this runner"):
        reader.read(placed_plan(step=1, items=(verified,)))
