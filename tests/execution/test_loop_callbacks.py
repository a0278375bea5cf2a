"""A loop is woken by another thread, which keeps its turn."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import pytest

from aioserve.execution.loop_callbacks import EventFdWaker
from aioserve.testing import run_simulated
from tests.waits import block_until, until

pytestmark = pytest.mark.alone


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.asyncio
async def test_a_wake_from_another_thread_is_heard():
    loop, woken = asyncio.get_running_loop(), asyncio.Event()
    waker = EventFdWaker(loop, woken.set)
    for _ in range(3):
        thread = threading.Thread(target=waker.wake)
        thread.start()
        await woken.wait()
        thread.join()
        woken.clear()
    await asyncio.sleep(0.01)
    assert not woken.is_set(), "one wake is heard once"
    waker.close()


@pytest.mark.asyncio
async def test_whoever_wakes_goes_on_before_the_loop_gets_its_turn():
    """`call_soon_threadsafe` in place of `wake` would let the loop's thread come in nearly every
    time.

    That thread waits for the interpreter's lock, and the call releases it. Here nothing takes the
    lock away, however long the system uses this thread's processor for other work.
    """
    interval = sys.getswitchinterval()
    loop = asyncio.get_running_loop()
    heard: list[float] = []
    went_on: list[float] = []
    waker = EventFdWaker(loop, lambda: heard.append(time.perf_counter()))

    def wake_and_go_on() -> None:
        for _ in range(50):
            time.sleep(0.002)  # the loop goes to sleep meanwhile
            waker.wake()
            for _ in range(2000):
                pass
            went_on.append(time.perf_counter())
            # Otherwise the next wake would be heard together with this one.
            block_until(lambda: len(heard) == len(went_on))

    sys.setswitchinterval(1.0)
    try:
        await asyncio.to_thread(wake_and_go_on)
    finally:
        sys.setswitchinterval(interval)
    assert len(heard) == len(went_on) == 50
    in_between = sum(told < done for told, done in zip(heard, went_on, strict=True))
    assert in_between <= 10
    waker.close()


@pytest.mark.asyncio
async def test_close_tells_what_was_not_told_yet_and_then_nothing():
    told: list[None] = []
    files = open_files()
    waker = EventFdWaker(asyncio.get_running_loop(), lambda: told.append(None))
    assert len(open_files()) == len(files) + 1
    waker.wake()
    waker.close()
    assert len(told) == 1
    assert open_files() == files
    await asyncio.sleep(0.01)
    assert len(told) == 1


@pytest.mark.asyncio
async def test_a_thread_may_close_it():
    files = open_files()
    waker = EventFdWaker(asyncio.get_running_loop(), lambda: None)
    await asyncio.to_thread(waker.close_soon)
    await until(lambda: open_files() <= files)


def test_of_a_loop_that_is_gone_no_file_is_left():
    files = open_files()

    async def leave() -> EventFdWaker:
        return EventFdWaker(asyncio.get_running_loop(), lambda: None)

    waker = asyncio.run(leave())
    waker.wake()
    waker.close_soon()
    assert open_files() == files


def test_a_loop_that_watches_no_files_is_woken_too():
    async def main() -> None:
        woken = asyncio.Event()
        waker = EventFdWaker(asyncio.get_running_loop(), woken.set)
        await asyncio.to_thread(waker.wake)
        await woken.wait()
        waker.close()

    run_simulated(main)
