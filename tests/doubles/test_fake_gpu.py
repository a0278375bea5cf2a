"""The fake GPU does its work in the order that events make, and notes accesses without an order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aioserve.testing import run_simulated
from tests.doubles.fake_gpu import Access, FakeGpu, FakeMemory, FakeStream
from tests.doubles.gpu_faults import GpuFault, GpuFaults

ALL = np.arange(8)


def numbers(count: int = 8) -> FakeMemory:
    return FakeMemory("numbers", np.zeros(count, np.int64))


def writes(memory: FakeMemory, value: int, where: Any = ALL) -> Callable[[Access], None]:
    return lambda access: access.write(memory, where, value)


def reads(memory: FakeMemory, into: list[Any], where: Any = ALL) -> Callable[[Access], None]:
    return lambda access: into.append(access.read(memory, where).tolist())


def simulate(body: Callable[[FakeGpu, FakeStream, FakeStream], Any], seed: int = 0) -> FakeGpu:
    """Let `body` enqueue work on two streams; return the GPU after all of it is done."""
    gpus: list[FakeGpu] = []

    async def main() -> None:
        gpu = FakeGpu(seed=seed)
        gpus.append(gpu)
        waiting = body(gpu, gpu.new_stream(), gpu.new_stream())
        if waiting is not None:
            await waiting
        await asyncio.sleep(1)

    run_simulated(main, seed=seed)
    return gpus[0]


def test_work_on_one_stream_is_done_in_order_and_between_streams_in_any():
    orders = set()
    for seed in range(10):

        def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
            for number in range(3):
                one.launch(f"a{number}", lambda access: None)
                two.launch(f"b{number}", lambda access: None)

        order = list(simulate(body, seed).history)
        assert [name for name in order if name[0] == "a"] == ["a0", "a1", "a2"]
        assert [name for name in order if name[0] == "b"] == ["b0", "b1", "b2"]
        orders.add(tuple(order))
    assert len(orders) > 3


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["write, read", "read, write", "write, write"])
@pytest.mark.parametrize("ordered", [True, False])
def test_streams_that_touch_the_same_place_need_an_event(kind, ordered, seed):
    """A missing event is a violation, whichever access comes first this time."""
    memory, seen = numbers(), []
    first, second = kind.split(", ")
    kernels = {"read": reads(memory, seen), "write": writes(memory, 7)}

    def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        one.launch("first", kernels[first])
        if ordered:
            event = gpu.new_event()
            one.record(event)
            two.wait(event)
        two.launch("second", kernels[second])

    gpu = simulate(body, seed)
    assert bool(gpu.violations) is not ordered
    if ordered and kind == "write, read":
        assert seen == [[7] * 8]


def test_reads_and_other_places_need_none():
    memory, seen = numbers(), []

    def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        one.launch("one", reads(memory, seen, ALL[:4]))
        two.launch("two", reads(memory, seen, ALL[:4]))
        one.launch("one writes", writes(memory, 1, ALL[4:6]))
        two.launch("two writes", writes(memory, 2, ALL[6:]))

    assert not simulate(body).violations
    assert memory.array.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("heard", [True, False])
def test_what_the_host_has_heard_of_comes_before_what_it_enqueues_then(heard):
    memory = numbers()

    async def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        event = gpu.new_event()
        one.launch("one", writes(memory, 1))
        one.record(event)
        await asyncio.sleep(1)
        if heard:
            assert event.is_done
        two.launch("two", writes(memory, 2))

    assert bool(simulate(body).violations) is not heard


def test_a_wait_is_for_the_recording_that_there_was():
    """No one waits for a later recording, and nothing waits for one that never came."""
    memory, seen = numbers(), []

    def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        event = gpu.new_event()
        two.wait(event)
        one.record(event)
        one.launch("one", writes(memory, 1))
        two.wait(event)
        one.record(event)
        two.launch("two", reads(memory, seen))

    assert simulate(body).violations


def test_pinned_memory_must_stay_until_it_is_copied_and_is_poison_until_it_has_been():
    async def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        memory, block = gpu.memory(16), gpu.host_memory(16)
        block.array[:] = 3
        one.copy_to_device(memory, block, 8)
        await asyncio.sleep(1)
        block.array[:] = 4
        one.copy_to_host(block, memory, 8)
        assert not (block.array[:8] == 3).any()
        assert (block.array[8:] == 4).all()
        await asyncio.sleep(1)
        assert (block.array[:8] == 3).all()
        assert not gpu.violations
        one.copy_to_device(memory, block, 16)
        block.array[12] = 5

    (violation,) = simulate(body).violations
    assert violation == "pinned memory was written before it was copied to the device"


def test_a_kernel_outside_its_memory_breaks_the_device():
    memory = numbers()

    async def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        event = gpu.new_event()
        one.launch("outside", writes(memory, 1, np.array([-1])))
        one.record(event)
        await asyncio.sleep(1)
        for call in (lambda: event.is_done, event.synchronize, lambda: two.record(event)):
            with pytest.raises(RuntimeError, match="outside made an illegal access"):
                call()

    assert "IndexError" in simulate(body).violations[0]


def test_the_host_of_a_simulated_loop_never_waits():
    def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        event = gpu.new_event()
        event.synchronize()
        one.launch("one", lambda access: None)
        one.record(event)
        with pytest.raises(AssertionError, match="the host would wait"):
            event.synchronize()

    simulate(body)


def test_a_graph_does_what_was_captured_with_what_memory_holds_then():
    memory, seen = numbers(), []

    async def body(gpu: FakeGpu, one: FakeStream, two: FakeStream) -> None:
        with one.current():
            graph = gpu.capture(lambda: gpu.current_stream.launch("read", reads(memory, seen)))
            with pytest.raises(RuntimeError, match="can't be captured"):
                gpu.capture(lambda: gpu.current_stream.record(gpu.new_event()))
            await asyncio.sleep(1)
            assert seen == []
            for value in (3, 4):
                one.launch("write", writes(memory, value))
                graph.replay()

    assert not simulate(body).violations
    assert seen == [[3] * 8, [4] * 8]


def test_faults_come_at_their_launches_and_rates():
    async def main() -> None:
        gpu = FakeGpu(
            faults=GpuFaults(at={1: GpuFault.OUT_OF_MEMORY}, rates={GpuFault.RAISES: 0.25})
        )
        stream = gpu.new_stream()
        raised = []
        for launch in range(400):
            try:
                stream.launch("kernel", lambda access: None)
            except Exception as error:
                raised.append((launch, type(gpu.meaning_of(error)).__name__))
        assert (1, "OutOfDeviceMemoryError") in raised
        assert 60 < len(raised) < 140

    run_simulated(main)
