"""Log of what happened in an engine, in small entries that are kept, sent and traced.

`EntryObserver` makes entries from an engine's reports. It numbers requests, as their ids may
repeat, and notes the prompt tokens that needed no computing. The last entries are kept by
`StepRecorder`. Readers share one log, each with its own place. A slow reader misses dropped
entries: nothing is kept for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from aioserve import FinishReason, Observer, RequestInfo, RequestSummary, StepInfo, StepPart

__all__ = [
    "MAX_ENTRIES",
    "MAX_PARTS",
    "Arrived",
    "Ended",
    "Entry",
    "EntryObserver",
    "OpenRequest",
    "Part",
    "StepRecorder",
    "Stepped",
]


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived", gc=False):
    """Entry of a request that entered the queue."""

    number: int
    """Number of the request, from 1, and never used again."""
    request_id: str
    tenant: str | None
    prompt_tokens: int
    max_tokens: int
    num_samples: int
    arrival_seconds: float
    """Time of arrival, on the event loop's clock like all times here."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens that a step computed of one sequence."""

    number: int
    sample: int
    start_tokens: int
    num_tokens: int
    num_sampled: int
    is_decode: bool
    cached_tokens: int
    """Prompt tokens that needed no computing, in the first part since the sequence started or was
    preempted; else 0."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """Entry of a step that was committed, or failed."""

    step: int
    begin_seconds: float
    end_seconds: float
    failed: bool
    num_running: int
    num_waiting: int
    pages_free: int
    pages_fenced: int
    pages_cached: int
    pages_held_by_requests: int
    preempted: tuple[int, ...]
    """Numbers of requests, one for each sequence that gave its pages back."""
    parts: tuple[Part, ...]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended", gc=False):
    """Entry of a request that has ended, for any reason."""

    number: int
    finish_reason: FinishReason
    end_seconds: float
    completion_tokens: int
    cached_tokens: int
    first_token_seconds: float | None
    """Seconds since its arrival, as in the next field."""
    queued_seconds: float | None
    preemptions: int


Entry = Arrived | Stepped | Ended


class OpenRequest(msgspec.Struct, array_like=True):
    """A request that hasn't ended."""

    arrived: Arrived
    began_seconds: float | None = None
    """Start of the first step that computed part of it."""
    begun: set[int] = msgspec.field(default_factory=set)
    """Samples that were computed since they came or were preempted."""


class EntryObserver(Observer, ABC):
    """Observer that numbers requests and keeps the open ones. It grows only with their number."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        """Requests that have not ended, by their number."""
        self._num_arrived = 0
        self._by_id: dict[str, OpenRequest] = {}
        """Last request of each id. Earlier ones with the same id take no part in steps any more."""
        self._by_arrival: dict[tuple[str, float], list[OpenRequest]] = {}

    @abstractmethod
    def _keep(self, entry: Entry) -> None: ...

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        for info in requests:
            self._num_arrived += 1
            entry = Arrived(
                self._num_arrived,
                info.request_id,
                info.tenant,
                info.prompt_tokens,
                info.max_tokens,
                info.num_samples,
                info.arrival_seconds,
            )
            request = OpenRequest(entry)
            self._open[entry.number] = request
            self._by_id[info.request_id] = request
            key = (info.request_id, info.arrival_seconds)
            self._by_arrival.setdefault(key, []).append(request)
            self._keep(entry)

    def step_finished(self, step: StepInfo) -> None:
        """Note a step, without parts of requests that came before the first entry."""
        by_id = self._by_id
        preempted = []
        for request_id, sample in step.preempted:
            if (request := by_id.get(request_id)) is not None:
                request.begun.discard(sample)
                preempted.append(request.arrived.number)
        parts = [
            _part(request, part, step.begin_seconds)
            for part in step.parts
            if (request := by_id.get(part.request_id)) is not None
        ]
        self._keep(
            Stepped(
                step.step,
                step.begin_seconds,
                step.end_seconds,
                step.failed,
                step.num_running,
                step.num_waiting,
                step.pages_free,
                step.pages_fenced,
                step.pages_cached,
                step.pages_held_by_requests,
                tuple(preempted),
                tuple(parts),
            )
        )

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        """Note ends of requests, except those that came before the first entry."""
        for summary in requests:
            key = (summary.request_id, summary.arrival_seconds)
            alike = self._by_arrival.get(key)
            if alike is None:
                continue
            request = alike.pop(0)
            if not alike:
                del self._by_arrival[key]
            if self._by_id.get(summary.request_id) is request:
                del self._by_id[summary.request_id]
            number = request.arrived.number
            del self._open[number]
            self._keep(
                Ended(
                    number,
                    summary.finish_reason,
                    summary.arrival_seconds + summary.total_seconds,
                    summary.completion_tokens,
                    summary.cached_tokens,
                    summary.first_token_seconds,
                    summary.queued_seconds,
                    summary.preemptions,
                )
            )


def _part(request: OpenRequest, part: StepPart, begin_seconds: float) -> Part:
    cached = 0
    if part.sample not in request.begun:
        request.begun.add(part.sample)
        if request.began_seconds is None:
            request.began_seconds = begin_seconds
        if not part.is_decode:
            cached = part.start_tokens
    return Part(
        request.arrived.number,
        part.sample,
        part.start_tokens,
        part.num_tokens,
        part.num_sampled,
        part.is_decode,
        cached,
    )


MAX_ENTRIES = 8192
"""Most entries that are kept: steps, arrivals and ends together."""
MAX_PARTS = 100_000
"""Most parts that are kept, in all steps together. One takes some 100 bytes."""


class StepRecorder(EntryObserver):
    """Observer that keeps the last entries. It costs some tens of µs a step, however long it has
    run."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_parts: int = MAX_PARTS) -> None:
        super().__init__()
        self._entries: deque[Entry] = deque()
        self.end: int = 0
        """Place in the log of the next entry."""
        self._num_parts = 0
        self._max_entries = max_entries
        self._max_parts = max_parts
        self.num_readers: int = 0
        """Number of readers of the live view, which counts them."""

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self.end += 1
        self._num_parts += num_parts(entry)
        while len(self._entries) > self._max_entries or self._num_parts > self._max_parts:
            self._num_parts -= num_parts(self._entries.popleft())

    @property
    def open_requests(self) -> list[OpenRequest]:
        """Requests that haven't ended, in order of arrival."""
        return list(self._open.values())

    @property
    def entries(self) -> list[Entry]:
        """Entries that are kept, oldest first."""
        return list(self._entries)

    def last_entries(self, begin: int, max_parts: int) -> list[Entry]:
        """Return the newest entries from place `begin` on, oldest first, with at most `max_parts`
        parts together."""
        wanted = min(self.end - begin, len(self._entries))
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
