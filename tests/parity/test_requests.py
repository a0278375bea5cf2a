"""Options of requests through the whole engine, against transformers.

These are log-probabilities, penalties against its `generate`, and a batch in which each row has
other options."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from aioserve import Completion, Engine, SamplingParams
from tests.parity.tiny_models import VOCAB_SIZE

NAMES = ("llama", "qwen3", "gemma3")
NUM_TOKENS = 24
TOLERANCE = 1e-4
TIGHT: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 36,
    "max_num_batched_tokens": 13,
    "output_reserve_tokens": 0,
}
"""Options of an engine that chunks prompts and preempts requests."""
ROOMY: dict[str, Any] = {"page_size": 16, "num_pages": 256}


def prompt_of(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(VOCAB_SIZE) for _ in range(length)]


@torch.inference_mode()
def expected_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """Compute log-probabilities, where row `p` is for the token at position `p + 1`."""
    return torch.log_softmax(model(torch.tensor([ids]), use_cache=False).logits[0], dim=1)


def assert_logprobs(model: Any, prompt: list[int], answer: Completion, top: int) -> None:
    ids = prompt + list(answer.token_ids)
    expected = expected_logprobs(model, ids)
    assert answer.prompt_logprobs is not None
    assert answer.logprobs is not None
    first, *others = answer.prompt_logprobs
    assert first is None
    found = [*others, *answer.logprobs]
    assert len(found) == len(ids) - 1
    for position, one in enumerate(found):
        assert one is not None
        row = expected[position]
        assert abs(one.logprob - row[ids[position + 1]].item()) < TOLERANCE
        assert len(one.top) == (2 if position < len(prompt) - 1 else top)
        for place, best in zip(one.top, row.topk(len(one.top)).values.tolist(), strict=True):
            assert abs(place.logprob - best) < TOLERANCE
            assert abs(place.logprob - row[place.id].item()) < TOLERANCE


@pytest.mark.parametrize("settings", [TIGHT, ROOMY], ids=["tight", "roomy"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.asyncio
async def test_logprobs_are_those_of_transformers(name, settings, directory_of, oracle, backend):
    """Completions and prompts are checked. Prompts share a beginning, and have busy neighbours."""
    beginning = prompt_of(1, 24)
    prompts = [[*beginning, *prompt_of(seed, 3 + 5 * seed)] for seed in range(4)]
    params = SamplingParams(
        temperature=0.8, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=4
    )
    asked = SamplingParams(
        temperature=0.8,
        seed=5,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=4,
        prompt_logprobs=2,
    )
    options = {**settings, "backend": backend.name, "dtype": "float32"}
    async with Engine(str(directory_of(name)), **options) as engine:
        neighbours = [engine.generate(prompt_of(90 + i, 20), params) for i in range(12)]
        answers = await asyncio.gather(*(engine.generate(p, asked) for p in prompts), *neighbours)
        await asyncio.gather(*(engine.generate(p, params) for p in prompts))
        again = await asyncio.gather(*(engine.generate(p, asked) for p in prompts))
        stats = engine.stats()

    model = oracle(name)
    answered = [*answers[: len(prompts)], *again]
    for prompt, answer in zip([*prompts, *prompts], answered, strict=True):
        assert_logprobs(model, prompt, answer, 4)
    assert stats.tokens_cached_total > 0
    if settings is TIGHT:
        assert stats.preemptions_total > 0


EDITS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "less than none": {"repetition_penalty": 0.8},
    "at least": {"min_new_tokens": 9},
    "a bias": {"sequence_bias": [[[7], 6.0], [[9], -4.0]], "repetition_penalty": 1.1},
    "bad words": {"bad_words_ids": [[5], [11, 12], [30, 31, 32]]},
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.asyncio
async def test_edited_greedy_answers_are_those_of_transformers(name, directory_of, oracle, backend):
    model, prompt = oracle(name), prompt_of(3, 20)
    options = {**TIGHT, "backend": backend.name, "dtype": "float32"}
    wanted = {}
    for label, edits in EDITS.items():
        if label == "bad words":
            continue  # they are texts here
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=4,
            pad_token_id=0,
            **edits,
        )
        wanted[label] = ids[0, len(prompt) :].tolist()
    async with Engine(str(directory_of(name)), **options) as engine:
        answers = await asyncio.gather(
            *(engine.generate(prompt, params_of(EDITS[label])) for label in wanted)
        )

    assert {
        label: list(answer.token_ids) for label, answer in zip(wanted, answers, strict=True)
    } == wanted


def params_of(edits: dict[str, Any]) -> SamplingParams:
    bias = {ids[0]: value for ids, value in edits.get("sequence_bias", [])}
    return SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        stop_token_ids=[4],
        repetition_penalty=edits.get("repetition_penalty", 1.0),
        min_tokens=edits.get("min_new_tokens", 0),
        logit_bias=bias,
    )


def any_params(source: random.Random) -> SamplingParams:
    """Draw parameters of all kinds that can be combined."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if source.random() < 0.4 else otherwise

    return SamplingParams(
        max_tokens=NUM_TOKENS,
        temperature=source.choice([0.0, 0.3, 1.0, 1.7]),
        top_k=sometimes(source.randrange(1, 30), 0),
        top_p=sometimes(source.uniform(0.3, 1), 1.0),
        repetition_penalty=sometimes(source.uniform(0.7, 1.6), 1.0),
        presence_penalty=sometimes(source.uniform(-2, 2), 0.0),
        frequency_penalty=sometimes(source.uniform(-2, 2), 0.0),
        logit_bias=sometimes({source.randrange(VOCAB_SIZE): source.uniform(-9, 9)}, {}),
        allowed_token_ids=sometimes(source.sample(range(VOCAB_SIZE), 20), None),
        bad_words=sometimes(["a", "bc"], ()),
        min_tokens=sometimes(source.randrange(NUM_TOKENS), 0),
        seed=source.randrange(2**64),
        stop_token_ids=sometimes(source.sample(range(VOCAB_SIZE), 3), ()),
        logprobs=sometimes(source.randrange(6), None),
        prompt_logprobs=sometimes(source.randrange(3), None),
        n=sometimes(2, 1),
    )


@pytest.mark.more
@pytest.mark.asyncio
async def test_in_a_mixed_batch_each_row_is_what_it_is_alone(directory_of, backend):
    """32 requests together, through chunks and preemption, and one after the other with room."""
    source = random.Random(11)
    requests = [(prompt_of(i, source.randrange(1, 40)), any_params(source)) for i in range(32)]
    model = str(directory_of("llama"))
    options = {"backend": backend.name, "dtype": "float32"}
    async with Engine(model, **TIGHT, **options) as engine:
        together = await asyncio.gather(*(engine.generate(*request) for request in requests))
        preemptions = engine.stats().preemptions_total
    async with Engine(model, **ROOMY, **options) as engine:
        alone = [await engine.generate(*request) for request in requests]

    assert preemptions > 0
    for one, other in zip(together, alone, strict=True):
        assert [s.token_ids for s in one.samples] == [s.token_ids for s in other.samples]
        assert [s.finish_reason for s in one.samples] == [s.finish_reason for s in other.samples]
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)
        assert one.prompt_logprobs is None or len(one.prompt_logprobs) == one.usage.prompt_tokens
    assert len({s.token_ids for one in alone for s in one.samples}) > 32
