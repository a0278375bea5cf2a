"""The event loop of an engine: checks that callers run there, and turns for floods of requests."""

from __future__ import annotations

import asyncio
import os
from collections import deque

from aioserve.errors import WrongLoopError

__all__ = ["SubmissionTurns", "check_on", "check_process", "running_loop"]

SUBMITTED_AT_ONCE = 32
"""Requests between two turns of the event loop. A short prompt takes about 100 µs to check and
encode."""


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the asyncio event loop of this thread; None if there is none, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_process(pid: int, owner: str) -> None:
    """Raise `WrongLoopError` unless this is process `pid`, which `owner` belongs to.

    A forked process has the same objects, but none of their threads.
    """
    if os.getpid() != pid:
        raise WrongLoopError(
            f"{owner} belongs to process {pid}, and this is process {os.getpid()}, forked since: "
            "enter an engine of its own here"
        )


def check_on(loop: asyncio.AbstractEventLoop, pid: int, owner: str) -> None:
    """Raise `WrongLoopError` unless this is process `pid` and runs `loop`, which `owner` belongs
    to."""
    check_process(pid, owner)
    running = running_loop()
    if running is None:
        raise WrongLoopError(f"{owner} belongs to an event loop of asyncio, and none runs here")
    if running is not loop:
        raise WrongLoopError(f"{owner} belongs to another event loop than the one that runs here")


class SubmissionTurns:
    """Turns of the event loop for the requests of one engine, first come, first served.

    Only some get a turn at a time, so that thousands at once don't block the loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._num_left = SUBMITTED_AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_counting = False

    async def take(self) -> None:
        """Wait for the caller's turn. Returns at once unless many came before."""
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
        """Give out new turns, after the loop has run other callbacks."""
        self._num_left = SUBMITTED_AT_ONCE
        while self._waiting and self._num_left:
            turn = self._waiting.popleft()
            if not turn.done():  # or its task was cancelled
                turn.set_result(None)
                self._num_left -= 1
        self._is_counting = self._num_left < SUBMITTED_AT_ONCE
        if self._is_counting:
            self._loop.call_soon(self._begin_anew)
