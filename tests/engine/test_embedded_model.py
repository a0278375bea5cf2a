"""The embedded model through the whole engine: chat template, batching, native kernels, text."""

from __future__ import annotations

import asyncio
import json

import pytest
from msgspec.structs import replace

from aioserve import Engine, SamplingParams
from aioserve.assets import model_path


@pytest.mark.asyncio
async def test_three_hundred_questions_asked_at_once_are_answered_from_the_docstrings():
    directory = model_path("pyhelp")
    assert directory is not None
    facts: dict[str, str] = dict(json.loads((directory / "questions.json").read_text()))
    assert len(facts) == 300

    async with Engine("pyhelp", num_pages=600, output_reserve_tokens=0) as engine:
        answers = await asyncio.gather(
            *(engine.generate([{"role": "user", "content": question}]) for question in facts)
        )
        await engine.drain()
        stats = engine.stats()

    exact = [a.text.strip() == fact for a, fact in zip(answers, facts.values(), strict=True)]
    assert sum(exact) >= 0.8 * len(facts)
    assert len({answer.text for answer in answers}) >= 0.8 * len(facts)
    assert stats.pages_held_by_requests == stats.pages_fenced == 0


@pytest.mark.asyncio
async def test_samples_of_a_real_model_are_the_answers_of_their_seeds():
    prompt = "def read_lines(path):\n    "
    sampled = SamplingParams(temperature=1.0, max_tokens=16, seed=5, ignore_eos=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    async with Engine("pyhelp", num_pages=64, prefix_caching=False) as engine:
        for params in (sampled, greedy):
            done = await engine.generate(prompt, replace(params, n=3))
            for index, sample in enumerate(done.samples):
                alone = await engine.generate(prompt, replace(params, seed=5 + index))
                assert alone.token_ids == sample.token_ids
            distinct = {sample.text for sample in done.samples}
            assert len(distinct) == (3 if params is sampled else 1)
