"""Page arithmetic and page tables, at edges that are not multiples of the page size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.kv.page_table import PageTable
from aioserve.kv.pages import capacity_tokens, pages_for, pages_missing, slot_of, slots_of

page_sizes = st.sampled_from([1, 2, 16, 64])
page_lists = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda p: np.array(p, np.int32))


@given(st.integers(0, 10_000), page_sizes)
def test_pages_for_is_the_least_number_of_pages_that_holds_the_tokens(
    num_tokens: int, page_size: int
) -> None:
    pages = pages_for(num_tokens, page_size)
    assert capacity_tokens(pages, page_size) >= num_tokens
    assert pages == 0 or capacity_tokens(pages - 1, page_size) < num_tokens


@given(st.integers(0, 1_000), st.integers(0, 100), page_sizes)
def test_pages_missing_completes_a_table_and_never_overfills_it(
    num_tokens: int, num_pages: int, page_size: int
) -> None:
    missing = pages_missing(num_tokens, num_pages, page_size)
    assert missing >= 0
    assert capacity_tokens(num_pages + missing, page_size) >= num_tokens
    assert missing == 0 or capacity_tokens(num_pages + missing - 1, page_size) < num_tokens


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_every_position_of_a_sequence_has_a_slot_of_its_own(page_size: int) -> None:
    num_tokens = 3 * page_size + 1
    page_ids = np.array([7, 0, 9, 2], np.int32)[: pages_for(num_tokens, page_size)]
    slots = [slot_of(page_ids, position, page_size) for position in range(num_tokens)]
    expected = [page * page_size + offset for page in page_ids for offset in range(page_size)]
    assert slots == expected[:num_tokens]
    assert len(set(slots)) == num_tokens


@given(page_lists, page_sizes, st.data())
def test_slots_of_equals_slot_of_for_each_position(
    page_ids: np.ndarray, page_size: int, data: st.DataObject
) -> None:
    capacity = capacity_tokens(len(page_ids), page_size)
    start = data.draw(st.integers(0, capacity))
    count = data.draw(st.integers(0, min(capacity - start, 130)))
    slots = slots_of(page_ids, start, count, page_size)
    assert slots.dtype == np.int64
    assert slots.tolist() == [
        slot_of(page_ids, position, page_size) for position in range(start, start + count)
    ]


def test_positions_outside_the_table_are_refused() -> None:
    page_ids = np.array([3], np.int32)
    for position in (-1, 16):
        with pytest.raises(IndexError):
            slot_of(page_ids, position, 16)
    for start, count in ((-1, 2), (0, -1), (15, 2)):
        with pytest.raises(IndexError):
            slots_of(page_ids, start, count, 16)


@pytest.mark.parametrize(("num_tokens", "page_size"), [(-1, 16), (4, 0), (4, -2)])
def test_sizes_that_make_no_sense_are_refused(num_tokens: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="num_tokens must be at least 0 and page_size at least 1"):
        pages_for(num_tokens, page_size)


@given(st.lists(page_lists, max_size=8))
def test_views_of_a_page_table_never_change_while_it_grows(chunks: list[np.ndarray]) -> None:
    table = PageTable()
    expected: list[int] = []
    views: list[tuple[np.ndarray, list[int]]] = []
    for chunk in chunks:
        table.append(chunk)
        expected.extend(chunk.tolist())
        views.append((table.page_ids, list(expected)))
        for view, content in views:
            assert view.tolist() == content
    assert len(table) == len(expected)
    assert table.page_ids.dtype == np.int32


def test_a_view_of_a_page_table_is_read_only() -> None:
    table = PageTable()
    table.append(np.array([5], np.int32))
    with pytest.raises(ValueError, match="read-only"):
        table.page_ids[0] = 6
