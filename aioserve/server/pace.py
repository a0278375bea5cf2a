"""Turns of the event loop in the midst of long work for one request.

    request ──► before(units) ──► work ──► before(units) ──► work ──► ...
                    └─ enough was done: others run first

A request of many small parts holds the loop as one of a large part does. So all that is done for
one request counts towards one budget, whatever it is. And of the requests that have used theirs up,
one at a time goes on: a hundred of them hold the loop no longer than one.

Knows nothing of what is done.
"""

from __future__ import annotations

import asyncio

__all__ = ["UNITS_AT_ONCE", "LoopTurns", "Pace"]

UNITS_AT_ONCE = 4096
"""Units of work between two turns of the loop. A unit takes about a microsecond: one
log-probability written, one field looked at."""


class LoopTurns:
    """Turns for the requests of one app, first come, first served. For one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Lock()

    async def take(self) -> None:
        """Return when the loop has run all that was ready, and no other request that waits here
        goes on in the same turn."""
        async with self._next:
            await asyncio.sleep(0)


class Pace:
    """The budget of one request, which every part of its work uses."""

    __slots__ = ("_turns", "_units")

    def __init__(self, turns: LoopTurns | None = None) -> None:
        """`turns` are those of the app; None: of this request alone."""
        self._turns = LoopTurns() if turns is None else turns
        self._units = 0

    def spend(self, units: int) -> None:
        """Count work that is done."""
        self._units += units

    async def before(self, units: int) -> None:
        """Count work that follows, and let others run first where there would be too much at once.
        What takes more than `UNITS_AT_ONCE` in one piece begins with a turn of its own."""
        if self._units and self._units + units > UNITS_AT_ONCE:
            self._units = 0
            await self._turns.take()
        self._units += units
