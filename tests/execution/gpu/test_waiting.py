"""Ways to wait for the end of a step: each reports ends in order, and a device that failed."""

from __future__ import annotations

import asyncio
import ctypes
import os
import threading
import time

import pytest

from aioserve import _native
from aioserve.execution.gpu.device import Event
from aioserve.execution.gpu.waiting import Threads, Way
from aioserve.execution.loop_callbacks import LoopCallbacks
from tests.doubles.fake_gpu import FakeGpu, FakeStream
from tests.execution.gpu.plans import threaded_gpu
from tests.timing import seconds_at_best
from tests.waits import until

WAYS: list[Way] = ["block", "spin", "callback"]
every_way = pytest.mark.parametrize("way", WAYS)


class Step:
    """Notes its end on the loop."""

    def __init__(self, number: int, event: Event, callbacks: LoopCallbacks, ends: list) -> None:
        self.number = number
        self.event = event
        self.callbacks = callbacks
        self.ends = ends

    def end(self) -> None:
        error = None
        try:
            self.event.synchronize()
        except Exception as raised:
            error = raised
        done = error is not None or self.event.is_done
        entry = (self.number, done, None if error is None else str(error))
        self.callbacks.put(lambda: self.ends.append((*entry, threading.get_ident())))


def enqueue(gpu: FakeGpu, stream: FakeStream, number: int) -> Event:
    event = gpu.new_event()
    stream.launch(f"kernel {number}", lambda access: None)
    stream.record(event)
    return event


@every_way
def test_ends_are_told_on_the_loop_in_order_and_not_before_they_are(way):
    async def main(gpu: FakeGpu) -> None:
        callbacks, ends = LoopCallbacks(), []
        stream = gpu.new_stream()
        waiting = Threads(way).start_waiting("test", stream, callbacks, gpu.within)
        for number in range(20):
            step = Step(number, enqueue(gpu, stream, number), callbacks, ends)
            waiting.put(step)
            if number % 5 == 0:
                await asyncio.sleep(0.01)
        await waiting.aclose()
        callbacks.close()
        here = threading.get_ident()
        assert ends == [(number, True, None, here) for number in range(20)]

    with threaded_gpu(op_seconds=0.01) as gpu:
        asyncio.run(main(gpu))


@every_way
def test_a_device_that_fails_ends_every_step_with_its_error(way):
    async def main(gpu: FakeGpu) -> None:
        callbacks, ends = LoopCallbacks(), []
        stream = gpu.new_stream()
        waiting = Threads(way).start_waiting("test", stream, callbacks, gpu.within)
        for number in range(3):
            waiting.put(Step(number, enqueue(gpu, stream, number), callbacks, ends))
        await until(lambda: len(ends) == 2)
        gpu.break_for_good("it broke")
        await until(lambda: len(ends) == 3)
        # A step launched afterwards has no event, and no callback comes.
        waiting.put(Step(3, gpu.new_event(), callbacks, ends))
        await waiting.aclose()
        callbacks.close()
        assert [(number, error) for number, _, error, _ in ends] == [
            (0, None),
            (1, None),
            (2, "it broke"),
            (3, "it broke"),
        ]

    def seconds(name: str) -> float:
        return 60.0 if name == "kernel 2" else 0.001

    with threaded_gpu(op_seconds=seconds) as gpu:
        asyncio.run(main(gpu))


@every_way
def test_what_was_opened_is_closed(way):
    async def main(gpu: FakeGpu) -> None:
        callbacks = LoopCallbacks()
        stream = gpu.new_stream()
        waiting = Threads(way).start_waiting("closes", stream, callbacks, gpu.within)
        await waiting.aclose()
        callbacks.close()

    with threaded_gpu() as gpu:
        asyncio.run(main(gpu))
        files = set(os.listdir("/proc/self/fd"))
        asyncio.run(main(gpu))
        assert set(os.listdir("/proc/self/fd")) == files
    assert not [thread for thread in threading.enumerate() if thread.name == "closes"]


# -- the native parts


def test_the_writer_adds_to_the_eventfd_without_python():
    writer = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_native.eventfd_writer())
    file = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        for _ in range(3):
            writer(file)
        assert os.eventfd_read(file) == 3
    finally:
        os.close(file)


QUERY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


@pytest.mark.parametrize("answers", [[0], [600, 600, 0], [600, 600, 700]])
def test_spinning_asks_until_there_is_an_answer(answers):
    asked: list[int | None] = []

    def query(event: int | None) -> int:
        asked.append(event)
        return answers[len(asked) - 1]

    function = QUERY(query)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert _native.spin_on_event(address, 1234, 600, 5.0) == answers[-1]
    assert asked == [1234] * len(answers)


@pytest.mark.alone
def test_spinning_gives_up_in_time_and_lets_others_run():
    function = QUERY(lambda event: 600)
    address = ctypes.cast(function, ctypes.c_void_p).value

    def spin_in_vain() -> None:
        assert _native.spin_on_event(address, 1, 600, 0.1) == 600

    assert 0.1 <= seconds_at_best(spin_in_vain, enough=5.0) < 5.0

    libc = ctypes.CDLL(None)
    # A C function that needs no interpreter's lock and never returns 600: abs(-1) is 1.
    quiet = ctypes.cast(libc.abs, ctypes.c_void_p).value

    def ticks_meanwhile() -> int:
        ticks, over = 0, threading.Event()

        def spin() -> None:
            _native.spin_on_event(quiet, 1, 1, 0.3)
            over.set()

        thread = threading.Thread(target=spin)
        thread.start()
        while not over.is_set():
            ticks += 1
            time.sleep(0.001)
        thread.join()
        return ticks

    # Other programs may take the machine for one attempt, but hardly for each.
    assert any(ticks_meanwhile() > 20 for _ in range(5))
