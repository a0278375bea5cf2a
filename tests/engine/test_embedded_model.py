"""The embedded model through the whole engine: chat template, batching, native kernels, text."""

from __future__ import annotations

import asyncio
import json

import pytest

from aioserve import Engine
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
