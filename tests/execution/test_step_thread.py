"""Steps run in order, off the loop, and each wakes it once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from aioserve.execution.step_thread import StepThread
from tests.waits import LIMIT_SECONDS, block_until


@pytest.mark.asyncio
async def test_calls_run_in_order_on_one_other_thread():
    thread: StepThread[tuple[int, int]] = StepThread("test")
    handles = [thread.submit(lambda i=i: (i, threading.get_ident())) for i in range(20)]
    results = [await handle for handle in handles]
    await thread.aclose()
    assert [index for index, _ in results] == list(range(20))
    idents = {ident for _, ident in results}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


@pytest.mark.asyncio
async def test_what_a_call_raises_reaches_its_awaiter_and_the_thread_goes_on():
    thread: StepThread[int] = StepThread("test")
    broken, whole = thread.submit(lambda: 1 // 0), thread.submit(lambda: 7)
    with pytest.raises(ZeroDivisionError):
        await broken
    assert await whole == 7
    await thread.aclose()


@pytest.mark.asyncio
async def test_what_ends_before_a_call_of_which_nobody_hears_is_told_all_the_same():
    thread: StepThread[int] = StepThread("test")
    go_on, posted = threading.Event(), threading.Event()
    handle = thread.submit(lambda: go_on.wait(LIMIT_SECONDS) and 7)
    thread.post(posted.set)
    go_on.set()
    assert await handle == 7
    assert posted.is_set()
    await thread.aclose()


@pytest.mark.asyncio
async def test_the_loop_stays_free_while_a_call_runs():
    thread: StepThread[bool] = StepThread("test")
    may_end = threading.Event()
    handle = asyncio.ensure_future(thread.submit(lambda: may_end.wait(LIMIT_SECONDS)))
    for _ in range(5):
        await asyncio.sleep(0.001)
        assert not handle.done()
    may_end.set()
    assert await handle
    await thread.aclose()
    assert len(thread.wake_delays_seconds) == 1


@pytest.mark.asyncio
async def test_an_awaiter_that_was_cancelled_is_not_missed():
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, what: reported.append(what))
    thread: StepThread[None] = StepThread("test")
    waiting = asyncio.ensure_future(thread.submit(lambda: time.sleep(0.05)))
    waiting.cancel()
    await thread.aclose()
    await asyncio.sleep(0)
    assert waiting.cancelled()
    assert reported == []


@pytest.mark.asyncio
async def test_all_calls_are_made_within_one_context_on_the_thread():
    happened: list[tuple[str, int]] = []

    def note(what: str) -> None:
        happened.append((what, threading.get_ident()))

    @contextmanager
    def within() -> Iterator[None]:
        note("enter")
        yield
        note("exit")

    thread: StepThread[None] = StepThread("test", within)
    for _ in range(2):
        await thread.submit(lambda: note("call"))
    await thread.aclose()
    assert [what for what, _ in happened] == ["enter", "call", "call", "exit"]
    assert len({ident for _, ident in happened} | {threading.get_ident()}) == 2


@pytest.mark.asyncio
async def test_the_next_call_begins_before_the_loop_hears_of_the_end_of_one():
    thread: StepThread[bool] = StepThread("test")
    heard: list[int] = []
    goes_on = threading.Event()

    def hears(number: int) -> Callable[[object], None]:
        return lambda _: heard.append(number)

    def begin() -> bool:
        return goes_on.wait(LIMIT_SECONDS)

    def tell_late() -> bool:
        time.sleep(0.05)  # the loop has all the time that it needs
        before = list(heard)
        thread.tell_loop()
        block_until(lambda: heard)
        return not before and heard == [0]

    def tell_never() -> bool:
        time.sleep(0.05)
        return heard == [0]

    def hear() -> bool:
        return block_until(lambda: heard == [0, 1, 2])

    calls = (begin, tell_late, tell_never, hear, hear)
    handles = [asyncio.ensure_future(thread.submit(call)) for call in calls]
    for number, handle in enumerate(handles):
        handle.add_done_callback(hears(number))
    goes_on.set()
    results = await asyncio.gather(*handles)
    await thread.aclose()
    # The end of the second is only told at the end of the third, which never calls `tell_loop`.
    assert results == [True] * 5
    assert heard == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [StopIteration(3), asyncio.CancelledError()])
@pytest.mark.asyncio
async def test_errors_that_futures_refuse_arrive_all_the_same(error):
    def call() -> None:
        raise error

    thread: StepThread[None] = StepThread("test")
    with pytest.raises(RuntimeError, match="the call raised"):
        await thread.submit(call)
    await thread.aclose()


def test_a_loop_that_is_gone_does_not_break_the_thread():
    async def leave() -> StepThread[None]:
        thread: StepThread[None] = StepThread("test")
        thread.submit(lambda: time.sleep(0.1))
        return thread

    thread = asyncio.run(leave())
    thread._calls.end()
    assert thread._calls.join(LIMIT_SECONDS)


EXITS_MID_STEP = """
import asyncio, time, torch
from aioserve.execution.step_thread import StepThread

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

async def main():
    thread, a = StepThread("steps"), torch.ones(256, 256)
    def step():
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            a @ a
    thread.submit(step)
    return thread

thread, slow = asyncio.run(main()), Slow()
"""


def test_an_interpreter_that_exits_while_a_step_runs_exits_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXITS_MID_STEP], capture_output=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
