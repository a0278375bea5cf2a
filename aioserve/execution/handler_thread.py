"""A thread that handles items one after the other, until it is ended or garbage collected."""

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
"""Time without an item before the thread does its idle work."""
EXIT_SECONDS = 30.0
"""Time that interpreter exit waits for the queued items of an unclosed engine, unless a thread
has its own limit."""


class HandlerThread(Generic[Item]):
    """Calls `handle(item)` for each item, in the order of `put`.

    All calls are made inside one `within()`, which the thread enters. `at_end()` is called at the
    end of the thread. Exceptions must not leave `handle`. It must not hold this object: the thread
    ends with the last reference. Raises `RuntimeError` if the system can't start a thread.
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
        """`items` is the queue, for a `handle` that needs to see if more are waiting. A None in
        it ends the thread. `idle()` is called while the queue is empty, until it returns False.
        It must do a short piece of work, as the next item waits for it, and raise nothing."""
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue() if items is None else items
        self.put: Callable[[Item], None] = self._items.put
        """Queue an item, from any thread."""
        run = functools.partial(_run, self._items, handle, within, at_end, idle)
        # Not `self.end`, because the exit hook would keep this object alive.
        end = functools.partial(self._items.put, None)
        self._thread = start_exit_joined_thread(name, run, end, exit_seconds=exit_seconds)

    def __del__(self) -> None:
        self.end()

    def end(self) -> None:
        """Let the thread end after the queued items. Returns at once; may be called from any
        thread."""
        self._items.put(None)

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the thread to end; False after a timeout."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    async def aclose(self) -> None:
        """Handle the queued items, and end the thread."""
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
