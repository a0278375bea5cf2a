"""Whole engines on a fake GPU and a simulated loop, with everything that a scheduler does."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from aioserve import AioserveError, Engine, Pooling, SamplingParams, StepError
from aioserve.testing import StreamChecker, check_invariants, count_leaked_pages
from aioserve.testing.fake_device import expected_hidden
from aioserve.testing.fake_model import PlantedError
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.fake_gpu_model import FakeGpuModel
from tests.doubles.gpu_faults import GpuFault, GpuFaults

MAX_MODEL_LEN = 96
STEPS_FAIL = GpuFaults(
    rates={GpuFault.OUT_OF_MEMORY: 0.01, GpuFault.RAISES: 0.01, GpuFault.BAD_ROW: 0.01}
)
"""Faults: launches are refused, find no memory, or compute NaN."""


def options_of(draw: random.Random) -> dict[str, Any]:
    """Draw options of an engine with so few pages that sequences are preempted and swapped."""
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
    model: FakeGpuModel,
    draw: random.Random,
    num_requests: int = 40,
    *,
    preempts: bool = False,
    **options: Any,
) -> tuple[StreamChecker, Engine]:
    """Serve random requests until all have ended.

    Some share prefixes, fork, ask for log-probabilities, are embedded, leave early or are
    cancelled. With `preempts`, any of them is preempted at any time.
    """
    async with Engine(model, **options) as engine:
        checker = StreamChecker(engine)
        asking = draw.random() < 0.5  # steps in which any request asks run eagerly
        share_embedded = draw.choice([0.0, 0.3, 0.7])
        prefixes = [[draw.randrange(256) for _ in range(draw.randrange(40))] for _ in range(4)]
        beside = [asyncio.create_task(_check(engine))]
        if preempts:
            beside.append(asyncio.create_task(_preempt(engine, draw)))

        def drawn_prompt() -> list[int]:
            behind = [draw.randrange(9) for _ in range(draw.randint(1, 9))]
            return [*draw.choice(prefixes), *behind]

        def embedded() -> tuple[list[list[int]], Pooling]:
            prompts = [drawn_prompt() for _ in range(draw.randint(1, 3))]
            return prompts, draw.choice(["last", "last", "mean", "cls"])

        async def request() -> None:
            await asyncio.sleep(draw.random() * 0.3)
            body = _embed(checker, *embedded()) if draw.random() < share_embedded else generate()
            reading = asyncio.create_task(body)
            if draw.random() < 0.15:
                await asyncio.wait([reading], timeout=draw.random() * 0.1)
                reading.cancel()
            await asyncio.wait([reading])

        async def generate() -> None:
            params = SamplingParams(
                max_tokens=draw.choice([1, 2, 5, 20]),
                seed=draw.randrange(99),
                n=draw.choice([1, 1, 1, 3]),
                logprobs=draw.choice([None, None, 0, 5]) if asking else None,
                prompt_logprobs=draw.choice([None, None, 0, 5]) if asking else None,
            )
            leave_after = draw.choice([None, None, None, 3])
            await checker.read(drawn_prompt(), params, leave_after=leave_after)

        await asyncio.gather(*(request() for _ in range(num_requests)))
        if engine.dump()["state"] == "open":
            await engine.drain()
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        for task in beside:
            if not task.cancelled():
                task.result()
        check_invariants(engine)
    if engine.dump()["state"] == "closed" and not checker.ends["EngineFailedError"]:
        assert count_leaked_pages(engine) == 0
    return checker, engine


def check_but_for_failures(checker: StreamChecker) -> None:
    """Check everything, but let requests fail, since steps may fail."""
    assert not checker.wrong_tokens
    assert not checker.wrong_ends
    assert checker.num_open == 0
    assert checker.ends["length"] + checker.ends["embedded"] > 10


async def _embed(checker: StreamChecker, prompts: list[list[int]], pooling: Pooling) -> None:
    """Embed prompts, and note their end as the checker does for streams."""
    end = "cancelled"
    try:
        found = await checker.engine.embed(prompts, pooling=pooling, normalize=False)
        end = "embedded"
    except AioserveError as error:
        end = type(error).__name__
        if isinstance(error, StepError) and not isinstance(error.__cause__, PlantedError):
            checker.failed_steps.append(f"{len(prompts)} embeddings: {error}")
        return
    finally:
        checker.ends[end] += 1
    for prompt, vector in zip(prompts, found, strict=True):
        states = expected_hidden(prompt)
        wanted = {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[pooling]
        if not np.array_equal(vector, wanted.astype(np.float32)):
            checker.wrong_tokens.append(f"{pooling} of {prompt}: {vector}, not {wanted}")


async def _preempt(engine: Engine, draw: random.Random) -> None:
    """Preempt running sequences at random times, at most twice each."""
    while True:
        await asyncio.sleep(draw.random() * 0.02)
        state = engine._lifecycle.scheduler.state
        running = [sequence for sequence in state.running if sequence.epoch < 2]
        if running:
            state.preempt(draw.choice(running), state.launched + 1)


async def _check(engine: Engine) -> None:
    while True:
        await asyncio.sleep(0.02)
        check_invariants(engine)


def gpu_of(model: FakeGpuModel) -> FakeGpu:
    assert model.gpu is not None
    return model.gpu


@contextmanager
def silence() -> Iterator[None]:
    """Turn off the log of planted faults."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
