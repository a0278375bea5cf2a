"""Writes a trace while the engine serves: whole lines at a time, so that a file that was cut off
opens as well.

The event loop takes notes; a thread makes text of them and writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

from aioserve import Engine, Observer, RequestInfo, RequestSummary, StepInfo
from aioserve.server.steps.entries import Books, Entry
from aioserve.server.steps.recorder import num_parts
from aioserve.server.steps.trace import TRACE_BEGIN, TRACE_END, TraceEvent, Tracer, encoded

__all__ = ["tracing"]

logger: logging.Logger = logging.getLogger(__name__)

PERIOD_SECONDS = 0.5
MAX_PENDING = 500_000
"""Entries and parts that wait to be written. A disk that leaves so many behind ends the trace."""


@asynccontextmanager
async def tracing(
    engine: Engine, path: str | Path, *, max_pending: int = MAX_PENDING
) -> AsyncIterator[None]:
    """Write what `engine` does meanwhile to the file `path`, which is made anew: Chrome's trace
    format. What happened is in the file about a second later.

    Raises `OSError` if it can't be opened. Where writing fails later, or falls behind by more than
    `max_pending` entries and parts of steps, the log says so, the trace ends there, and the engine
    goes on.
    """
    with await asyncio.to_thread(open, path, "wb", buffering=0) as file:
        notes = _Notes(max_pending)
        now = asyncio.get_running_loop().time()
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


class _Notes(Observer):
    """What is to be written."""

    def __init__(self, max_pending: int) -> None:
        self._books = Books()
        self._entries: list[Entry] = []
        self._num_pending = 0
        self._max_pending = max_pending
        self.closed = asyncio.Event()
        self.overflowed = False

    def arrived(self, requests: Sequence[RequestInfo]) -> None:
        for info in requests:
            self._note(self._books.arrived(info))

    def step_finished(self, step: StepInfo) -> None:
        self._note(self._books.stepped(step))

    def finished(self, requests: Sequence[RequestSummary]) -> None:
        for summary in requests:
            entry = self._books.ended(summary)
            if entry is not None:
                self._note(entry)

    def _note(self, entry: Entry) -> None:
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
    """For one thread at a time."""

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
