"""Whether the caller is where it must be: on the event loop of an engine."""

from __future__ import annotations

import asyncio

from aioserve.errors import WrongLoopError

__all__ = ["check_on", "running_loop"]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of asyncio that runs in this thread; None where none does, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_on(loop: asyncio.AbstractEventLoop, owner: str) -> None:
    """Raise `WrongLoopError` unless `loop`, to which `owner` belongs, is the one that runs here."""
    running = running_loop()
    if running is None:
        raise WrongLoopError(f"{owner} belongs to an event loop of asyncio, and none runs here")
    if running is not loop:
        raise WrongLoopError(f"{owner} belongs to another event loop than the one that runs here")
