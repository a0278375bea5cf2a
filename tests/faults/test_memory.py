"""Too few pages: everybody grows at once, and allocations that fail."""

from __future__ import annotations

import asyncio

import pytest

from aioserve.testing import FakeModel
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
        async with watched(model(pages + 2), page_size=page_size) as witness:
            reads = [witness.read([index] * 8, params(56, n=n)) for index in range(6)]
            assert await asyncio.gather(*reads) == ["length"] * 6
            assert witness.engine.stats().preemptions_total

    run(main, seed)
