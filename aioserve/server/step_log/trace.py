"""Entries as events of Chrome's trace format, which Perfetto opens, and files of them.

Process 1 has a track of steps, and counters of tokens, pages and requests. Process 2 has the
requests. A request takes the first track that is free at its arrival. Its phases (queued, prefill,
decode, preempted) lie within it.

The format is https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; of
its two forms this is the array, which may lack its end. A file is written while the engine serves,
whole lines at a time, so that a truncated one opens as well. The event loop takes notes, and a
thread writes them as text.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from aioserve import ConfigError
from aioserve.arguments import shown
from aioserve.engine.interface import EngineLike
from aioserve.server.step_log.recorder import (
    Arrived,
    Ended,
    Entry,
    EntryObserver,
    OpenRequest,
    Part,
    Stepped,
    num_parts,
)
from aioserve.timings import loop_seconds

__all__ = [
    "TRACE_BEGIN",
    "TRACE_END",
    "TraceEvent",
    "Tracer",
    "check_trace_file",
    "encoded",
    "tracing",
]

logger: logging.Logger = logging.getLogger(__name__)

TRACE_BEGIN = b"["
TRACE_END = b"\n]\n"

ENGINE, REQUESTS = 1, 2
MAX_RUN_SECONDS = 1.0
"""Longest time that decodes of a request are drawn as one slice. A trace that is cut off lacks
little."""


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """Event of a trace. Times are in µs."""

    name: str
    ph: str
    """Kind of event. B and E begin and end a span around others, and X is a whole span. C is a
    counter, i is a moment, and M names a track."""
    ts: int
    pid: int
    tid: int
    dur: int | None = None
    s: str | None = None
    args: dict[str, Any] | None = None


def encoded(events: Iterable[TraceEvent], *, first: bool) -> bytes:
    """Encode one line for each event. JSON is `TRACE_BEGIN`, any number of whole lines and
    `TRACE_END`."""
    lines = [b"\n" + msgspec.json.encode(event) for event in events]
    text = b",".join(lines)
    return text if first or not lines else b"," + text


class _Open:
    """Request on its track."""

    __slots__ = ("decoded", "end", "lane", "name", "run_begin", "run_step", "waits")

    def __init__(self, lane: int, name: str, arrival: int) -> None:
        self.lane = lane
        self.name = name
        self.end = arrival
        """End of its last computed part."""
        self.waits: str | None = "queued"
        """State since `end`, like "queued"; None if it is being computed."""
        self.run_begin = 0
        self.run_step = -1
        """Step that was last added to a run of decodes; -1 without a run."""
        self.decoded = 0


class Tracer:
    """Converts entries, given in order, to events. `tenant` sees only the names of its own
    requests, and None sees all names."""

    def __init__(self, tenant: str | None = None) -> None:
        self._tenant = tenant
        self._open: dict[int, _Open] = {}
        self._lanes: list[int | None] = []
        """Time from which each track is free, in µs; None while it is in use."""
        self._steps = 0

    def begin(self, now_seconds: float, known: Iterable[OpenRequest] = ()) -> list[TraceEvent]:
        """Return the names of the tracks, and the requests that came before the first entry."""
        now = _us(now_seconds)
        events = [
            TraceEvent("process_name", "M", now, ENGINE, 0, args={"name": "engine"}),
            TraceEvent("thread_name", "M", now, ENGINE, 1, args={"name": "steps"}),
            TraceEvent("process_name", "M", now, REQUESTS, 0, args={"name": "requests"}),
        ]
        for request in known:
            events += self._arrived(request.arrived)
            if request.began_seconds is not None:
                begun = self._open[request.arrived.number]
                events += _slice(begun, "queued", begun.end, _us(request.began_seconds))
                begun.waits, begun.end = None, _us(request.began_seconds)
        return events

    def events(self, entry: Entry) -> list[TraceEvent]:
        if isinstance(entry, Stepped):
            return self._stepped(entry)
        return self._arrived(entry) if isinstance(entry, Arrived) else self._ended(entry)

    def finish(self) -> list[TraceEvent]:
        """Return the events of unfinished runs, once no more entries come."""
        return [event for request in self._open.values() for event in _end_run(request)]

    def _arrived(self, entry: Arrived) -> list[TraceEvent]:
        if entry.number in self._open:
            return []
        arrival = _us(entry.arrival_seconds)
        events = []
        lane = next(
            (i for i, free in enumerate(self._lanes) if free is not None and free <= arrival), None
        )
        if lane is None:
            lane = len(self._lanes)
            self._lanes.append(None)
            name = {"name": f"requests {lane + 1}"}
            events.append(TraceEvent("thread_name", "M", arrival, REQUESTS, lane + 1, args=name))
        self._lanes[lane] = None
        is_theirs = self._tenant is not None and entry.tenant != self._tenant
        name = f"request {entry.number}" if is_theirs else entry.request_id
        self._open[entry.number] = _Open(lane, name, arrival)
        about = {
            "number": entry.number,
            "prompt_tokens": entry.prompt_tokens,
            "max_tokens": entry.max_tokens,
            "samples": entry.num_samples,
        }
        events.append(TraceEvent(name, "B", arrival, REQUESTS, lane + 1, args=about))
        return events

    def _stepped(self, entry: Stepped) -> list[TraceEvent]:
        self._steps += 1
        begin, end = _us(entry.begin_seconds), _us(entry.end_seconds)
        events = self._counted(entry, begin, end)
        for number in entry.preempted:
            request = self._open.get(number)
            if request is not None and request.waits is None:
                events += _end_run(request)
                request.waits = "preempted"
        by_request: dict[int, list[Part]] = {}
        for part in entry.parts:
            by_request.setdefault(part.number, []).append(part)
        for number, parts in by_request.items():
            if (request := self._open.get(number)) is not None:
                events += self._computed(request, parts, begin, end)
        return events

    def _counted(self, entry: Stepped, begin: int, end: int) -> list[TraceEvent]:
        decoded = sum([part.num_tokens for part in entry.parts if part.is_decode])
        prefilled = sum([part.num_tokens for part in entry.parts]) - decoded
        step = {
            "step": entry.step,
            "sequences": len(entry.parts),
            "prefill_tokens": prefilled,
            "decode_tokens": decoded,
            "preempted": len(entry.preempted),
        }
        if entry.failed:
            step["failed"] = True
        pages = {
            "held by requests": entry.pages_held_by_requests,
            "cached": entry.pages_cached,
            "fenced": entry.pages_fenced,
            "free": entry.pages_free,
        }
        tokens = {"prefill": prefilled, "decode": decoded}
        requests = {"running": entry.num_running, "waiting": entry.num_waiting}
        name = "failed step" if entry.failed else "step"
        return [
            TraceEvent(name, "X", begin, ENGINE, 1, dur=max(0, end - begin), args=step),
            TraceEvent("tokens", "C", begin, ENGINE, 0, args=tokens),
            TraceEvent("pages", "C", end, ENGINE, 0, args=pages),
            TraceEvent("requests", "C", end, ENGINE, 0, args=requests),
        ]

    def _computed(
        self, request: _Open, parts: list[Part], begin: int, end: int
    ) -> list[TraceEvent]:
        begin = max(begin, request.end)
        events = []
        tokens = sum([part.num_tokens for part in parts])
        is_decode = all(part.is_decode for part in parts)
        follows = request.run_step == self._steps - 1
        if not is_decode or not follows or end - request.run_begin > MAX_RUN_SECONDS * 1e6:
            events += _end_run(request)
        if request.waits is not None:
            events += _slice(request, request.waits, request.end, begin)
            request.waits = None
        if is_decode:
            if request.run_step < 0:
                request.run_begin, request.decoded = begin, 0
            request.run_step = self._steps
            request.decoded += tokens
        else:
            cached = sum([part.cached_tokens for part in parts])
            if cached:
                track = (REQUESTS, request.lane + 1)
                about = {"cached_tokens": cached}
                events.append(TraceEvent("cached", "i", begin, *track, s="t", args=about))
            about = {"tokens": tokens, "from": parts[0].start_tokens, "cached_tokens": cached}
            events += _slice(request, "prefill", begin, end, about)
        request.end = max(request.end, end)
        return events

    def _ended(self, entry: Ended) -> list[TraceEvent]:
        request = self._open.pop(entry.number, None)
        if request is None:
            return []
        end = max(_us(entry.end_seconds), request.end)
        events = _end_run(request)
        if request.waits is not None:
            events += _slice(request, request.waits, request.end, end)
        about = {
            "finish_reason": entry.finish_reason.value,
            "completion_tokens": entry.completion_tokens,
            "cached_tokens": entry.cached_tokens,
            "first_token_seconds": entry.first_token_seconds,
            "preemptions": entry.preemptions,
        }
        events.append(TraceEvent(request.name, "E", end, REQUESTS, request.lane + 1, args=about))
        self._lanes[request.lane] = end
        return events


def _end_run(request: _Open) -> list[TraceEvent]:
    if request.run_step < 0:
        return []
    request.run_step = -1
    about = {"tokens": request.decoded}
    return _slice(request, "decode", request.run_begin, request.end, about)


def _slice(
    request: _Open, name: str, begin: int, end: int, args: dict[str, Any] | None = None
) -> list[TraceEvent]:
    """Return a slice, or no event if it took no time."""
    if end <= begin:
        return []
    return [TraceEvent(name, "X", begin, REQUESTS, request.lane + 1, dur=end - begin, args=args)]


def _us(seconds: float) -> int:
    return int(seconds * 1e6)


PERIOD_SECONDS = 0.5
MAX_PENDING = 500_000
"""Most entries and parts that wait to be written. A disk that is further behind ends the trace."""


def check_trace_file(path: str | Path) -> None:
    """Raise `ConfigError` for a pipe or a socket. Opening or writing it may wait for a reader, and
    then the end of the engine would wait too."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # opening it says what is wrong, or makes the file
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise ConfigError(
            f"trace must be a file, got {shown(str(path))}, which is a pipe or a socket",
            argument="trace",
            value=str(path),
        )


