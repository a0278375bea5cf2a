"""Waiting until something holds, on a machine however slow.

One limit ends all waits for what never comes: `assert event.wait(LIMIT_SECONDS)`. It is less than
pytest's own for a test, so that a failure says what was waited for.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

__all__ = ["LIMIT_SECONDS", "block_until", "until"]

LIMIT_SECONDS = 200.0
POLL_SECONDS = 0.001
BLOCKED_SECONDS = 0.01
"""Pause between two looks of `block_until`: files and processes, for example, are slower to look
at."""
T = TypeVar("T")


@overload
async def until(
    condition: Callable[[], Awaitable[T | None]], *, told: Callable[[], str] = str
) -> T: ...


@overload
async def until(condition: Callable[[], T | None], *, told: Callable[[], str] = str) -> T: ...


async def until(condition: Callable[[], Any], *, told: Callable[[], str] = str) -> Any:
    """Return what `condition`, a function or a coroutine function, says when that is true. Raises
    `AssertionError` with `told` if it never is."""
    ends = time.monotonic() + LIMIT_SECONDS
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        _is_in_time(ends, told)
        await asyncio.sleep(POLL_SECONDS)


def block_until(condition: Callable[[], T | None], *, told: Callable[[], str] = str) -> T:
    """`until`, for those who have no event loop."""
    ends = time.monotonic() + LIMIT_SECONDS
    while not (found := condition()):
        _is_in_time(ends, told)
        time.sleep(BLOCKED_SECONDS)
    return found


def _is_in_time(ends: float, told: Callable[[], str]) -> None:
    assert time.monotonic() < ends, f"not within {LIMIT_SECONDS:g} s: {told()}"
