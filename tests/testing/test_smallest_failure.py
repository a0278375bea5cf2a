"""The search for a smaller example after a failure: it ends when it is to, and keeps the best."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from aioserve.testing.examples import smallest_failure

MAX_SMALLER = 5


def test_the_search_ends_where_so_many_were_tried_and_gives_the_smallest_that_fails():
    drawn: list[list[int]] = []
    failed: list[list[int]] = []
    failed_at: list[int] = []

    def attempt(example: list[int]) -> None:
        if sum(example) > 1000:
            failed.append(example)
            failed_at.append(len(drawn))
            raise ValueError(example)

    examples = st.lists(st.integers(0, 100), max_size=60).map(lambda one: drawn.append(one) or one)
    found = smallest_failure(examples, attempt, 1000, max_smaller=MAX_SMALLER, size_of=len)
    assert found is not None
    assert len(found[0]) == min(map(len, failed))
    assert found[1].args == (found[0],)
    assert len(drawn) == failed_at[0] + MAX_SMALLER + 1


def test_nothing_is_found_where_nothing_fails_and_other_errors_are_raised():
    def attempt(example: int) -> None:
        assert example < 9

    assert smallest_failure(st.integers(0, 8), attempt, 20, max_smaller=9, size_of=abs) is None
    with pytest.raises(TypeError, match="nothing to draw from"):
        smallest_failure(st.builds(broken), attempt, 20, max_smaller=9, size_of=abs)


def broken() -> int:
    raise TypeError("nothing to draw from")
