"""Several requests that run as one."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aioserve import Engine, SamplingParams
from aioserve.server.openai.multi_request import Merged, all_of
from aioserve.testing import FakeModel, check_invariants
from tests.tiers import examples

pytestmark = pytest.mark.asyncio


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.integers(1, 2),
    st.lists(st.sampled_from([0, 0.001, 0.02]), min_size=1, max_size=4),
)
async def test_whatever_its_reader_does_no_sample_ends_before_its_tokens(
    lengths: list[int], n: int, naps: list[float]
) -> None:
    async with Engine(FakeModel(num_pages=64)) as engine:
        merged = await Merged.begun(
            [
                partial(
                    engine.stream,
                    [1, 2],
                    SamplingParams(max_tokens=length, n=n, ignore_eos=True),
                )
                for length in lengths
            ]
        )
        await merged.started()
        counts = [[0] * n for _ in lengths]
        ends = [0] * len(lengths)
        round_number = 0
        async for place, batch in merged.batches():
            for token in batch.tokens:
                counts[place][token.sample] += 1
            for sample, reason in enumerate(batch.finish_reasons):
                if reason is not None:
                    assert counts[place][sample] == lengths[place]
            ends[place] += not batch.tokens
            await asyncio.sleep(naps[round_number % len(naps)])
            round_number += 1
        assert counts == [[length] * n for length in lengths]
        assert ends == [1] * len(lengths)
        assert merged.usage.completion_tokens == n * sum(lengths)
        merged.close()
        check_invariants(engine)


async def test_what_fails_first_is_raised_once_the_others_are_cancelled() -> None:
    ended: list[int] = []

    async def call(number: int) -> int:
        try:
            await asyncio.sleep(0.01 if number == 1 else 30)
        finally:
            ended.append(number)
        raise ValueError(number)

    with pytest.raises(ValueError, match="1"):
        await all_of([partial(call, number) for number in range(3)])
    assert sorted(ended) == [0, 1, 2]
