"""A host program that blocks its loop, closes the engine too early, or is cancelled itself."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from aioserve import Engine, EngineClosedError, SchedulingPolicy
from aioserve.testing import FakeModel, SimLoop, StreamChecker, check_invariants
from tests.faults.harness import SEEDS, STEP_SECONDS, params, run, until, watched

TEXT = "encoded off the loop " * 25


def model() -> FakeModel:
    return FakeModel(num_pages=64, max_model_len=640, step_seconds=lambda plan: STEP_SECONDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_that_is_blocked_for_two_seconds_costs_two_seconds_and_no_token(seed):
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        async with watched(model(), stall_timeout_seconds=1.0, max_buffered_tokens=4) as checker:
            reads = [asyncio.create_task(checker.read([index], params(40))) for index in range(4)]
            began = loop.time()
            for _ in range(3):
                await asyncio.sleep(7 * STEP_SECONDS)
                loop.block(2.0)
            assert await asyncio.gather(*reads) == ["length"] * 4
            assert loop.time() - began < 3 * 2.0 + 60 * STEP_SECONDS

    run(main, seed)


@pytest.mark.parametrize("steps", [0, 1, 3, 12])
@pytest.mark.parametrize("seed", SEEDS)
def test_closing_the_engine_ends_open_streams_wherever_they_are(seed, steps):
    async def main() -> None:
        async with Engine(model(), policy=SchedulingPolicy(), max_num_seqs=3) as engine:
            checker = StreamChecker(engine)
            prompts = [[index] * 60 for index in range(5)] + [TEXT, TEXT]
            reads = [asyncio.create_task(checker.read(p, params(300))) for p in prompts]
            await asyncio.sleep(steps * STEP_SECONDS)
            assert checker.num_open == len(prompts) or steps == 0
        ends = await asyncio.gather(*reads)
        assert set(ends) == {"EngineClosedError"}
        checker.check()
        check_invariants(engine)
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_held_by_requests) == (0, 0, 0)

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drain_with_a_deadline_ends_what_is_left(seed):
    async def main() -> None:
        async with watched(model()) as checker:
            long = [asyncio.create_task(checker.read([i], params(500))) for i in range(3)]
            short = [asyncio.create_task(checker.read([i], params(10))) for i in range(3)]
            await until(lambda: checker.num_open == 6)
            assert await checker.engine.drain(20 * STEP_SECONDS) == 3
            assert await asyncio.gather(*long) == ["EngineClosedError"] * 3
            assert await asyncio.gather(*short) == ["length"] * 3
            with pytest.raises(EngineClosedError, match="draining"):
                checker.engine.stream([1])

    run(main, seed)


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("seed", SEEDS)
def test_a_host_cancelled_at_any_moment_closes_its_engine(seed, steps):
    engine = Engine(model(), policy=SchedulingPolicy())

    async def host() -> None:
        async with engine:
            checker = StreamChecker(engine)
            async with anyio.create_task_group() as group:
                for index in range(4):
                    group.start_soon(checker.read, [index] * 30, params(20))
            await engine.drain()

    async def main() -> None:
        before = asyncio.all_tasks()
        with anyio.move_on_after(steps * 3 * STEP_SECONDS):
            await host()
        assert asyncio.all_tasks() == before
        if not engine._lifecycle.is_started:
            assert steps == 0
        else:
            check_invariants(engine)
            assert engine.stats().pages_held_by_requests == 0

    run(main, seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_engines_on_one_loop_after_another_work_and_share_nothing(seed):
    """A lock, event or task that is bound to the first loop would hang on the second."""

    async def main() -> None:
        async with watched(model()) as one, watched(model()) as other:
            reads = [w.read([i], params(20)) for w in (one, other) for i in range(5)]
            assert set(await asyncio.gather(*reads)) == {"length"}

    for _ in range(2):
        run(main, seed)
