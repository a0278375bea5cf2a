"""Page arithmetic and page tables, at edges that are not multiples of the page size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.kv.page_table import PageTable
from aioserve.paging.pages import capacity_tokens, pages_for, token_locations

page_sizes = st.sampled_from([1, 2, 16, 64])
page_lists = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda p: np.array(p, np.int32))


@given(st.integers(0, 10_000), page_sizes)
def test_pages_for_is_the_least_number_of_pages_that_holds_the_tokens(
    num_tokens: int, page_size: int
) -> None:
    pages = pages_for(num_tokens, page_size)
    assert capacity_tokens(pages, page_size) >= num_tokens
    assert pages == 0 or capacity_tokens(pages - 1, page_size) < num_tokens


@given(page_sizes, st.integers(0, 3), st.lists(st.integers(0, 130), min_size=1, max_size=5))
def test_every_token_of_a_batch_lies_in_a_slot_of_its_own_page(
    page_size: int, spare_columns: int, lengths: list[int]
) -> None:
    columns = pages_for(max(lengths), page_size) + spare_columns
    page_table = np.arange(len(lengths) * columns, dtype=np.int32)[::-1]
    page_table = page_table.reshape(1, len(lengths), columns)
    tokens = [(row, position) for row, n in enumerate(lengths) for position in range(n)]
    rows, positions = np.array(tokens, np.int64).reshape(-1, 2).T
    slots = token_locations(page_table, rows, positions, page_size)
    assert slots.dtype == np.int64
    assert slots.shape == (1, len(tokens))
    slots = slots[0]
    assert len(set(slots.tolist())) == len(tokens)
    for slot, (row, position) in zip(slots.tolist(), tokens, strict=True):
        assert slot // page_size == page_table[0, row, position // page_size]
        assert slot % page_size == position % page_size


def test_slots_of_the_last_page_of_a_large_cache_do_not_overflow() -> None:
    page_table = np.array([[[2**31 - 1]]], np.int32)
    position = np.array([63], np.int32)
    slots = token_locations(page_table, np.zeros(1, np.int32), position, 64)
    assert slots.tolist() == [[(2**31 - 1) * 64 + 63]]


def test_a_position_past_the_table_is_refused() -> None:
    page_table = np.array([[[3]]], np.int32)
    with pytest.raises(IndexError):
        token_locations(page_table, np.array([0]), np.array([16]), 16)


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


@given(
    width=st.integers(1, 3),
    first=st.integers(0, 3),
    counts=st.lists(st.integers(0, 20), max_size=4),
    data=st.data(),
)
def test_a_page_table_of_a_group_has_its_pages_position_by_position(
    width: int, first: int, counts: list[int], data: st.DataObject
) -> None:
    table = PageTable(width, first)
    pages = iter(range(100, 10_000))
    rows: list[list[int]] = [[0] * width for _ in range(first)]
    views: list[tuple[np.ndarray, list[int]]] = []
    for count in counts:
        new = [[next(pages) for _ in range(width)] for _ in range(count)]
        table.append(np.array(new, np.int32).ravel())
        rows += new
        views.append((table.page_ids, table.page_ids.tolist()))
        match data.draw(st.sampled_from(["cut", "replace", "go on"])):
            case "cut":
                kept = data.draw(st.integers(first, len(rows)))
                table.cut(kept)
                del rows[kept:]
            case "replace" if len(rows) > first:
                index = data.draw(st.integers(first, len(rows) - 1))
                rows[index] = [next(pages) for _ in range(width)]
                table.replace(index, np.array(rows[index], np.int32))
        assert len(table) == len(rows)
        assert table.held.tolist() == [page for row in rows[first:] for page in row]
        assert table.between(first, len(rows)).reshape(-1, width).tolist() == rows[first:]
        for view, content in views:
            assert view.tolist() == content, "a view never changes"


def test_a_view_of_a_page_table_is_read_only() -> None:
    table = PageTable()
    table.append(np.array([5], np.int32))
    with pytest.raises(ValueError, match="read-only"):
        table.page_ids[0] = 6
