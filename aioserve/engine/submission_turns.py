"""Requests that come all at once are submitted some at a time, so that none of them holds the event
loop for the others.

Knows tasks and the loop; must not know what is submitted.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["SubmissionTurns"]

SUBMITTED_AT_ONCE = 32
"""Between two turns of the event loop. A short prompt takes some 100 µs to check and encode."""


class SubmissionTurns:
    """Turns of one engine, first come, first served. For its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_left = SUBMITTED_AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False

    async def take(self) -> None:
        """Return when it is the caller's turn: at once, unless many came before it."""
        if not self._is_counting:
            self._is_counting = True
            self._loop.call_soon(self._begin_anew)
        if self._num_left and not self._waiting:
            self._num_left -= 1
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _begin_anew(self) -> None:
        """The loop had a turn for others."""
        self._num_left = SUBMITTED_AT_ONCE
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # or its task was cancelled
                turn.set_result(None)
                self._num_left -= 1
        self._is_counting = self._num_left < SUBMITTED_AT_ONCE
        if self._is_counting:
            self._loop.call_soon(self._begin_anew)
