"""Whole engines on a fake GPU and a simulated loop, with everything that a scheduler does."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aioserve import Engine, SamplingParams
from aioserve.testing import StreamChecker, check_invariants, count_leaked_pages
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.fake_gpu_model import FakeGpuModel

MAX_MODEL_LEN = 96


def options_of(draw: random.Random) -> dict[str, Any]:
    """Pages are scarce, so that sequences are preempted and swapped."""
    page_size = draw.choice([1, 4, 16])
    num_pages = int(MAX_MODEL_LEN / page_size * draw.choice([1.5, 3, 6]))
    swaps = draw.random() < 0.7
    return {
        "page_size": page_size,
        "num_pages": num_pages,
        "num_host_pages": draw.choice([num_pages // 2, 2 * num_pages]) if swaps else 0,
        "preemption": draw.choice(["auto", "swap"]) if swaps else "auto",
        "prefix_caching": swaps or draw.random() < 0.8,
        "max_num_seqs": draw.choice([4, 12]),
        "max_num_batched_tokens": draw.choice([16, 64]),
        "output_reserve_tokens": draw.choice([0, 8]),
        "overlap": draw.random() < 0.9,
    }


async def serve(
    model: FakeGpuModel, draw: random.Random, num_requests: int = 40, **options: Any
) -> tuple[StreamChecker, Engine]:
    """Requests that share prefixes, fork, ask for log-probabilities, leave early and are cancelled,
    until all have ended."""
    async with Engine(model, **options) as engine:
        checker = StreamChecker(engine)
        asking = draw.random() < 0.5  # steps in which anybody asks run eagerly
        prefixes = [[draw.randrange(256) for _ in range(draw.randrange(40))] for _ in range(4)]
        checking = asyncio.create_task(_check(engine))

        async def request() -> None:
            await asyncio.sleep(draw.random() * 0.3)
            prompt = [
                *draw.choice(prefixes),
                *(draw.randrange(9) for _ in range(draw.randint(1, 9))),
            ]
            params = SamplingParams(
                max_tokens=draw.choice([1, 2, 5, 20]),
                seed=draw.randrange(99),
                n=draw.choice([1, 1, 1, 3]),
                logprobs=draw.choice([None, None, 0, 5]) if asking else None,
                prompt_logprobs=draw.choice([None, None, 0, 5]) if asking else None,
            )
            reading = asyncio.create_task(
                checker.read(prompt, params, leave_after=draw.choice([None, None, None, 3]))
            )
            if draw.random() < 0.15:
                await asyncio.wait([reading], timeout=draw.random() * 0.1)
                reading.cancel()
            await asyncio.wait([reading])

        await asyncio.gather(*(request() for _ in range(num_requests)))
        if engine.dump()["state"] == "open":
            await engine.drain()
        checking.cancel()
        await asyncio.wait([checking])
        if not checking.cancelled():
            checking.result()
        check_invariants(engine)
    if engine.dump()["state"] == "closed" and not checker.ends["EngineFailedError"]:
        assert count_leaked_pages(engine) == 0
    return checker, engine


async def _check(engine: Engine) -> None:
    while True:
        await asyncio.sleep(0.02)
        check_invariants(engine)


def gpu_of(model: FakeGpuModel) -> FakeGpu:
    assert model.gpu is not None
    return model.gpu


@contextmanager
def silence() -> Iterator[None]:
    """Without the log of faults that are planted."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
