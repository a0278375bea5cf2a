"""Tiers: what `make test` leaves out, `make test-more` has; no two values that meet are lost."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from itertools import combinations, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import tiers
from tests.tiers import (
    FileSeconds,
    clock_counts,
    covering,
    examples,
    mark_properties,
    mark_tiers,
    run_item,
    spread,
)


def together(case: dict[str, int], strength: int) -> set[Any]:
    return {*combinations(sorted(case.items()), strength)}


@pytest.mark.parametrize("strength", [1, 2, 3])
@given(st.lists(st.integers(1, 5), min_size=3, max_size=5), st.data())
def test_all_that_meet_are_covered(strength: int, sizes: list[int], data: st.DataObject) -> None:
    cases = [dict(zip("abcde", case, strict=False)) for case in product(*map(range, sizes))]
    left_out = data.draw(st.sets(st.integers(0, len(cases) - 1), max_size=len(cases) // 2))
    cases = [case for place, case in enumerate(cases) if place not in left_out]
    kept = covering(cases, strength)
    found = set().union(*(together(case, strength) for case in cases))
    assert set().union(*(together(cases[place], strength) for place in kept)) == found
    assert len(kept) <= len(found)


def test_a_whole_product_is_sampled_well() -> None:
    cases = [dict(zip("abcd", case, strict=True)) for case in product(range(5), repeat=4)]
    assert 25 <= len(covering(cases, 2)) <= 45  # of 625
    assert len(covering(cases, 1)) == 5


class Marked(SimpleNamespace):
    def add_marker(self, mark: Any) -> None:
        self.marks.add(mark.name)

    def get_closest_marker(self, name: str) -> Any:
        if name == "sampled" and self.number is not None:
            return pytest.mark.sampled(self.number).mark
        return name if name in self.marks else None

    def iter_markers(self, name: str) -> Any:
        return [pytest.mark.parametrize(names, []).mark for names in self.together]


def tiers_of(
    together: list[Any],
    cases: list[dict[str, Any]],
    marked: dict[int, str] | None = None,
    number: int | None = None,
) -> tuple[int, int, int]:
    """Numbers of cases: in `make test`, in `make test-more` alone and in `make test-slow` alone."""
    items = [
        Marked(
            nodeid=f"f.py::test[{place}]",
            callspec=SimpleNamespace(params=case),
            together=together,
            marks={marked[place]} if marked and place in marked else set(),
            number=number,
        )
        for place, case in enumerate(cases)
    ]
    items.append(Marked(nodeid="f.py::test_other", together=[], marks=set(), number=None))
    mark_tiers(cast(Any, items))
    assert not items[-1].marks
    slow = sum("slow" in item.marks for item in items)
    more = sum(item.marks == {"more"} for item in items)
    return len(cases) - more - slow, more, slow


@pytest.mark.parametrize("names", ["a, b", ("a", "b")])
def test_parameters_that_come_in_one_breath_are_one(names: Any) -> None:
    rows = [(1, "x"), (2, "y"), (3, "x")]
    whole = [{"a": a, "b": b, "c": c} for (a, b), c in product(rows, (1, 2))]
    assert tiers_of([names, "c"], whole) == (3, 3, 0)  # of two parameters
    more = [case | {"fixture": it} for case, it in product(whole, "uv")]
    assert tiers_of([names, "c"], more) == (3, 3, 6)
    assert tiers_of([names, "c"], [case | {"fixture": 1} for case in whole]) == (3, 3, 0)


def draws_in_a_helper() -> None:
    given(st.integers())(lambda number: None)()


class Within:
    @staticmethod
    def property_within() -> None:
        draws_in_a_helper()

    @staticmethod
    def number_within() -> int:
        return examples(3)

    @staticmethod
    def other(given: object) -> object:
        return given


@pytest.mark.parametrize(
    ("function", "marked"),
    [(Within.property_within, True), (Within.number_within, True), (Within.other, False)],
)
def test_what_draws_within_comes_again_with_more_examples(function: Any, marked: bool) -> None:
    item = Marked(function=function, marks=set())
    mark_properties([cast(Any, item)])
    assert item.marks == ({"hypothesis"} if marked else set())


def test_one_parameter_is_not_sampled() -> None:
    assert tiers_of(["a"], [{"a": a} for a in range(9)]) == (9, 0, 0)


def test_what_is_marked_keeps_its_tier_and_stands_for_no_other_case() -> None:
    cases = [{"a": a, "b": b} for a, b in product((1, 2), (3, 4))]
    assert tiers_of(["a", "b"], cases) == (2, 2, 0)
    assert tiers_of(["a", "b"], cases, {0: "slow"}) == (2, 1, 1)
    assert tiers_of(["a", "b"], cases, {0: "more"}) == (2, 2, 0)
    assert tiers_of(["a", "b"], cases, {0: "more", 3: "slow"}) == (2, 1, 1)


@pytest.mark.parametrize(("number", "kept"), [(1, 1), (2, 2), (4, 4), (7, 7), (9, 7)])
def test_of_a_table_as_many_cases_come_first_as_its_mark_says(number: int, kept: int) -> None:
    table = [{"a": a} for a in range(7)]
    assert tiers_of(["a"], table, number=number) == (kept, 7 - kept, 0)
    whole = [{"a": a, "b": b, "c": c} for a, b, c in product(range(3), repeat=3)]
    first, more, slow = tiers_of(["a", "b", "c"], whole, number=number)
    assert (first, first + more) == (number, 27 - slow)


@given(st.integers(1, 9), st.integers(0, 40))
def test_places_are_spread_evenly(number: int, size: int) -> None:
    places = sorted(spread(number, size))
    assert len(places) == min(number, size)
    gaps = {after - before for before, after in pairwise([*places, size])}
    assert not places or (places[0] == 0 and max(gaps) - min(gaps) <= 1)


@pytest.mark.parametrize(("drawn", "number"), [(10, 15), (39, 58), (40, 60), (100, 60)])
def test_a_property_with_a_number_of_its_own_draws_the_same_part_of_it(
    drawn: int, number: int
) -> None:
    settings.register_profile("drawn", max_examples=drawn)
    with profile("drawn"):
        assert examples(60) == number
        assert examples(1) == 1


@contextlib.contextmanager
def profile(name: str) -> Iterator[None]:
    before = settings.get_current_profile_name()
    settings.load_profile(name)
    try:
        yield
    finally:
        settings.load_profile(before)


def marked(*names: str) -> pytest.Item:
    return cast(pytest.Item, Marked(nodeid="f.py::test", marks={*names}))


@pytest.mark.parametrize("name", ["clock", "more", "alone", "slow", "hypothesis"])
def test_no_clock_counts_in_make_test_for_what_runs_elsewhere_too(name: str) -> None:
    with run_item(marked("asyncio", name)):
        with profile("few"):
            assert not clock_counts()
        with profile("quick"):
            assert clock_counts()


def test_what_runs_in_make_test_alone_is_told_to_be_marked() -> None:
    with run_item(marked("asyncio")):
        message = "f.py::test compares a measured time: mark it `clock`"
        with profile("few"), pytest.raises(AssertionError, match=message):
            clock_counts()
        with profile("usual"):
            assert clock_counts()


def test_the_test_that_runs_is_known(request: pytest.FixtureRequest) -> None:
    assert tiers._running == [request.node]


@given(st.booleans())
def test_a_property_is_marked_by_hypothesis(drawn: bool) -> None:
    assert tiers._running[-1].get_closest_marker("hypothesis"), drawn


HERE = Path(__file__).parent
HELPERS = {HERE / "timing.py", HERE / "attacks" / "held_loop.py"}
MEASURES = re.compile(r"(process|thread)_time(_ns)?")
NOT_IN_MAKE_TEST = re.compile(r"^pytestmark = pytest\.mark\.(more|alone)$", re.MULTILINE)


def measured(source: str) -> list[str]:
    """Places where a module asks for processor time, unless `make test` has none of its tests."""
    if not MEASURES.search(source) or NOT_IN_MAKE_TEST.search(source):
        return []
    nodes: list[Any] = [node for node in ast.walk(ast.parse(source)) if hasattr(node, "lineno")]
    named = [
        (node.lineno, str(getattr(node, field, "")))
        for node in nodes
        for field in ("attr", "id", "name")
    ]
    return [f"line {line}: {name}" for line, name in named if MEASURES.fullmatch(name)]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time\nbegan = time.process_time()", ["line 2: process_time"]),
        ("from time import thread_time_ns as now", ["line 1: thread_time_ns"]),
        ("import time\ntime.thread_time", ["line 2: thread_time"]),
        ("pytestmark = pytest.mark.asyncio\ntime.thread_time()", ["line 2: thread_time"]),
        ("pytestmark = pytest.mark.more\ntime.process_time()", []),
        ("import time\nbegan = time.monotonic()\nprogram = 'time.process_time()'", []),
    ],
)
def test_a_measured_time_is_found(source: str, found: list[str]) -> None:
    assert measured(source) == found


def test_what_make_test_runs_measures_time_with_the_helpers_alone() -> None:
    """The helpers know where measured times don't count."""
    found = {
        str(path.relative_to(HERE)): places
        for path in sorted({*HERE.rglob("*.py")} - HELPERS)
        if (places := measured(path.read_text(encoding="utf-8")))
    }
    assert not found, "computing_at_most (tests/timing.py) is for this"


def test_a_file_over_its_time_is_named_with_its_seconds() -> None:
    plugin = FileSeconds(0.5)
    for place, seconds in [("a", 0.25), ("a", 0.25), ("b", 0.5), ("b", 0.25), ("c", 1.0)]:
        report = SimpleNamespace(nodeid=f"tests/test_{place}.py::test[x]", duration=seconds)
        plugin.pytest_runtest_logreport(cast(Any, report))
    told: list[str] = []
    reporter = SimpleNamespace(section=told.append, line=told.append)
    plugin.pytest_terminal_summary(cast(Any, reporter))
    assert told == [
        "files that took more than 0.5 s",
        "   1.0 s  tests/test_c.py",
        "   0.8 s  tests/test_b.py",
    ]
    told.clear()
    FileSeconds(0.5).pytest_terminal_summary(cast(Any, reporter))
    assert told == []
