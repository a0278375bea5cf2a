"""Step programs give the same bits as single ops, in every architecture and the whole engine."""

from __future__ import annotations

import asyncio

import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.models.loader import load_model
from aioserve.ops import backend_named
from tests.parity.paged import PagedRun
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE

PROMPTS = {
    name: torch.randint(
        0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    for name, length in {"a": 70, "b": 1, "c": 33}.items()
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture_is_recorded_and_gives_the_same_bits(name, dtype, directory_of):
    runs = []
    for use_program in (True, False):
        model = load_model(directory_of(name), dtype=dtype, use_program=use_program)
        assert (model.program is not None) == use_program
        run = PagedRun(model)
        logits = [
            *run.step(PROMPTS).values(),
            *run.step({"c": [5], "a": [6, 7, 8], "b": [9]}).values(),
            run.rows({"a": [3], "b": [4]}, []),
            run.rows({"a": [3], "b": [4]}, [1]),
        ]
        runs.append((logits, run.cache.storage.clone()))
    for with_program, without in zip(*(logits for logits, _ in runs), strict=True):
        assert torch.equal(with_program, without)
    pages = [storage.view(torch.uint8) for _, storage in runs]
    assert torch.equal(*pages)


def test_the_reference_backend_computes_op_by_op(directory_of):
    assert load_model(directory_of("llama"), backend=backend_named("reference")).program is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.asyncio
async def test_answers_are_the_same_with_and_without(temperature, directory_of):
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=20, ignore_eos=True)
    answers = []
    for step_program in (True, False):
        async with Engine(
            str(directory_of("qwen3")),
            num_pages=40,
            page_size=4,
            max_num_batched_tokens=17,
            step_program=step_program,
        ) as engine:
            assert engine.dump()["model"]["step_program"] is step_program
            answers.append(
                await asyncio.gather(*(engine.generate(ids, params) for ids in PROMPTS.values()))
            )
    assert [a.token_ids for a in answers[0]] == [a.token_ids for a in answers[1]]
