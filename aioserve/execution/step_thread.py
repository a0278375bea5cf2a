"""One thread per device, which runs steps in order and wakes the event loop once for each.

The loop never waits for a step and never polls: a step's end wakes it.
"""

from __future__ import annotations

import asyncio
import functools
import queue
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from aioserve.execution.handler_thread import HandlerThread
from aioserve.execution.loop_callbacks import LoopCallbacks, resolve

__all__ = ["StepThread"]

Result = TypeVar("Result")

Call = tuple[Callable[[], Any], asyncio.Future[Any] | None]


class StepThread(Generic[Result]):
    """Runs submitted calls one after the other, off the event loop.

    Bound to the event loop that it is made on. `submit` is for that loop's thread. The thread ends
    with `aclose`, or with the last reference to this object.

    If the next call is already queued when one ends, it begins before the loop hears of that end.
    Otherwise the loop's thread would take the interpreter's lock just when the next call needs it,
    to get the device going. By `tell_loop` a call says that it no longer needs the lock.
    """

    def __init__(
        self,
        name: str,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
        *,
        idle: Callable[[], bool] | None = None,
    ) -> None:
        """All calls are made inside one `within()`, which the thread enters; `idle` is that of
        `HandlerThread`."""
        self._callbacks = LoopCallbacks()
        calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self._calls: HandlerThread[Call] = HandlerThread(
                name,
                functools.partial(_compute, calls, self._callbacks),
                within=within,
                at_end=self._callbacks.close_soon,
                items=calls,
                idle=idle,
            )
        except RuntimeError:
            self._callbacks.close()
            raise

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        """Delays between the end of a step on the thread and its callback on the loop."""
        return self._callbacks.wake_delays_seconds

    def submit(self, call: Callable[[], Result]) -> Awaitable[Result]:
        """Queue `call`. The awaitable returns its result, or raises its exception."""
        future: asyncio.Future[Result] = self._callbacks.loop.create_future()
        self._calls.put((call, future))
        return future

    def post(self, call: Callable[[], object]) -> None:
        """Queue `call` without reporting its end, from any thread. It must raise nothing."""
        self._calls.put((call, None))

    def tell_loop(self) -> None:
        """Let the loop hear of the previous call now, not only when this call ends.

        Called within a call that has finished its Python part, and goes on in compiled code.
        """
        if self._callbacks.calls:
            self._callbacks.wake()

    async def aclose(self) -> None:
        """Run what is queued, then end the thread."""
        await self._calls.aclose()
        self._callbacks.close()


def _compute(calls: queue.SimpleQueue[Any], callbacks: LoopCallbacks, entry: Call) -> None:
    call, future = entry
    try:
        result: Any = call()
    except BaseException as error:
        result = error
    if future is None:
        if callbacks.calls:  # the call before left it to this one to wake the loop
            callbacks.wake()
        return
    callbacks.put(functools.partial(resolve, future, result))
    if calls.empty() or len(callbacks.calls) > 1:
        callbacks.wake()
