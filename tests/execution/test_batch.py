"""A plan as flat arrays: what each token is, where it stands and where its KV goes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aioserve.errors import InvariantError
from aioserve.execution.batch import build_batch, build_copies
from aioserve.execution.plan import PENDING_TOKEN, CopyKind, PageCopy, StepPlan, WorkItem
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
    last_tokens = torch.arange(100) + 77

    batch = build_batch(plan, page_size, last_tokens)

    row, sampled = 0, []
    attention = batch.attention
    computed = [item for item in plan.items if item.count]
    for index, item in enumerate(computed):
        assert attention.query_start[index] == row
        assert attention.context_lens[index] == item.start + item.count
        for offset, token_id in enumerate(item.token_ids):
            position = item.start + offset
            expected = last_tokens[item.slot] if token_id == PENDING_TOKEN else token_id
            assert batch.token_ids[row] == expected
            assert attention.positions[row] == position
            page = item.page_ids[position // page_size]
            slot = page * page_size + position % page_size
            assert attention.token_locations[row] == slot
            row += 1
        pages = -(-(item.start + item.count) // page_size)
        assert attention.page_table[index, :pages].tolist() == item.page_ids[:pages].tolist()
    assert attention.query_start.tolist()[len(computed) :] == [row] == [len(batch.token_ids)]
    assert attention.max_query == max(item.count for item in computed)
    assert attention.max_context == max(item.start + item.count for item in computed)

    row = -1
    for item in plan.items:
        row += item.count
        if item.sampling is not None:
            sampled.append(row)
    assert batch.sample_rows.tolist() == sampled


def test_a_fork_of_nothing_is_a_bug():
    pages = np.zeros(1, np.int32)
    fork = WorkItem(0, 0, 0, 5, 0, [], pages, PARAMS, 0)
    parent = WorkItem(1, 0, 1, 4, 1, [7], pages, PARAMS, 0)
    with pytest.raises(InvariantError, match="step 3 begins with a fork"):
        build_batch(StepPlan(3, (fork, parent)), 16, torch.zeros(2, dtype=torch.int64))


def test_copies_keep_their_order_and_name_their_caches():
    copies = (
        PageCopy(CopyKind.TO_HOST, 1, 2, 3),
        PageCopy(CopyKind.DEVICE, 4, 1, 16),
        PageCopy(CopyKind.FROM_HOST, 2, 7, 3),
    )
    table = build_copies(copies)
    assert table.dtype == torch.int32
    assert table.tolist() == [[0, 1, 1, 2, 3], [0, 4, 0, 1, 16], [1, 2, 0, 7, 3]]
