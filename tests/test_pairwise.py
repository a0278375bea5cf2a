"""Samples of products: no two values that meet in a case are lost."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import covering, mark_the_rest_slow


def pairs_of(case: dict[str, int]) -> set[Any]:
    return {*combinations(sorted(case.items()), 2)}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_all_pairs_are_covered(sizes: list[int], data: st.DataObject) -> None:
    cases = [dict(zip("abcde", case, strict=False)) for case in product(*map(range, sizes))]
    left_out = data.draw(st.sets(st.integers(0, len(cases) - 1), max_size=len(cases) // 2))
    cases = [case for place, case in enumerate(cases) if place not in left_out]
    kept = covering(cases)
    all_pairs = set().union(*map(pairs_of, cases))
    assert set().union(*(pairs_of(cases[place]) for place in kept)) == all_pairs
    assert len(kept) <= len(all_pairs)


def test_a_whole_product_is_sampled_well() -> None:
    cases = [dict(zip("abcd", case, strict=True)) for case in product(range(5), repeat=4)]
    assert 25 <= len(covering(cases)) <= 45  # of 625


class Marked(SimpleNamespace):
    def add_marker(self, mark: Any) -> None:
        self.is_slow = True

    def iter_markers(self, name: str) -> Any:
        return [pytest.mark.parametrize(names, []).mark for names in self.together]


def kept_of(together: list[Any], cases: list[dict[str, Any]]) -> int:
    items = [
        Marked(
            nodeid=f"f.py::test[{place}]",
            callspec=SimpleNamespace(params=case),
            together=together,
            is_slow=False,
        )
        for place, case in enumerate(cases)
    ]
    items.append(Marked(nodeid="f.py::test_other", together=[], is_slow=False))
    mark_the_rest_slow(cast(Any, items))
    assert not items[-1].is_slow
    return sum(not item.is_slow for item in items[:-1])


@pytest.mark.parametrize("names", ["a, b", ("a", "b")])
def test_parameters_that_come_in_one_breath_are_one(names: Any) -> None:
    rows = [(1, "x"), (2, "y"), (3, "x")]
    whole = [{"a": a, "b": b, "c": c} for (a, b), c in product(rows, (1, 2))]
    assert kept_of([names, "c"], whole) == 6  # of two parameters, and not sampled
    more = [case | {"fixture": it} for case, it in product(whole, "uv")]
    assert kept_of([names, "c"], more) == 6  # of 12
    assert kept_of([names, "c"], [case | {"fixture": 1} for case in whole]) == 6
