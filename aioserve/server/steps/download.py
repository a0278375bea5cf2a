"""`/trace`: what is kept of the engine's steps, in Chrome's trace format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from aioserve.server.app_state import Call
from aioserve.server.endpoint import Endpoint, Events
from aioserve.server.openai.errors import OPENAI_ERRORS
from aioserve.server.steps.recorder import num_parts
from aioserve.server.steps.trace import TRACE_BEGIN, TRACE_END, TraceEvent, Tracer, encoded

__all__ = ["TRACE"]

MAX_AT_ONCE = 2000
"""Entries and parts of steps that are written between two turns of the event loop: a few ms."""


class _Nothing:
    def close(self) -> None:
        """Nothing is held for a download."""


async def trace(call: Call, _: None) -> Events:
    name = b'attachment; filename="aioserve-trace.json"'
    headers = ((b"content-disposition", name),)
    return Events(_lines(call), _Nothing(), kind=b"application/json", headers=headers)


async def _lines(call: Call) -> AsyncGenerator[bytes, None]:
    steps = call.app_state.recorded_steps
    entries = steps.entries()
    tracer = Tracer(call.tenant)
    begun = tracer.begin(asyncio.get_running_loop().time(), steps.open_requests)
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


TRACE: Endpoint[None] = Endpoint(
    "/trace", trace, OPENAI_ERRORS, summary="The last steps, in Chrome's trace format"
)
