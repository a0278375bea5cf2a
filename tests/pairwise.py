"""Products of three and more parameters, sampled: each two values that meet in any case meet in one
that is kept. `make test` runs those, `make test-slow` the whole products.

Most faults show with one value or with two together: Kuhn, Wallace and Gallo, "Software fault
interactions and implications for software testing" (IEEE TSE 30, 2004).
"""

from __future__ import annotations

import heapq
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from operator import itemgetter
from typing import cast

import pytest

__all__ = ["covering", "mark_the_rest_slow"]

Case = Mapping[str, Hashable]
"""Parameters and their values."""


def covering(cases: Sequence[Case]) -> set[int]:
    """Places of cases among which each pair of values that `cases` has is found.

    Greedy: each case that is taken has as many new pairs as any. The first of equals is taken, so
    the choice is the same everywhere.
    """
    first = itemgetter(0)
    pairs = [{*combinations(sorted(case.items(), key=first), 2)} for case in cases]
    left = set().union(*pairs)
    most = [(-len(of_case), place) for place, of_case in enumerate(pairs)]
    heapq.heapify(most)
    taken: set[int] = set()
    while left:
        known, place = heapq.heappop(most)
        new = pairs[place] & left
        if len(new) < -known:  # since it was counted, others have come
            heapq.heappush(most, (-len(new), place))
            continue
        taken.add(place)
        left -= new
    return taken


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of products that sampling leaves out."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for of_function in functions.values():
        cases = [varied(item) for item in of_function]
        names = {name for case in cases for name in case}
        if sum(len({case.get(name) for case in cases}) > 1 for name in names) < 3:
            continue
        kept = covering(cases)
        for place, item in enumerate(of_function):
            if place not in kept:
                item.add_marker(pytest.mark.slow)


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
