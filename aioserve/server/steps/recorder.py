"""What happened in an engine, entry by entry: small values that are kept, sent and traced.

`EntryObserver` makes entries of what it is told. Requests have numbers there, as their ids may come
again, and parts of a prompt that needed no computing are found. `StepRecorder` keeps the last
entries. Readers look into one log, each from where it was: what a slow one misses it misses, and
nothing is kept for it.
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
    """A request entered the queue."""

    number: int
    """Number of the request, from 1 on; none comes twice."""
    request_id: str
    tenant: str | None
    prompt_tokens: int
    max_tokens: int
    num_samples: int
    arrival_seconds: float
    """This and other times are on the clock of the event loop."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step computed of one sequence."""

    number: int
    sample: int
    start_tokens: int
    num_tokens: int
    num_sampled: int
    is_decode: bool
    cached_tokens: int
    """Where its sequence began with it, or began again: so many tokens of the prompt needed no
    computing."""


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="step", gc=False):
    """A step was committed, or failed."""

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
    """A request has ended, for whatever reason."""

    number: int
    finish_reason: FinishReason
    end_seconds: float
    completion_tokens: int
    cached_tokens: int
    first_token_seconds: float | None
    """From its arrival, as is what follows."""
    queued_seconds: float | None
    preemptions: int


Entry = Arrived | Stepped | Ended


class OpenRequest(msgspec.Struct, array_like=True):
    """A request that hasn't ended."""

    arrived: Arrived
    began_seconds: float | None = None
    """When the step began that computed the first of it."""
    begun: set[int] = msgspec.field(default_factory=set)
    """Samples that were computed since they came or were preempted."""


class EntryObserver(Observer, ABC):
    """Numbers requests, and knows those that are open. As big as what the engine has at once."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        """Requests that have not ended, by their number."""
        self._num_arrived = 0
        self._by_id: dict[str, OpenRequest] = {}
        """The last of several with one id: the others have no part in a step any more."""
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
        """Parts of requests that came before the first entry are left out."""
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
        """Requests that came before the first entry are left out."""
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
"""Kept: steps, arrivals and ends together."""
MAX_PARTS = 100_000
"""Kept in all steps together; one takes some 100 bytes."""


class StepRecorder(EntryObserver):
    """An observer for `Engine.observe`. Costs some tens of µs a step, whatever happened before."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES, max_parts: int = MAX_PARTS) -> None:
        super().__init__()
        self._entries: deque[Entry] = deque()
        self.end: int = 0
        """Place in the log of the next entry."""
        self._num_parts = 0
        self._max_entries = max_entries
        self._max_parts = max_parts
        self.num_readers: int = 0
        """Readers of the live view, which counts them."""

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
        """The entries that are kept."""
        return list(self._entries)

    def last_entries(self, begin: int, max_parts: int) -> list[Entry]:
        """Return the last of those from place `begin` on, as many as have at most `max_parts` parts
        together."""
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
