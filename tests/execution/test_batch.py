"""A plan as flat arrays: what each token is, where it stands and where its KV goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.execution.batch import read_plan
from aioserve.execution.plan import (
    PENDING_TOKEN,
    CopyKind,
    PageCopy,
    StepOutcome,
    StepPlan,
    WorkItem,
)
from aioserve.ops import Drawn
from aioserve.request import SamplingParams

PARAMS = SamplingParams()


@st.composite
def plans(draw) -> tuple[StepPlan, int]:
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    only_decodes = draw(st.booleans())
    items: list[WorkItem] = []
    free_page = 0
    for _ in range(draw(st.integers(1, 5))):
        slot = len(items)
        start, count = draw(st.integers(0, 70)), 1 if only_decodes else draw(st.integers(1, 40))
        pages = -(-(start + count) // page_size) + draw(st.integers(0, 2))
        ids: list[int] = [1000 * slot + position for position in range(start, start + count)]
        if count == 1 and draw(st.booleans()):
            ids = [PENDING_TOKEN]
        sampling = PARAMS if ids == [PENDING_TOKEN] or draw(st.booleans()) else None
        page_ids = np.arange(free_page, free_page + pages, dtype=np.int32)[::-1]
        items.append(WorkItem(slot, 0, slot, start, count, ids, page_ids, sampling, 0))
        for _ in range(draw(st.integers(0, 3)) if sampling else 0):
            slot = len(items)
            items.append(WorkItem(slot, 0, slot, start + count, 0, [], page_ids, PARAMS, slot))
        free_page += pages
    return StepPlan(1, tuple(items)), page_size


@given(plans())
def test_every_token_is_where_its_item_says(drawn):
    plan, page_size = drawn

    step = read_plan(plan, page_size)

    row, sampled, pending = 0, [], []
    batch = step.batch
    assert batch is not None
    computed = [item for item in plan.items if item.count]
    for index, item in enumerate(computed):
        assert batch.query_start[index] == row
        assert batch.context_lens[index] == item.start + item.count
        for offset, token_id in enumerate(item.token_ids):
            position = item.start + offset
            assert batch.token_ids[row] == token_id
            if token_id == PENDING_TOKEN:
                pending.append((row, item.slot))
            assert batch.positions[row] == position
            page = item.page_ids[position // page_size]
            slot = page * page_size + position % page_size
            assert batch.token_slots[row] == slot
            row += 1
        pages = -(-(item.start + item.count) // page_size)
        assert batch.page_table[index, :pages].tolist() == item.page_ids[:pages].tolist()
    assert batch.query_start.tolist()[len(computed) :] == [row] == [len(batch.token_ids)]
    assert batch.max_context == max(item.start + item.count for item in computed)

    assert list(zip(batch.pending_rows, batch.pending_slots, strict=True)) == pending
    row = -1
    for item in plan.items:
        row += item.count
        if item.sampling is not None:
            sampled.append(row)
    assert batch.logit_rows.tolist() == sampled


def test_a_fork_of_nothing_is_a_bug():
    pages = np.zeros(1, np.int32)
    fork = WorkItem(0, 0, 0, 5, 0, [], pages, PARAMS, 0)
    parent = WorkItem(1, 0, 1, 4, 1, [7], pages, PARAMS, 0)
    with pytest.raises(InvariantError, match="step 3 begins with a fork"):
        read_plan(StepPlan(3, (fork, parent)), 16)


def test_copies_keep_their_order_and_name_their_caches():
    copies = (
        PageCopy(CopyKind.TO_HOST, 1, 2, 3),
        PageCopy(CopyKind.DEVICE, 4, 1, 16),
        PageCopy(CopyKind.FROM_HOST, 2, 7, 3),
    )
    step = read_plan(StepPlan(1, (), copies=copies), 16)
    assert step.batch is None
    assert step.copies.dtype == np.int32
    assert step.copies.tolist() == [[0, 1, 1, 2, 3], [0, 4, 0, 1, 16], [1, 2, 0, 7, 3]]


def test_each_row_is_sampled_as_its_item_asks_and_lands_in_its_slot():
    pages = np.zeros(1, np.int32)
    warm = SamplingParams(temperature=0.7, top_k=5, top_p=0.9)
    items = (
        WorkItem(0, 0, 8, 4, 1, [7], pages, PARAMS, 2**64 - 1),
        WorkItem(1, 0, 9, 5, 0, [], pages, warm, 3),
        WorkItem(2, 0, 2, 0, 2, [1, 2], pages, None, 4),
        WorkItem(3, 0, 5, 6, 1, [9], pages, warm, 5),
    )
    step = read_plan(StepPlan(7, items), 16)
    samples = step.samples
    assert samples.slots.tolist() == [8, 9, 5]
    assert samples.seeds.tolist() == [2**64 - 1, 3, 5]
    assert samples.positions.tolist() == [5, 5, 7]
    assert samples.temperatures.tolist() == [1.0, 0.7, 0.7]
    assert samples.top_ks.tolist() == [0, 5, 5]
    assert samples.top_ps.tolist() == [1.0, 0.9, 0.9]

    outcome = step.outcome(Drawn(torch.tensor([11, 12, 0]), {2: "no"}))
    assert outcome == StepOutcome(7, (11, 12, PENDING_TOKEN, 0), {3: "no"})
