"""A thread handles items in order, and ends when it is told to, or with its last reference."""

from __future__ import annotations

import asyncio
import gc
import queue
import threading
from contextlib import contextmanager

import pytest

from aioserve.execution.handler_thread import HandlerThread
from aioserve.execution.loop_callbacks import LoopCallbacks, resolve
from tests.waits import LIMIT_SECONDS, until


def test_items_are_handled_in_order_inside_one_context_on_one_thread():
    happened: list[tuple[object, int]] = []

    @contextmanager
    def within():
        happened.append(("enter", threading.get_ident()))
        yield
        happened.append(("exit", threading.get_ident()))

    def handle(item: int) -> None:
        happened.append((item, threading.get_ident()))

    def at_end() -> None:
        happened.append(("end", threading.get_ident()))

    thread: HandlerThread[int] = HandlerThread("test", handle, within=within, at_end=at_end)
    for item in range(5):
        thread.put(item)
    asyncio.run(thread.aclose())
    assert [what for what, _ in happened] == ["enter", 0, 1, 2, 3, 4, "exit", "end"]
    assert len({ident for _, ident in happened} | {threading.get_ident()}) == 2


def test_a_thread_that_nobody_holds_ends():
    ended = threading.Event()
    thread: HandlerThread[int] = HandlerThread("test", lambda item: None, at_end=ended.set)
    thread.put(1)
    del thread
    gc.collect()
    assert ended.wait(LIMIT_SECONDS)


def test_end_waits_for_nobody():
    goes_on = threading.Event()
    handled: list[int] = []

    def handle(item: int) -> None:
        assert goes_on.wait(LIMIT_SECONDS)
        handled.append(item)

    thread: HandlerThread[int] = HandlerThread("test", handle)
    thread.put(1)
    thread.end()
    assert not handled
    assert not thread.join(0.01)
    goes_on.set()
    assert thread.join(LIMIT_SECONDS)
    assert handled == [1]


def test_what_can_wait_is_done_a_piece_at_a_time_while_nothing_comes():
    happened: list[str] = []
    in_piece, goes_on, idle_again = threading.Event(), threading.Event(), threading.Event()

    def idle() -> bool:
        if idle_again.is_set():
            return False
        happened.append("piece")
        in_piece.set()
        assert goes_on.wait(LIMIT_SECONDS)
        if happened.count("piece") == 4:
            idle_again.set()
        return not idle_again.is_set()

    items: queue.SimpleQueue[str] = queue.SimpleQueue()
    items.put("at once")
    thread: HandlerThread[str] = HandlerThread("test", happened.append, items=items, idle=idle)
    assert in_piece.wait(LIMIT_SECONDS)
    thread.put("first")
    thread.put("second")
    goes_on.set()
    assert idle_again.wait(LIMIT_SECONDS)
    thread.put("last")
    thread.end()
    assert thread.join(LIMIT_SECONDS)
    pieces = ["piece"] * 3
    assert happened == ["at once", "piece", "first", "second", *pieces, "last"]


def test_what_can_wait_keeps_no_thread_from_its_end():
    idle_for_ever = threading.Event()

    def idle() -> bool:
        idle_for_ever.set()
        return True

    thread: HandlerThread[str] = HandlerThread("test", lambda item: None, idle=idle)
    assert idle_for_ever.wait(LIMIT_SECONDS)
    thread.end()
    assert thread.join(LIMIT_SECONDS)


@pytest.mark.asyncio
async def test_what_was_put_is_told_together_after_a_wake():
    callbacks, told = LoopCallbacks(), []

    def put() -> None:
        for number in range(3):
            callbacks.put(lambda number=number: told.append((number, threading.get_ident())))

    await asyncio.to_thread(put)
    await asyncio.sleep(0.01)
    assert told == []
    assert len(callbacks.calls) == 3
    await asyncio.to_thread(callbacks.wake)
    await until(lambda: told)
    assert told == [(number, threading.get_ident()) for number in range(3)]
    assert len(callbacks.wake_delays_seconds) == 3
    callbacks.put(lambda: told.append("late"))
    callbacks.close()
    assert told[-1] == "late"


@pytest.mark.asyncio
async def test_a_future_is_settled_once():
    loop = asyncio.get_running_loop()
    given, raising, cancelled = (loop.create_future() for _ in range(3))
    cancelled.cancel()
    for future, result in ((given, 1), (given, 2), (raising, ValueError("no")), (cancelled, 3)):
        resolve(future, result)
    assert given.result() == 1
    with pytest.raises(ValueError, match="no"):
        raising.result()
    assert cancelled.cancelled()
