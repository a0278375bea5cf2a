"""An engine on a simulated loop, watched: whatever goes wrong in it must come out clean."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aioserve import Engine, SamplingParams, SchedulingPolicy
from aioserve.testing import (
    FakeModel,
    StreamChecker,
    check_invariants,
    run_simulated,
    scribble_free_pages,
)

SEEDS = range(4)
STEP_SECONDS = 0.01


@asynccontextmanager
async def watched(model: FakeModel | None = None, **options: Any) -> AsyncIterator[StreamChecker]:
    """An engine whose state is checked after each step, and at the end, when it must be empty."""
    model = model or FakeModel(step_seconds=lambda plan: STEP_SECONDS)
    options = {"policy": SchedulingPolicy(), "output_reserve_tokens": 0, **options}
    async with Engine(model, **options) as engine:
        checker = StreamChecker(engine)
        watching = asyncio.create_task(_watch(engine))
        try:
            yield checker
            await engine.drain()
        finally:
            watching.cancel()
            await asyncio.wait([watching])
        if not watching.cancelled():
            watching.result()
        check_invariants(engine)
    check_invariants(engine)
    checker.check()
    stats = engine.stats()
    assert stats.pages_held_by_requests == stats.pages_fenced == 0
    assert stats.num_running == stats.num_waiting == 0


async def _watch(engine: Engine) -> None:
    steps = -1
    while True:
        if engine.stats().steps_total != steps:
            steps = engine.stats().steps_total
            check_invariants(engine)
            scribble_free_pages(engine)
        await asyncio.sleep(STEP_SECONDS)


def run(main: Callable[[], Awaitable[None]], seed: int) -> None:
    """Simulate `main`, without the log of faults that are planted."""

    async def quiet() -> None:
        with silence():
            await main()

    named = getattr(main, "func", main)
    quiet.__qualname__ = f"{named.__qualname__}{getattr(main, 'args', '')}"
    run_simulated(quiet, seed=seed)


@contextmanager
def silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def params(max_tokens: int = 40, *, seed: int = 0, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, n=n)


async def until(condition: Callable[[], object]) -> None:
    """Sleep in short steps of virtual time."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(STEP_SECONDS / 4)