@asynccontextmanager
async def tracing(
    engine: EngineLike, path: str | Path, *, max_pending: int = MAX_PENDING
) -> AsyncIterator[None]:
    """Write a trace of `engine` to the file `path` during the block, in Chrome's trace format.

    A file of that name is overwritten. Events are in the file about a second later. Raises
    `OSError` if it can't be opened, and `ConfigError` for a pipe or a socket. Writing may fail
    later, or fall behind by more than `max_pending` entries and parts of steps. Then the log says
    so, the trace ends there, and the engine goes on.
    """
    await asyncio.to_thread(check_trace_file, path)
    with await asyncio.to_thread(open, path, "wb", buffering=0) as file:
        notes = _Notes(max_pending)
        now = loop_seconds()
        trace = await asyncio.to_thread(_TraceFile, file, now)
        stop = engine.observe(notes)
        task = asyncio.create_task(_write_on(notes, trace, stop, path))
        try:
            yield
        finally:
            stop()
            notes.closed.set()
            await task


async def _write_on(
    notes: _Notes, trace: _TraceFile, stop: Callable[[], None], path: str | Path
) -> None:
    try:
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(notes.closed.wait(), PERIOD_SECONDS)
            is_last = notes.closed.is_set()
            await asyncio.to_thread(trace.write, notes.take(), is_last=is_last)
    except OSError as error:
        logger.error("the trace %s ends here: %s", path, error)
    else:
        if notes.overflowed:
            logger.error("the trace %s ends here: writing it fell behind", path)
    finally:
        stop()


