"""Tiers: which cases `make test` runs, which come with `make test-more` and which with `test-slow`.

`make test` runs a case of each value, ten examples of each property, and ten seconds of tests of
each file. `make test-more` runs a case of each two values, forty examples, and tests marked `more`.
Whole products and tests marked `slow` are left to `make test-slow`. `sampled(n)` leaves n cases of
a table to `make test`.

No test that `make test` runs depends on how long something takes. A test that compares a measured
time asks `clock_counts`. A test marked `clock` runs without the clock in `make test`, and once more
with it.

Most faults show with one value or with two together. See Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing" (IEEE TSE 30, 2004).
"""

from __future__ import annotations

import contextlib
import heapq
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from operator import itemgetter
from types import FunctionType
from typing import cast

import pytest
from hypothesis import given, settings

__all__ = [
    "FULL_EXAMPLES",
    "TIERS",
    "FileSeconds",
    "clock_counts",
    "covering",
    "examples",
    "mark_properties",
    "mark_tiers",
    "run_item",
]

BEHIND = "not slow and not alone and not published"
TIERS = {
    "first": (f"not more and {BEHIND}", "few"),
    "more": (f"(more or clock or hypothesis) and {BEHIND}", "quick"),
}
"""Marks and hypothesis' profile of `make test`, and of what `make test-more` adds."""
FULL_EXAMPLES = 40
"""Profiles that draw fewer of a property by default draw fewer of all."""

Case = Mapping[str, Hashable]
"""Parameters and their values."""


def examples(number: int) -> int:
    """Examples of a property that needs another `number` than the profile draws by default. Where a
    profile draws a part of `FULL_EXAMPLES`, it's that part of `number`."""
    return max(1, number * min(settings().max_examples, FULL_EXAMPLES) // FULL_EXAMPLES)


WITH_A_CLOCK = ("clock", "more", "alone", "slow", "hypothesis")
"""Marks of tests that run elsewhere than in `make test` too."""

_running: list[pytest.Item] = []


@contextlib.contextmanager
def run_item(item: pytest.Item) -> Iterator[None]:
    """Notes which test runs."""
    _running.append(item)
    try:
        yield
    finally:
        _running.pop()


def clock_counts() -> bool:
    """Return whether a test may compare a measured time: false in `make test`. Raises
    `AssertionError` there for a test that runs nowhere else."""
    if settings.get_current_profile_name() != "few":
        return True
    item = _running[-1]
    assert any(item.get_closest_marker(name) for name in WITH_A_CLOCK), (
        f"{item.nodeid} compares a measured time: mark it `clock`, to run with a clock in"
        " `make test-more` too, or `more`, to run there alone"
    )
    return False


def covering(cases: Sequence[Case], strength: int) -> set[int]:
    """Places of cases among which each `strength` values that meet in one of `cases` do.

    Greedy: each case that is taken has as many new ones as any. The first of equals is taken, so
    the choice is the same everywhere.
    """
    first = itemgetter(0)
    found = [{*combinations(sorted(case.items(), key=first), strength)} for case in cases]
    left = set().union(*found)
    most = [(-len(of_case), place) for place, of_case in enumerate(found)]
    heapq.heapify(most)
    taken: set[int] = set()
    while left:
        known, place = heapq.heappop(most)
        new = found[place] & left
        if len(new) < -known:  # since it was counted, others have come
            heapq.heappush(most, (-len(new), place))
            continue
        taken.add(place)
        left -= new
    return taken


def mark_properties(items: Iterable[pytest.Item]) -> None:
    """Mark `hypothesis` what draws examples within, by functions of its file too: `make test-more`
    draws more of these as well."""
    for item in items:
        function = getattr(item, "function", None)
        if isinstance(function, FunctionType) and draws(function):
            item.add_marker(pytest.mark.hypothesis)


@cache
def draws(function: FunctionType) -> bool:
    """Return whether the body of a test names `given` or `examples`, or a function of its file
    whose body does."""
    seen, left = {function}, [function]
    while left:
        one = left.pop()
        named = [one.__globals__.get(name) for name in one.__code__.co_names]
        if any(it is given or it is examples for it in named):
            return True
        more = {it for it in named if isinstance(it, FunctionType)} - seen
        left += [it for it in more if it.__module__ == function.__module__]
        seen |= more
    return False


def mark_tiers(items: Iterable[pytest.Item]) -> None:
    """Mark cases of products that the quicker tiers can spare.

    The unmarked cases and those marked `more` cover each two values that meet; the others are
    `slow`. The unmarked cases alone cover each value, or are as many as `sampled` says.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    for of_function in functions.values():
        cases = cases_of(of_function)
        names = {name for case in cases for name in case}
        num_varied = sum(len({case.get(name) for case in cases}) > 1 for name in names)
        if num_varied > 2:
            of_function = mark_the_rest(of_function, covering(cases, 2), pytest.mark.slow)
        quick = [item for item in of_function if item.get_closest_marker("more") is None]
        sampled = of_function[0].get_closest_marker("sampled")
        if sampled is not None:
            mark_the_rest(quick, spread(sampled.args[0], len(quick)), pytest.mark.more)
        elif num_varied > 1:
            mark_the_rest(quick, covering(cases_of(quick), 1), pytest.mark.more)


def mark_the_rest(
    items: Sequence[pytest.Item], kept: Collection[int], mark: pytest.MarkDecorator
) -> list[pytest.Item]:
    """Mark all but those in the places that are `kept`; return these."""
    for place, item in enumerate(items):
        if place not in kept:
            item.add_marker(mark)
    return [items[place] for place in sorted(kept)]


def spread(number: int, size: int) -> set[int]:
    """Return `number` places of a list of `size`, or all, at even distances from the first on."""
    number = min(number, size)
    return {place * size // number for place in range(number)}


def cases_of(items: Sequence[pytest.Item]) -> list[Case]:
    return [varied(item) for item in items]


def varied(item: pytest.Item) -> Case:
    """The value of each parameter, those that `parametrize` names in one breath as one."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    together = {
        name: str(mark.args[0])
        for mark in item.iter_markers("parametrize")
        for name in named(mark.args[0])
    }
    values: dict[str, tuple[int, ...]] = defaultdict(tuple)
    for name, value in sorted(cast(dict[str, object], callspec.params).items()):
        values[together.get(name, name)] += (id(value),)
    return values


def named(argument: str | Sequence[str]) -> list[str]:
    return re.split(r"\s*,\s*", argument) if isinstance(argument, str) else [*argument]


TAKE_LONGER = {"tests/pairs/test_pairs.py": 60.0}
"""Seconds of files that may take more than all others."""


class FileSeconds:
    """A pytest plugin: names at the end of a run each file whose tests took more than `most`
    seconds. It fails nothing, since a machine may be slow."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        over = [
            (file, seconds)
            for file, seconds in sorted(self._seconds.items(), key=itemgetter(1), reverse=True)
            if seconds > TAKE_LONGER.get(file, self._most)
        ]
        if over:
            terminalreporter.section(f"files that took more than {self._most:g} s")
        for file, seconds in over:
            terminalreporter.line(f"{seconds:6.1f} s  {file}")
