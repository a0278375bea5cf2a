"""Measure of how long something holds up the event loop that it runs on.

A task that sleeps a millisecond at a time notices when it wakes late. The cause may be a callback
that computes, or a thread that keeps the interpreter's lock.

On a busy machine every task wakes late. Then this process computed nothing meanwhile, or the loop's
thread waited for a core. So a late tick counts for the CPU time that the process took during it. It
counts for no more than its lateness less the wait for a core. A very late tick counts in full.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from tests.tiers import clock_counts

__all__ = [
    "MAX_HELD_SECONDS",
    "HeldLoop",
    "assert_loop_is_free",
    "collector_at_rest",
    "slowness",
    "watched_loop",
]

MAX_HELD_SECONDS = 0.05
WAITS_SECONDS = 1.0
"""Seconds from which a late tick counts in full, whatever CPU time the process took."""
TICK_SECONDS = 0.001
TRIES = 3


class HeldLoop:
    """Longest time that the loop was held, in `seconds`."""

    def __init__(self) -> None:
        self.seconds: float = 0.0

    async def watch(self) -> None:
        with _waits_for_a_core() as waited_seconds:
            while True:
                began, computed = time.perf_counter(), time.process_time()
                waited = waited_seconds()
                await asyncio.sleep(TICK_SECONDS)
                late = time.perf_counter() - began - TICK_SECONDS
                late -= waited_seconds() - waited
                computed = time.process_time() - computed
                held = late if late > WAITS_SECONDS else min(late, computed)
                self.seconds = max(self.seconds, held)


@contextlib.contextmanager
def _waits_for_a_core() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds for which the calling thread was ready to run and
    had no core. It returns 0 where Linux doesn't tell."""
    try:
        with open(f"/proc/self/task/{threading.get_native_id()}/schedstat", "rb", 0) as file:
            yield lambda: int(os.pread(file.fileno(), 64, 0).split()[1]) / 1e9
    except FileNotFoundError:
        yield lambda: 0.0


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Turn the garbage collector off: its pauses depend on all that ran before. It doesn't collect
    first, which would take most of a second in each of a thousand small tests."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextlib.asynccontextmanager
async def watched_loop() -> AsyncIterator[HeldLoop]:
    """Watch the running loop, with the `collector_at_rest` after one last pass. For tests that are
    marked `more`."""
    clock_counts()  # which asks for a mark
    held = HeldLoop()
    gc.collect()
    with collector_at_rest():
        watching = asyncio.create_task(held.watch())
        try:
            await asyncio.sleep(0)
            yield held
            await asyncio.sleep(2 * TICK_SECONDS)  # a hold that has just ended is seen
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching


def slowness() -> float:
    """Return 1 if a million additions in Python take at most 20 ms now, and more in proportion.
    Machines differ, and neighbours slow them down."""
    began = time.process_time()
    total = 0
    for number in range(1_000_000):
        total += number
    return max(1.0, (time.process_time() - began) / 0.02)


async def assert_loop_is_free(
    attack: Callable[[], Awaitable[object]], *, most_seconds: float = MAX_HELD_SECONDS
) -> None:
    """Assert that `attack` holds the loop for `most_seconds` at most.

    It runs again before a hold is believed. A fault of the code shows each time, and the machine
    seldom disturbs three tries in a row. Where measured times don't count (`clock_counts`), it runs
    once, unmeasured.
    """
    if not clock_counts():
        await attack()
        return
    holds: list[float] = []
    slow = 1.0
    for _ in range(TRIES):
        async with watched_loop() as held:
            await attack()
        if held.seconds <= most_seconds:
            return
        # Neighbours come and go: what counts is the slower of before and after the try.
        before, slow = slow, slowness()
        if held.seconds <= most_seconds * max(before, slow):
            return
        holds.append(held.seconds)
    shown = ", ".join(f"{seconds * 1e3:.0f}" for seconds in holds)
    raise AssertionError(f"the loop was held for {shown} ms in {TRIES} tries")
