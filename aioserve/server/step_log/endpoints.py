"""Endpoints that show the engine's work.

`/live` sends it while it happens, as server-sent events a few times a second. Each event is a whole
`Update`. The first event has all that a reader must know. So does the next one after a slow reader
has missed entries that were dropped. The server keeps only the reader's place in the log.

`/trace` returns the kept steps in Chrome's trace format.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

import msgspec

from aioserve.engine.stats import EngineStats, PhaseStats
from aioserve.server.app_state import Call
from aioserve.server.endpoint import Events, endpoint
from aioserve.server.errors import ApiError
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.step_log.recorder import Arrived, Entry, OpenRequest, StepRecorder, num_parts
from aioserve.server.step_log.trace import TRACE_BEGIN, TRACE_END, TraceEvent, Tracer, encoded
from aioserve.timings import loop_seconds

__all__ = ["About", "Numbers", "Reader", "Update", "live", "live_now", "trace"]

MAX_AT_ONCE = 2000
"""Entries and parts of steps that are written between two turns of the event loop: a few ms."""


@endpoint(OPENAI_ERRORS, "/trace", "The last steps, in Chrome's trace format")
async def trace(call: Call, _: None) -> Events:
    name = b'attachment; filename="aioserve-trace.json"'
    headers = ((b"content-disposition", name),)
    return Events(_lines(call), kind=b"application/json", headers=headers)


async def _lines(call: Call) -> AsyncGenerator[bytes, None]:
    steps = call.app_state.recorded_steps
    entries = steps.entries
    tracer = Tracer(call.tenant)
    begun = tracer.begin(loop_seconds(), steps.open_requests)
    yield TRACE_BEGIN + encoded(begun, first=True)
    events: list[TraceEvent] = []
    cost = 0
    for entry in entries:
        events += tracer.events(entry)
        cost += 1 + num_parts(entry)
        if cost > MAX_AT_ONCE:
            yield encoded(events, first=False)
            await asyncio.sleep(0)
            events, cost = [], 0
    yield encoded([*events, *tracer.finish()], first=False) + TRACE_END


PERIOD_SECONDS = 0.25
QUIET_SECONDS = 2.0
"""Seconds between updates while nothing happens."""
MAX_SENT_PARTS = 20_000
"""Most parts of steps in one update. Older parts are lost to the reader."""


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that don't change while the server runs."""

    models: tuple[str, ...]
    has_chat_template: bool
    max_model_len: int
    pages_total: int
    page_size: int


class KnownRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request that hasn't ended: its arrival, and the start of the first step that computed it."""

    arrived: Arrived
    began_seconds: float | None


class Numbers(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `EngineStats` by their names there."""

    requests_finished_total: Mapping[str, int]
    tokens_per_step: float
    fill_ratio: float | None
    prefill: PhaseStats
    decode: PhaseStats
    latency_mean_seconds: float | None
    latency_variance_square_seconds: float | None
    service_gap_seconds: float | None

    @classmethod
    def of(cls, stats: EngineStats) -> Numbers:
        return cls(**{name: getattr(stats, name) for name in cls.__struct_fields__})


class Update(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of one event of `/live`."""

    now_seconds: float
    """Time now, on the clock of all times here."""
    state: str
    """State of the engine."""
    log: list[Entry]
    """Entries since the last update, as arrays that begin with "arrived", "step" or "ended"."""
    num_lost: int = 0
    """Number of entries before these that the reader has missed."""
    open: list[KnownRequest] | None = None
    """Every request that hasn't ended, in the first update and after missed entries; else None."""
    about: About | None = None
    """Given in the first update only."""
    drafted_tokens: int = 0
    """Draft tokens that steps have verified since the start."""
    accepted_tokens: int = 0
    """Draft tokens among them that were right."""
    numbers: Numbers
    """Statistics since the start."""


class Reader:
    """Reader of the live view, on behalf of `call`. It sees no names of other tenants' requests."""

    def __init__(self, call: Call, steps: StepRecorder) -> None:
        self._call = call
        self._steps = steps
        self._place = 0
        self._is_new = True

    def update(self, now_seconds: float) -> Update:
        steps, engine = self._steps, self._call.engine
        stats = engine.stats()
        log = steps.last_entries(self._place, MAX_SENT_PARTS)
        num_lost = steps.end - self._place - len(log)
        knows_all = not (num_lost or self._is_new)
        update = Update(
            now_seconds=now_seconds,
            state=engine.state,
            log=[self._named(entry) if type(entry) is Arrived else entry for entry in log],
            num_lost=0 if self._is_new else num_lost,
            open=None if knows_all else [self._known(request) for request in steps.open_requests],
            about=about(self._call) if self._is_new else None,
            drafted_tokens=sum(stats.tokens_drafted_total),
            accepted_tokens=sum(stats.tokens_accepted_total),
            numbers=Numbers.of(stats),
        )
        self._place, self._is_new = steps.end, False
        return update

    @property
    def has_news(self) -> bool:
        return self._steps.end > self._place

    def close(self) -> None:
        self._steps.num_readers -= 1

    def _known(self, request: OpenRequest) -> KnownRequest:
        return KnownRequest(self._named(request.arrived), request.began_seconds)

    def _named(self, entry: Arrived) -> Arrived:
        tenant = self._call.tenant
        if tenant is None or entry.tenant == tenant:
            return entry
        return msgspec.structs.replace(entry, request_id="", tenant=None)


def about(call: Call) -> About:
    engine = call.engine
    limits = call.facts.limits
    return About(
        models=call.app_state.model_names,
        has_chat_template=call.facts.has_chat_template,
        max_model_len=limits.max_model_len,
        pages_total=limits.num_pages,
        page_size=engine.config.page_size,
    )


@endpoint(OPENAI_ERRORS, "/live/now", "What the engine did lately")
async def live_now(call: Call, _: None) -> Update:
    return Reader(call, call.app_state.recorded_steps).update(loop_seconds())


@endpoint(OPENAI_ERRORS, "/live", "What the engine does, as it does it", streams="always")
async def live(call: Call, _: None) -> Events:
    steps, most = call.app_state.recorded_steps, call.settings.max_live_readers
    if steps.num_readers >= most:
        message = f"{most} look at the live view already: as many as may"
        raise ApiError(503, message, code="too_many_readers", retry_after_seconds=10)
    steps.num_readers += 1
    reader = Reader(call, steps)
    return Events(_updates(call, reader), reader)


async def _updates(call: Call, reader: Reader) -> AsyncGenerator[bytes, None]:
    """Yield updates until the engine takes no more requests, so that no reader keeps a server from
    ending."""
    told = 0.0
    while True:
        now = loop_seconds()
        if reader.has_news or now - told >= QUIET_SECONDS or call.engine.state != "open":
            told = now
            yield b"data: " + msgspec.json.encode(reader.update(now)) + b"\n\n"
        if call.engine.state != "open":
            return
        await asyncio.sleep(PERIOD_SECONDS)
