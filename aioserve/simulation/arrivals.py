"""Tells which request of a simulated trace comes next, and when.

In an open loop each comes when the trace says, whatever became of the one before. In a closed loop
callers react: a request that follows another comes its `think_seconds` after that one's completion
has ended, or was refused, and only those that follow none come when the trace says.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from aioserve.errors import TraceError
from aioserve.simulation.records import RequestRecord
from aioserve.traces.request import TraceRequest

__all__ = ["Arrivals"]


class Arrivals:
    """Arrivals of one run. `ordered` is the trace by arrival; raises `TraceError` where a closed
    loop has a request that follows none before it."""

    def __init__(self, ordered: list[TraceRequest], *, closed_loop: bool = False) -> None:
        self.records: list[RequestRecord] = [RequestRecord(request) for request in ordered]
        """Records of all requests, in the order of the trace."""
        self._due: list[tuple[float, int]] = []
        """Times of arrival, with places in `records`."""
        self._followers = defaultdict[int, list[int]](list)
        """Places of followers, by the number of the request that they follow."""
        seen: set[int] = set()
        for place, request in enumerate(ordered):
            if not closed_loop or request.follows is None:
                self._due.append((request.arrival_seconds, place))
            elif request.follows in seen:
                self._followers[request.follows].append(place)
            else:
                raise TraceError(
                    f"request {request.number} follows request {request.follows}, which doesn't "
                    "come before it in the trace"
                )
            seen.add(request.number)
        heapify(self._due)

    @property
    def next_seconds(self) -> float | None:
        """Time of the next arrival, as far as is known now; None without one."""
        return self._due[0][0] if self._due else None

    def take(self, now_seconds: float) -> RequestRecord | None:
        """Return the next request, if it has come by now."""
        if not self._due or self._due[0][0] > now_seconds:
            return None
        return self.records[heappop(self._due)[1]]

    def ended(self, record: RequestRecord, now_seconds: float) -> None:
        """Schedule the requests that follow it, after their time to think."""
        for place in self._followers.pop(record.request.number, ()):
            request = self.records[place].request
            arrival = now_seconds + request.think_seconds
            self.records[place].request = replace(request, arrival_seconds=arrival)
            heappush(self._due, (arrival, place))

    def by_time(self) -> tuple[RequestRecord, ...]:
        """All records, in the order in which their requests came."""
        return tuple(sorted(self.records, key=lambda record: record.request.arrival_seconds))
