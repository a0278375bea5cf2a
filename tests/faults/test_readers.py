"""Readers that are slow, that hold their streams and take nothing, or that come back late."""

from __future__ import annotations

import asyncio
import random

import pytest

from aioserve.testing import FakeModel, random_step_seconds
from tests.faults.harness import SEEDS, params, run, until, watched

STALL_SECONDS = 5.0
OPTIONS = {"max_buffered_tokens": 8, "stall_timeout_seconds": STALL_SECONDS}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_slow_readers_get_every_token_and_hold_up_nobody(seed, n):
    draw = random.Random(seed)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        model = FakeModel(num_pages=24, step_seconds=random_step_seconds(0.0, 0.02, seed=seed))
        async with watched(model, max_num_seqs=6, **OPTIONS) as checker:
            slow = [
                asyncio.create_task(
                    checker.read(
                        [index] * 20,
                        params(60, n=n),
                        pause_seconds=lambda count: draw.choice([0, 0, STALL_SECONDS / 3]),
                    )
                )
                for index in range(5)
            ]
            await until(lambda: any(r["paused"] for r in checker.engine.dump()["sequences"]))
            began = loop.time()
            quick = [checker.read([100 + index], params(40)) for index in range(4)]
            assert await asyncio.gather(*quick) == ["length"] * 4
            # Nobody has waited for a slow one to be given up.
            assert loop.time() - began < STALL_SECONDS / 2
            assert await asyncio.gather(*slow) == ["length"] * 5

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_holds_its_stream_and_takes_nothing_is_ended_in_time(seed):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with watched(max_num_seqs=2, **OPTIONS) as checker:
            began = loop.time()
            holding = [
                checker.read([index], params(100), pause_seconds=lambda count: 60.0 * (count == 1))
                for index in range(4)
            ]
            holding = [asyncio.create_task(read) for read in holding]
            await until(lambda: checker.engine.stats().num_running)
            reading = await checker.read([9], params(100))
            assert reading == "length"
            await checker.engine.drain()
            assert loop.time() - began < 4 * STALL_SECONDS
            assert await asyncio.gather(*holding) == ["StreamStalledError"] * 4

    run(main, seed)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_answers_shorter_than_the_buffer_wait_for_their_reader_as_long_as_it_takes(seed):
    async def main() -> None:
        async with watched(**OPTIONS) as checker:
            late = checker.engine.stream([1], params(7))
            await asyncio.sleep(100 * STALL_SECONDS)
            assert late.finish_reason == "length"
            assert len([token async for token in late]) == 7

    run(main, seed)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_reader_that_takes_one_token_a_stall_timeout_is_left_alone(seed):
    async def main() -> None:
        async with watched(**OPTIONS) as checker:
            pause = 0.9 * STALL_SECONDS
            read = checker.read([1], params(40), pause_seconds=lambda count: pause)
            assert await read == "length"

    run(main, seed)
