"""Weights of integers can be multiplied with activations in floats (weight-only)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aioserve import Completion, ConfigError, Engine, SamplingParams
from tests.models.quantization.compressed import write_mixture

pytestmark = pytest.mark.asyncio

PROMPT = [5, 9, 200, 31, 77, 8, 120, 3, 150]
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)


async def answered(model: Path, **options: Any) -> tuple[Completion, dict[str, int]]:
    async with Engine(str(model), dtype="float32", num_pages=16, **options) as engine:
        return await engine.generate(PROMPT, GREEDY), engine.dump()["model"]["weight_bytes"]


def numbers(completion: Completion) -> tuple[object, ...]:
    (sample,) = completion.samples
    return (sample.token_ids, sample.logprobs)


async def test_without_it_a_model_computes_as_the_floats_that_it_stands_for(tmp_path: Path) -> None:
    model, floats = write_mixture(tmp_path)
    expected, held = await answered(floats)
    found, held_by_format = await answered(model, activation_quantization="none")
    integers, held_as_integers = await answered(model)
    assert numbers(found) == numbers(expected)
    assert numbers(integers) != numbers(expected)
    assert held_by_format == held_as_integers
    assert sum(held_as_integers.values()) < sum(held.values())


async def test_it_is_refused_where_activations_are_floats_anyway() -> None:
    with pytest.raises(ConfigError, match="activation_quantization='none' has no effect with "):
        Engine("pyhelp", activation_quantization="none", backend="reference")


async def test_other_numbers_are_refused_by_name() -> None:
    wrong: dict[str, Any] = {"activation_quantization": "int4"}
    with pytest.raises(ConfigError, match=r"activation_quantization must be .*'auto'.*'none'"):
        Engine("pyhelp", **wrong)
