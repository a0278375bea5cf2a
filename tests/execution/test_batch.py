"""A plan as flat arrays: what each token is, where it stands and where its KV goes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.execution.batch import build_batch
from aioserve.execution.plan import PENDING_TOKEN, StepPlan, WorkItem
from aioserve.request import SamplingParams

PARAMS = SamplingParams()


@st.composite
def plans(draw) -> tuple[StepPlan, int]:
    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    items = []
    free_page = 0
    for slot in range(draw(st.integers(1, 5))):
        start, count = draw(st.integers(0, 70)), draw(st.integers(1, 40))
        pages = -(-(start + count) // page_size) + draw(st.integers(0, 2))
        ids: list[int] = [1000 * slot + position for position in range(start, start + count)]
        if count == 1 and draw(st.booleans()):
            ids = [PENDING_TOKEN]
        sampling = PARAMS if ids == [PENDING_TOKEN] or draw(st.booleans()) else None
        page_ids = np.arange(free_page, free_page + pages, dtype=np.int32)[::-1]
        items.append(WorkItem(slot, 0, slot, start, count, ids, page_ids, sampling, 0))
        free_page += pages
    return StepPlan(1, tuple(items)), page_size


@given(plans())
def test_every_token_is_where_its_item_says(drawn):
    plan, page_size = drawn
    last_tokens = torch.arange(10) + 77

    batch = build_batch(plan, page_size, last_tokens)

    row, sampled = 0, []
    attention = batch.attention
    for index, item in enumerate(plan.items):
        assert attention.query_start[index] == row
        assert attention.context_lens[index] == item.start + item.count
        for offset, token_id in enumerate(item.token_ids):
            position = item.start + offset
            expected = last_tokens[item.slot] if token_id == PENDING_TOKEN else token_id
            assert batch.token_ids[row] == expected
            assert attention.positions[row] == position
            page = item.page_ids[position // page_size]
            slot = page * page_size + position % page_size
            assert attention.token_slots[row] == slot
            row += 1
        pages = -(-(item.start + item.count) // page_size)
        assert attention.page_table[index, :pages].tolist() == item.page_ids[:pages].tolist()
        if item.sampling is not None:
            sampled.append(row - 1)
    assert attention.query_start[-1] == row == len(batch.token_ids)
    assert batch.sample_rows.tolist() == sampled
    assert attention.max_query == max(item.count for item in plan.items)
    assert attention.max_context == max(item.start + item.count for item in plan.items)
