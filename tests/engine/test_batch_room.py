"""A batch of prompts never overfills the queue by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine, QueueFullError, SamplingParams
from aioserve.testing import FakeModel, check_invariants, expected_tokens, run_simulated
from tests.tiers import examples

NUM_TOKENS = 5


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=24),
    num_seqs=st.integers(1, 8),
    max_waiting=st.integers(1, 8),
    max_waiting_tokens=st.integers(31, 90),
)
def test_a_batch_waits_for_itself(
    seed: int, lengths: list[int], num_seqs: int, max_waiting: int, max_waiting_tokens: int
) -> None:
    prompts = [[*range(index, index + length)] for index, length in enumerate(lengths)]
    options: dict[str, Any] = {
        "max_num_seqs": num_seqs,
        "max_waiting": max_waiting,
        "max_waiting_tokens": max_waiting_tokens,
    }

    async def scene() -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, seed=0)
        async with Engine(FakeModel(num_pages=64), **options) as engine:
            told = await engine.generate(prompts, params, progress=False)
            check_invariants(engine)
        for prompt, completion in zip(prompts, told, strict=True):
            ids = [*completion.token_ids]
            assert ids == expected_tokens(prompt, NUM_TOKENS, 0)

    run_simulated(scene, seed=seed)


def test_the_room_of_a_long_prompt_is_for_many_short_ones() -> None:
    """Each end makes room for several requests: as many run at once as possible."""
    prompts = [[*range(40)], *[[index] for index in range(24)]]
    most = 0

    async def scene() -> None:
        nonlocal most
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        options: dict[str, Any] = {"max_num_seqs": 8, "max_waiting_tokens": 40}
        async with Engine(FakeModel(num_pages=64), **options) as engine:
            batch = asyncio.ensure_future(engine.generate(prompts, params, progress=False))
            while not batch.done():
                most = max(most, engine.stats().num_running)
                await asyncio.sleep(0)
            assert len(await batch) == 25

    run_simulated(scene, seed=0)
    assert most == 8


def test_a_queue_that_others_fill_refuses_a_batch() -> None:
    async def scene() -> None:
        async with Engine(FakeModel(num_pages=64), max_num_seqs=1, max_waiting=2) as engine:
            params = SamplingParams(max_tokens=50, ignore_eos=True)
            others = [engine.stream([0], params)]
            await others[0].started()
            others += [engine.stream([index], params) for index in (1, 2)]
            with pytest.raises(QueueFullError):
                await engine.generate([[1, 2], [3, 4]], params, progress=False)
            for other in others:
                assert len([token async for token in other]) == 50

    run_simulated(scene, seed=0)
