"""`StepRecorder`: keeps the last entries of what an engine did, for whoever looks at them.

Readers look into one log, each from where it was: what a slow one misses it misses, and nothing is
kept for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from aioserve import Observer, RequestInfo, RequestSummary, StepInfo
from aioserve.server.steps.entries import Books, Entry, OpenRequest, Stepped

__all__ = ["MAX_ENTRIES", "MAX_PARTS", "StepRecorder"]

MAX_ENTRIES = 8192
"""Kept: steps, arrivals and ends together."""
MAX_PARTS = 100_000
"""Kept in all steps together; one takes some 100 bytes."""


class StepRecorder(Observer):
    """An observer for `Engine.observe`. Costs some tens of µs a step, whatever happened before."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_parts: int = MAX_PARTS) -> None:
        self._books = Books()
        self._entries: deque[Entry] = deque()
        self._end = 0
        self._num_parts = 0
        self._max_entries = max_entries
        self._max_parts = max_parts
        self.num_readers: int = 0
        """Of the live view, kept by those who count them."""

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        for info in requests:
            self._keep(self._books.arrived(info))

    def step_finished(self, step: StepInfo) -> None:
        self._keep(self._books.stepped(step))

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        for summary in requests:
            entry = self._books.ended(summary)
            if entry is not None:
                self._keep(entry)

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._end += 1
        self._num_parts += num_parts(entry)
        while len(self._entries) > self._max_entries or self._num_parts > self._max_parts:
            self._num_parts -= num_parts(self._entries.popleft())

    @property
    def begin(self) -> int:
        """Place in the log of the oldest entry that is kept."""
        return self._end - len(self._entries)

    @property
    def end(self) -> int:
        """Place of the next one."""
        return self._end

    @property
    def open_requests(self) -> list[OpenRequest]:
        """Requests that haven't ended, in order of arrival."""
        return list(self._books.open.values())

    def entries(self, begin: int = 0) -> list[Entry]:
        """Those that are kept, from place `begin` on."""
        return list(islice(self._entries, max(0, begin - self.begin), None))

    def last_entries(self, begin: int, max_parts: int) -> list[Entry]:
        """The same, as many of the last ones as have at most `max_parts` parts together."""
        wanted = min(self._end - begin, len(self._entries))
        found: list[Entry] = []
        for entry in islice(reversed(self._entries), wanted):
            max_parts -= num_parts(entry)
            if max_parts < 0:
                break
            found.append(entry)
        found.reverse()
        return found


def num_parts(entry: Entry) -> int:
    return len(entry.parts) if type(entry) is Stepped else 0
