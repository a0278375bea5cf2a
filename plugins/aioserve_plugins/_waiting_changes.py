"""Differences between the waiting requests of one step and the next: which came, and which left.

Thousands may wait, and a step starts a few of them. A policy that keeps data about each request
wants to hear of the few, but is given all waiting ones, in order of arrival.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from aioserve import RequestView

__all__ = ["WaitingChanges", "by_arrival", "waits"]

SHORT = 8


class WaitingChanges:
    def __init__(self) -> None:
        self._seen: tuple[RequestView, ...] = ()
        """Requests that waited at the last look."""
        self._forgotten: dict[RequestView, None] = {}

    def look(self, waiting: Sequence[RequestView]) -> tuple[list[RequestView], list[RequestView]]:
        """Requests that came and requests that left since the last look, in order of arrival."""
        now = tuple(waiting)  # the same object if it is one already
        if now is self._seen and not self._forgotten:
            return [], []
        came, gone = _differences(self._seen, now, self._forgotten)
        if self._forgotten:
            gone = [request for request in gone if request not in self._forgotten]
            back = {request for request in self._forgotten if waits(request, now)}
            came = sorted(back.union(came), key=by_arrival) if back else came
        self._seen, self._forgotten = now, {}
        return came, gone

    def forget(self, requests: Iterable[RequestView]) -> None:
        """Forget requests that have started or ended. They aren't reported as gone, and if they
        wait again, they have come."""
        self._forgotten.update(dict.fromkeys(requests))
        if 2 * len(self._forgotten) > len(self._seen):  # none may come for hours
            self._seen = tuple([r for r in self._seen if r not in self._forgotten])
            self._forgotten = {}


def by_arrival(request: RequestView) -> int:
    return request.arrival_index


def waits(request: RequestView, waiting: Sequence[RequestView]) -> bool:
    """True if a request is in `waiting`, which is in order of arrival."""
    place = bisect_left(waiting, request.arrival_index, key=by_arrival)
    return place < len(waiting) and waiting[place] is request


def _differences(
    before: tuple[RequestView, ...], after: tuple[RequestView, ...], cuts: Iterable[RequestView]
) -> tuple[list[RequestView], list[RequestView]]:
    """Requests only in `after`, and requests only in `before`.

    Both are cut around `cuts`, and then in halves until parts are short or equal. Comparing equal
    parts is fast.
    """
    came: list[RequestView] = []
    gone: list[RequestView] = []
    parts: list[tuple[int, int, int, int]] = []
    begin = first = 0
    for index in sorted({one.arrival_index + i for one in cuts for i in (0, 1)}):
        end = bisect_left(before, index, begin, key=by_arrival)
        last = bisect_left(after, index, first, key=by_arrival)
        parts.append((begin, end, first, last))
        begin, first = end, last
    parts = [(begin, len(before), first, len(after)), *reversed(parts)]
    while parts:
        begin, end, first, last = parts.pop()
        old, new = before[begin:end], after[first:last]
        if old == new:
            continue
        if min(len(old), len(new)) <= SHORT:
            both = set(old).intersection(new)
            came += [request for request in new if request not in both]
            gone += [request for request in old if request not in both]
            continue
        middle = (begin + end) // 2
        place = bisect_left(after, before[middle].arrival_index, first, last, key=by_arrival)
        parts += [(middle, end, place, last), (begin, middle, first, place)]
    return came, gone
