"""A thread that handles items one after the other, until it is ended or garbage."""

from __future__ import annotations

import asyncio
import functools
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from aioserve.execution.exit_joined_thread import start_exit_joined_thread

__all__ = ["HandlerThread"]

Item = TypeVar("Item")

IDLE_SECONDS = 0.02
"""Without an item before the thread does what it has for such times."""
EXIT_SECONDS = 30.0
"""How long an interpreter that exits without closing the engine waits for what was put, unless a
thread says otherwise."""


class HandlerThread(Generic[Item]):
    """`handle(item)` for each item, in the order of `put`, all inside one `within()`, which is
    entered on the thread; then `at_end()`, at the end of the thread.

    `handle` raises nothing. It must not hold this object: the thread ends with the last reference.
    Raises `RuntimeError` if no thread is to be had.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[Item], None],
        *,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        at_end: Callable[[], None] = lambda: None,
        items: queue.SimpleQueue[Any] | None = None,
        idle: Callable[[], bool] | None = None,
        exit_seconds: float = EXIT_SECONDS,
    ) -> None:
        """`items`: the queue, for a `handle` that looks whether more are waiting. None is its
        end. `idle()` is called while nothing comes, until it returns False: a short piece of work
        at a time, for which the next item waits. It raises nothing, as `handle`."""
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue() if items is None else items
        self.put: Callable[[Item], None] = self._items.put
        """From any thread."""
        run = functools.partial(_run, self._items, handle, within, at_end, idle)
        # Not `self.end`: whoever ends threads at exit would hold this object until then.
        end = functools.partial(self._items.put, None)
        self._thread = start_exit_joined_thread(name, run, end, exit_seconds=exit_seconds)

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        """Let the thread end when it has handled what was put; from any thread, at once."""
        self._items.put(None)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Whether the thread has ended. Waits for that."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    async def aclose(self) -> None:
        """Handle what was put, and end the thread."""
        self.end()
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)


def _run(
    items: queue.SimpleQueue[Any],
    handle: Callable[[Any], None],
    within: Callable[[], AbstractContextManager[object]],
    at_end: Callable[[], None],
    idle: Callable[[], bool] | None,
) -> None:
    try:
        with within():
            while (item := _next(items, idle)) is not None:
                handle(item)
                del item
    finally:
        at_end()


def _next(items: queue.SimpleQueue[Any], idle: Callable[[], bool] | None) -> Any:
    if idle is not None:
        try:
            return items.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            while items.empty() and idle():
                pass
    return items.get()
