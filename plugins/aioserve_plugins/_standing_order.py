"""Order of all waiting requests, kept from step to step while ranks change with time.

Ranking thousands anew in each step takes longer than the step. So pairs are compared in a
tournament, and each winner is kept for as long as it is known to win. This is a kinetic tournament
(Basch, Guibas and Hershberger, "Data Structures for Mobile Data", 1999). A step compares only the
pairs whose time is up, and those on the paths of arrivals and departures.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ["StandingOrder"]

T = TypeVar("T")

Rank = tuple[Any, ...]
"""Rank: the least goes first; no two are equal."""


class StandingOrder(Generic[T]):
    """Keeps elements in the order of `rank(one, now)`.

    `holds_until(first, second, now)` returns the time until which the first stays before the
    second, at least `now`, unless one of them is put in anew.
    """

    def __init__(
        self,
        rank: Callable[[T, int], Rank],
        holds_until: Callable[[T, T, int], float],
    ) -> None:
        self._rank = rank
        self._holds_until = holds_until
        self._places: dict[T, int] = {}
        """Leaves of the tournament."""
        self._free: list[int] = [1]
        self._size = 1
        """Number of leaves: nodes `_size` to `2 * _size - 1`. Node i has the children 2 * i and 2 *
        i + 1."""
        self._winners: list[T | None] = [None, None]
        """Winner of each node; None if nothing is below."""
        self._until: list[float] = [math.inf, math.inf]
        """Time when the first of the nodes there and below has to be decided anew."""
        self._touched: set[int] = set()
        """Leaves that have changed since the nodes above were decided."""

    def __len__(self) -> int:
        return len(self._places)

    def put(self, one: T) -> None:
        """Put in an element that is new, or has another rank than before."""
        place = self._places.get(one)
        if place is None:
            if not self._free:
                self._grow()
            place = self._places[one] = self._free.pop()
            self._winners[place] = one
        self._touched.add(place)

    def remove(self, one: T) -> None:
        """Remove an element. Does nothing if it isn't in."""
        place = self._places.pop(one, None)
        if place is None:
            return
        self._winners[place] = None
        self._free.append(place)
        self._touched.add(place)

    def ranked(self, now: int) -> Iterator[tuple[Rank, T]]:
        """Yield all with their ranks, in order, as long as none is put in or removed. `now` never
        decreases."""
        self._decide(now)
        heap: list[tuple[Rank, int, T]] = []

        def push(node: int) -> None:
            one = self._winners[node]
            if one is not None:
                heapq.heappush(heap, (self._rank(one, now), node, one))

        push(1)
        while heap:
            rank, node, one = heapq.heappop(heap)
            yield rank, one
            while node < self._size:
                node *= 2
                if self._winners[node] is one:
                    push(node + 1)
                else:
                    push(node)
                    node += 1

    # -- decisions

    def _decide(self, now: int) -> None:
        nodes = {place // 2 for place in self._touched if place > 1}
        self._touched.clear()
        while nodes:  # all of one level, the lowest first
            for node in nodes:
                self._decide_node(node, now)
            nodes = {node // 2 for node in nodes if node > 1}
        if self._until[1] <= now:
            self._decide_overdue(1, now)

    def _decide_overdue(self, node: int, now: int) -> None:
        """Decide an overdue node anew, after those below it."""
        for child in (2 * node, 2 * node + 1):
            if child < self._size and self._until[child] <= now:
                self._decide_overdue(child, now)
        self._decide_node(node, now)

    def _decide_node(self, node: int, now: int) -> None:
        left, right = 2 * node, 2 * node + 1
        first, second = self._winners[left], self._winners[right]
        until = min(self._until[left], self._until[right])
        if first is None or second is None:
            first = second if first is None else first
        else:
            if self._rank(second, now) < self._rank(first, now):
                first, second = second, first
            until = min(until, self._holds_until(first, second, now))
        self._winners[node], self._until[node] = first, until

    def _grow(self) -> None:
        """Double the number of leaves."""
        leaves = self._winners[self._size :]
        old, size = self._size, 2 * self._size
        self._size = size
        self._winners = [None] * size + leaves + [None] * old
        self._until = [math.inf] * (2 * size)
        self._places = {one: place + size - old for one, place in self._places.items()}
        self._free = list(range(2 * size - 1, size + old - 1, -1))
        self._touched = set(self._places.values())
