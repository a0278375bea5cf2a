"""Too few pages: everybody grows at once, and allocations that fail."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from aioserve import Engine, SchedulingPolicy
from aioserve.kv.page_pool import OutOfPagesError, PagePool
from aioserve.testing import FakeModel, StreamChecker, check_invariants, count_leaked_pages
from tests.faults.harness import SEEDS, STEP_SECONDS, params, run, watched


def model(num_pages: int) -> FakeModel:
    return FakeModel(num_pages=num_pages, max_model_len=64, step_seconds=lambda plan: STEP_SECONDS)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_requests_that_all_grow_past_the_pool_all_end(seed, n, page_size):
    """There is room for one whole answer and a little more; everybody wants all of it."""

    async def main() -> None:
        pages = 64 // page_size
        async with watched(model(pages + 2), page_size=page_size) as checker:
            reads = [checker.read([index] * 8, params(56, n=n)) for index in range(6)]
            assert await asyncio.gather(*reads) == ["length"] * 6
            assert checker.engine.stats().preemptions_total

    run(main, seed)


SCARCE = {"page_size": 4, "output_reserve_tokens": 0, "max_num_batched_tokens": 32}
SWAPPING = {**SCARCE, "num_host_pages": 16, "preemption": "swap"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [SCARCE, SWAPPING], ids=["recompute", "swap"])
@pytest.mark.parametrize("raised", [OutOfPagesError, MemoryError])
def test_whichever_allocation_fails_it_costs_time_or_is_an_error_by_name(
    options, raised, monkeypatch
):
    """Too few pages, on the device or the host: a later step does it. Anything else is a bug, and
    ends the request that was being planned, which says so."""
    acquire = PagePool.acquire
    error = OutOfPagesError(1, 0, 0) if raised is OutOfPagesError else MemoryError("planted")
    calls = 0

    async def main(failing: int) -> None:
        nonlocal calls
        calls = 0

        def failing_once(pool: PagePool, count: int):
            nonlocal calls
            calls += 1
            if calls == failing:
                raise error
            return acquire(pool, count)

        monkeypatch.setattr(PagePool, "acquire", failing_once)
        async with Engine(model(16), policy=SchedulingPolicy(), **options) as engine:
            checker = StreamChecker(engine)
            reads = [checker.read([index // 2] * 10, params(24, n=2)) for index in range(3)]
            await asyncio.gather(*reads)
            checker.check()
            if raised is MemoryError and failing:
                assert checker.ends == {"length": 2, "RequestFailedError": 1}
            else:
                assert checker.ends == {"length": 3}
            assert await checker.read([9], params(4)) == "length"
            await engine.drain()
            check_invariants(engine)
            assert count_leaked_pages(engine) == 0

    run(partial(main, 0), seed=0)
    num_calls = calls - 1  # less that of the last request
    assert num_calls > 20
    for failing in range(1, num_calls + 1):
        run(partial(main, failing), seed=0)
