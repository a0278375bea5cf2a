"""Thousands of requests that come and go at once."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from aioserve import Engine, EngineClosedError, SamplingParams
from aioserve.testing import FakeModel, check_invariants
from tests.attacks.held_loop import assert_loop_is_free
from tests.scheduling.bench import Bench
from tests.waits import until

NUM = 10_000
FEW = 1_000
MAX_AT_ONCE = 1_000


async def leave(engine: Engine) -> None:
    await engine.__aexit__(None, None, None)


@pytest.mark.asyncio
async def test_when_ten_thousand_leave_at_once_the_loop_has_its_turns():
    model = FakeModel(step_seconds=lambda plan: 0.001)
    async with Engine(model, max_waiting=NUM, max_num_seqs=4) as engine:
        params = SamplingParams(max_tokens=200)
        streams = [engine.stream([1, index % 256], params) for index in range(NUM)]
        await streams[0].started()
        random.Random(1).shuffle(streams)
        for stream in streams:
            stream.close()
        left = [engine.stats().num_waiting]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(engine.stats().num_waiting)
        assert left[0] > NUM - 10
        assert max(before - after for before, after in pairwise(left)) <= MAX_AT_ONCE
        await engine.drain()
        check_invariants(engine)


@pytest.mark.more
@pytest.mark.parametrize("ends", ["drained", "closed"])
@pytest.mark.asyncio
async def test_when_ten_thousand_are_ended_at_once_the_loop_has_its_turns(ends: str):
    model = FakeModel(step_seconds=lambda plan: 0.001)
    async with Engine(model, max_waiting=NUM, max_num_seqs=4) as engine:
        streams = [engine.stream([1, index % 256], request_id=str(index)) for index in range(NUM)]
        await streams[0].started()
        ending = asyncio.create_task(engine.drain(0) if ends == "drained" else leave(engine))
        going_on = [NUM]
        while not ending.done():
            await asyncio.sleep(0)
            going_on.append(sum(stream.finish_reason is None for stream in streams))
        assert going_on[-1] == 0
        assert max(before - after for before, after in pairwise(going_on)) <= MAX_AT_ONCE
        with pytest.raises(EngineClosedError):
            await anext(streams[-1])
        check_invariants(engine)


@pytest.mark.more
@pytest.mark.asyncio
async def test_when_ten_thousand_come_at_once_the_loop_has_its_turns():
    model = FakeModel(step_seconds=lambda plan: 0.001)
    async with Engine(model, max_waiting=NUM, max_num_seqs=4) as engine:
        streams = [engine.stream([1, index % 256]) for index in range(NUM)]
        scheduler = engine._lifecycle.scheduler
        known = [0]
        while known[-1] < NUM:
            await asyncio.sleep(0)
            known.append(len(scheduler.state.sequences))
        assert max(after - before for before, after in pairwise(known)) <= MAX_AT_ONCE
        for stream in streams:
            stream.close()
        await engine.drain()


@pytest.mark.more
@pytest.mark.clock
@pytest.mark.asyncio
async def test_ten_thousand_that_come_and_leave_do_not_hold_the_loop():
    model = FakeModel(step_seconds=lambda plan: 0.001)
    async with Engine(model, max_waiting=NUM, max_num_seqs=4) as engine:

        async def attack() -> None:
            streams = []
            for index in range(NUM):
                streams.append(engine.stream([1, index % 256], SamplingParams(max_tokens=200)))
                if index % 100 == 0:  # the host lets others run; does the engine?
                    await asyncio.sleep(0)
            random.Random(1).shuffle(streams)
            for index, stream in enumerate(streams):
                stream.close()
                if index % 1000 == 0:
                    await asyncio.sleep(0)
            await until(lambda: not engine.stats().num_waiting + engine.stats().num_running)

        await assert_loop_is_free(attack)
        check_invariants(engine)


@pytest.mark.parametrize(
    "leaving", [range(0, FEW, 2), range(FEW), random.Random(1).sample(range(FEW), FEW - 7)]
)
def test_those_that_stay_keep_their_order(leaving):
    bench = Bench()
    ids = [bench.submit([1, 2], max_tokens=3) for _ in range(FEW)]
    for index in leaving:
        bench.scheduler.finish(ids[index])
    left = [i for index, i in enumerate(ids) if index not in set(leaving)]
    assert bench.scheduler.num_waiting == len(left)
    assert [s.sequence_id for s in bench.scheduler.state.waiting] == left
    bench.scheduler.sanity_check()
