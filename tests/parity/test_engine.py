"""Greedy completions through the whole engine against transformers, token by token.

Many requests run at once, paged and chunked. Some engines have pages to spare. In others, pages run
out, so that requests are preempted and computed again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aioserve import Completion, ConfigError, Engine, SamplingParams
from tests.parity.cases import on_backends
from tests.parity.tiny_models import CONFIGS, VOCAB_SIZE

PROMPT_LENGTHS = (1, 9, 31, 64, 70, 90)
NUM_TOKENS = 24
ROUNDING = 1e-4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"num_pages": 256},
    "chunks and preemption": {
        "page_size": 4,
        "num_pages": 60,
        "max_num_batched_tokens": 13,
        "output_reserve_tokens": 0,
        "overlap": False,
    },
    "chunks, overlapped": {"page_size": 1, "num_pages": 1024, "max_num_batched_tokens": 37},
}


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@pytest.mark.asyncio
async def test_an_engine_for_short_contexts_takes_the_short_factors_of_longrope(
    directory_of, oracle
):
    short = [ids for ids in prompts() if len(ids) + NUM_TOKENS <= 64]
    directory = str(directory_of("phi3-longrope"))
    async with Engine(directory, max_model_len=64, num_pages=256) as engine:
        answers = await asyncio.gather(*(engine.generate(ids, GREEDY) for ids in short))

    for prompt, answer in zip(short, answers, strict=True):
        assert_greedy(oracle("phi3-longrope"), prompt, answer)


@torch.inference_mode()
def assert_greedy(model: Any, prompt: list[int], answer: Completion) -> None:
    """Check that each token is the most likely one, up to a tie within rounding."""
    ids = list(answer.token_ids)
    assert len(ids) == NUM_TOKENS
    logits = model(torch.tensor([prompt + ids]), use_cache=False).logits[0]
    after = logits[len(prompt) - 1 : -1]
    chosen = after.gather(1, torch.tensor(ids)[:, None])[:, 0]
    assert (after.max(dim=1).values - chosen).max().item() <= ROUNDING


@on_backends(CONFIGS, SETTINGS)
@pytest.mark.asyncio
async def test_greedy_answers_are_those_of_transformers(
    name, settings, directory_of, oracle, backend
):
    options = {**SETTINGS[settings], "backend": backend.name}
    async with Engine(str(directory_of(name)), dtype="float32", **options) as engine:
        answers = await asyncio.gather(*(engine.generate(ids, GREEDY) for ids in prompts()))
        preemptions = engine.stats().preemptions_total
        assert engine.dump()["model"]["backend"] == backend.name

    for prompt, answer in zip(prompts(), answers, strict=True):
        assert_greedy(oracle(name, long_context=True), prompt, answer)
    assert len({token_id for answer in answers for token_id in answer.token_ids}) > NUM_TOKENS
    if settings == "chunks and preemption":
        assert preemptions > 0


@pytest.mark.asyncio
async def test_pages_that_hold_no_request_of_groups_of_layers_are_refused(directory_of) -> None:
    with pytest.raises(ConfigError, match=r"num_pages must be at least 6 .* 3 groups .* got 2"):
        async with Engine(str(directory_of("gemma3")), num_pages=2, page_size=1):
            pass


@pytest.mark.asyncio
async def test_pages_by_default_are_enough_for_whole_chunks_of_a_window_model(directory_of) -> None:
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 64, "page_size": 4}
    async with Engine(str(directory_of("gemma3")), **options) as engine:
        prompt = (prompts()[-1] * 2)[:120]
        await engine.generate(prompt, SamplingParams(max_tokens=1))
        assert engine.stats().steps_total <= -(-len(prompt) // 64) + 1
