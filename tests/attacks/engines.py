"""Engines to attack, and what they leave behind."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from aioserve import SamplingParams, TokenStream
from aioserve.testing import FakeModel

__all__ = [
    "ENDLESS",
    "LONG",
    "NO_STREAM",
    "SHORT",
    "a_model",
    "awaited",
    "by_hand",
    "list_of",
    "tasks_of_engines",
    "threads_of_engines",
]

SHORT = SamplingParams(max_tokens=4, seed=0)
LONG = SamplingParams(max_tokens=200, seed=0)
ENDLESS = 1e6
"""Virtual seconds: whoever waits for so long waits for ever."""
NO_STREAM: Any = None


def a_model(**options: Any) -> FakeModel:
    return FakeModel(**{"num_pages": 256, "step_seconds": lambda plan: 0.001, **options})


def threads_of_engines() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("aioserve")]


async def tasks_of_engines() -> list[asyncio.Task[Any]]:
    return [t for t in asyncio.all_tasks() if t.get_name().startswith("aioserve")]


async def list_of(stream: TokenStream) -> list[int]:
    return [token.id async for token in stream]


async def awaited(call: Callable[[], Any]) -> Any:
    result = call()
    return await result if inspect.isawaitable(result) else result


def by_hand(call: Callable[[], Any]) -> Any:
    """Call it where no event loop runs, as anyone who writes a loop of their own would."""
    result = call()
    if inspect.iscoroutine(result):
        try:
            result.send(None)
        except StopIteration as done:
            return done.value
        finally:
            result.close()
        raise AssertionError("it waits for something where nothing runs")
    return result
