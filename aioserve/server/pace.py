"""Pauses in long work for one request, in which the event loop runs other requests.

    request ──► before(units) ──► work ──► before(units) ──► work ──► ...
                    └─ budget used up: others run first

Many small parts hold the loop for as long as one large part. So all work for one request counts
towards one budget. Requests that have used theirs up continue one at a time: a hundred of them hold
the loop no longer than one.
"""

from __future__ import annotations

import asyncio

__all__ = ["UNITS_AT_ONCE", "LoopTurns", "Pace"]

UNITS_AT_ONCE = 4096
"""Units of work between two pauses. A unit takes about a microsecond: one log-probability written,
or one field looked at."""


class LoopTurns:
    """Queue of the requests of one app that pause, first come, first served. Bound to one event
    loop."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()

    async def take(self) -> None:
        """Return once the loop has run all that was ready. One of the requests that wait here
        continues in each turn."""
        async with self._next:
            await asyncio.sleep(0)


class Pace:
    """Budget of one request, shared by every part of its work."""

    __slots__ = ("_turns", "_units")

    def __init__(self, turns: LoopTurns | None = None) -> None:
        """`turns` is the queue of the app; None makes one for this request alone."""
        self._turns = LoopTurns() if turns is None else turns
        self._units = 0

    def spend(self, units: int) -> None:
        """Count finished work."""
        self._units += units

    async def before(self, units: int) -> None:
        """Count work that follows, and let others run first if it would exceed the budget. A piece
        of more than `UNITS_AT_ONCE` begins a turn of its own."""
        if self._units and self._units + units > UNITS_AT_ONCE:
            self._units = 0
            await self._turns.take()
        self._units += units
