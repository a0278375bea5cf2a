"""Pages that each kind of group needs, compared with a plain count of the tokens seen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioserve.kv.groups.base import Group
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_table import PageTable
from aioserve.paging.layout import group_specs
from aioserve.paging.pages import tokens_of_sequence

WINDOWS = st.one_of(st.just(0), st.integers(1, 40))
"""Window of a group; 0 for one that keeps all positions."""


def group_of(page_size: int, window: int, width: int = 1) -> Group:
    specs = group_specs(width if window else 0, window)
    return KVMemory.of((1,), page_size, groups=specs).groups[-1]


def pages_seen(position: int, page_size: int, window: int) -> set[int]:
    """Page positions with a token that the one at `position` sees."""
    first = max(0, position - window + 1) if window else 0
    return {token // page_size for token in range(first, position + 1)}


@given(page_size=st.sampled_from([1, 2, 3, 16]), window=WINDOWS, position=st.integers(0, 100))
def test_a_token_needs_the_pages_that_it_sees(page_size: int, window: int, position: int) -> None:
    group = group_of(page_size, window)
    assert group.first_needed(position) == min(pages_seen(position, page_size, window))


@given(page_size=st.sampled_from([1, 2, 3, 16]), window=WINDOWS, first=st.integers(0, 20))
def test_pages_that_have_gone_are_missed_by_each_token_before_the_least(
    page_size: int, window: int, first: int
) -> None:
    group = group_of(page_size, window)
    least = group.least_index(first)
    if window:
        assert min(pages_seen(least, page_size, window)) >= first
        assert not least or min(pages_seen(least - 1, page_size, window)) < first
    else:
        assert least == 0, "no page of it ever goes"


@given(
    page_size=st.sampled_from([1, 2, 3, 16]),
    window=WINDOWS,
    width=st.integers(1, 3),
    num_positions=st.integers(1, 12),
)
def test_a_sequence_needs_the_most_pages_that_a_token_of_it_sees(
    page_size: int, window: int, width: int, num_positions: int
) -> None:
    group = group_of(page_size, window, width)
    tokens = range(num_positions * page_size)
    most = max(len(pages_seen(position, page_size, window)) for position in tokens)
    assert group.need(num_positions) == group.width * most


@given(
    page_size=st.sampled_from([1, 2, 4, 16]),
    num_pages=st.integers(0, 300),
    groups=st.integers(0, 4),
    window=st.integers(1, 60),
)
def test_a_memory_holds_what_the_arithmetic_of_its_layout_says(
    page_size: int, num_pages: int, groups: int, window: int
) -> None:
    window = window if groups else 0
    memory = KVMemory.of((num_pages,), page_size, groups=group_specs(groups, window))
    assert memory.capacity_tokens == tokens_of_sequence(num_pages, page_size, groups, window)


def test_pages_ahead_are_those_beyond_what_a_lease_holds() -> None:
    group = group_of(4, window=10, width=2)
    assert group.need(20) == 2 * 4, "ten tokens lie in four pages at most"
    assert group.num_ahead(None, 2, 20) == 2 * (4 - 2)
    table = PageTable(2)
    assert group.num_ahead(table, 2, 20) == 2 * 4
    assert group_of(4, window=0).num_ahead(None, 2, 20) == 18


@pytest.mark.parametrize(("groups", "window"), [(1, 0), (0, 5), (2, -1)])
def test_groups_without_a_window_and_a_window_without_groups_are_refused(
    groups: int, window: int
) -> None:
    with pytest.raises(ValueError, match="window must be at least 1 with num_window_groups"):
        group_specs(groups, window)
