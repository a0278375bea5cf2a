"""Whether the caller is where it must be: in the process and on the event loop of an engine."""

from __future__ import annotations

import asyncio
import os

from aioserve.errors import WrongLoopError

__all__ = ["check_on", "check_process", "running_loop"]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of asyncio that runs in this thread; None where none does, as under trio."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_process(pid: int, owner: str) -> None:
    """Raise `WrongLoopError` unless this is the process `pid`, to which `owner` belongs. One that
    was forked has the same objects, and none of the threads that work for them."""
    if os.getpid() != pid:
        raise WrongLoopError(
            f"{owner} belongs to process {pid}, and this is process {os.getpid()}, forked since: "
            "enter an engine of its own here"
        )


def check_on(loop: asyncio.AbstractEventLoop, pid: int, owner: str) -> None:
    """Raise `WrongLoopError` unless `loop`, to which `owner` belongs, is the one that runs here,
    and this the process `pid`."""
    check_process(pid, owner)
    running = running_loop()
    if running is None:
        raise WrongLoopError(f"{owner} belongs to an event loop of asyncio, and none runs here")
    if running is not loop:
        raise WrongLoopError(f"{owner} belongs to another event loop than the one that runs here")