class _Notes(EntryObserver):
    """Entries that wait to be written."""

    def __init__(self, max_pending: int) -> None:
        super().__init__()
        self._entries: list[Entry] = []
        self._num_pending = 0
        self._max_pending = max_pending
        self.closed = asyncio.Event()
        self.overflowed = False

    def _keep(self, entry: Entry) -> None:
        self._num_pending += 1 + num_parts(entry)
        if self._num_pending > self._max_pending:
            self.overflowed = True
            self.closed.set()
        if not self.closed.is_set():
            self._entries.append(entry)

    def take(self) -> list[Entry]:
        entries, self._entries, self._num_pending = self._entries, [], 0
        return entries


class _TraceFile:
    """File of a trace, written by one thread at a time."""

    def __init__(self, file: BinaryIO, now_seconds: float) -> None:
        self._file = file
        self._tracer = Tracer()
        self._put(TRACE_BEGIN + encoded(self._tracer.begin(now_seconds), first=True))

    def write(self, entries: Sequence[Entry], *, is_last: bool) -> None:
        events: list[TraceEvent] = []
        for entry in entries:
            events += self._tracer.events(entry)
        if is_last:
            events += self._tracer.finish()
        self._put(encoded(events, first=False) + (TRACE_END if is_last else b""))

    def _put(self, text: bytes) -> None:
        while text:
            text = text[self._file.write(text) :]
