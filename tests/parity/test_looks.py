"""Embeddings and scores through the whole engine against transformers.

There are chunks, prefix hits, preemption, and neighbours that generate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioserve import Completion, Engine, Pooling, SamplingParams, Score
from aioserve.ops import Linear, TensorOps
from tests.parity.test_requests import (
    NAMES,
    ROOMY,
    TIGHT,
    TOLERANCE,
    expected_logprobs,
    prompt_of,
)
from tests.parity.tiny_models import VOCAB_SIZE

BEGINNING = prompt_of(1, 24)
PROMPTS = [[*BEGINNING, *prompt_of(seed, 1 + 14 * seed)] for seed in range(3)] + [[7]]
SCENES: list[tuple[str, dict[str, Any]]] = [*((name, TIGHT) for name in NAMES), ("llama", ROOMY)]
IDS = [*(f"{name}-tight" for name in NAMES), "llama-roomy"]
WAYS: tuple[tuple[Pooling, bool], ...] = (
    ("last", True),
    ("mean", False),
    ("mean", True),
    ("cls", False),
)
"""Ways of pooling, each with a flag for normalisation."""
NEIGHBOUR = SamplingParams(temperature=0.7, seed=3, max_tokens=24, ignore_eos=True)


@asynccontextmanager
async def preempting(engine: Engine) -> AsyncIterator[None]:
    """Preempt each request twice in the middle of its prompt, while the context is open."""

    async def preempt() -> None:
        live = engine._lifecycle
        state = live.scheduler.state
        while True:
            for one in list(state.running):
                done, tokens = one.lease.computed, one.prompt_tokens
                if not one.request.answers and one.epoch < 2 and tokens < 2 * done < 2 * tokens:
                    state.preempt(one, state.launched + 1)
            await asyncio.sleep(0)

    task = asyncio.ensure_future(preempt())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@torch.inference_mode()
def expected_embedding(
    model: Any, ids: list[int], pooling: str, normalize: bool
) -> npt.NDArray[np.float32]:
    states = model.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0].double()
    pooled = {"last": states[-1], "mean": states.mean(dim=0), "cls": states[0]}[pooling]
    return (pooled / pooled.norm() if normalize else pooled).float().numpy()


def assert_score(model: Any, prompt: list[int], score: Score, top: int) -> None:
    ids = [*prompt, *score.token_ids]
    rows = expected_logprobs(model, ids)[len(prompt) - 1 : -1]
    found = [one.logprob for one in score.logprobs]
    wanted = [rows[i, token].item() for i, token in enumerate(score.token_ids)]
    assert found == pytest.approx(wanted, abs=TOLERANCE)
    assert score.logprob == pytest.approx(sum(wanted), abs=TOLERANCE * len(wanted))
    for one, row in zip(score.logprobs, rows, strict=True):
        best = row.topk(top).values.tolist()
        assert [place.logprob for place in one.top] == pytest.approx(best, abs=TOLERANCE)
    assert score.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(("name", "settings"), SCENES, ids=IDS)
@pytest.mark.asyncio
async def test_embeddings_are_those_of_transformers(name, settings, directory_of, oracle, backend):
    """Prompts share a beginning, and come twice, so that the second time hits the cache."""
    options = {**settings, "backend": backend.name, "dtype": "float32"}
    async with Engine(str(directory_of(name)), **options) as engine:
        rounds = []
        for _ in range(2):
            neighbours = [engine.generate(prompt_of(90 + i, 20), NEIGHBOUR) for i in range(5)]
            found = [
                engine.embed(PROMPTS, pooling=pooling, normalize=normalize)
                for pooling, normalize in WAYS
            ]
            async with preempting(engine):
                rounds.append((await asyncio.gather(*neighbours, *found))[len(neighbours) :])
        stats = engine.stats()

    wanted = [
        np.stack([expected_embedding(oracle(name), p, pooling, normalize) for p in PROMPTS])
        for pooling, normalize in WAYS
    ]
    for found in rounds:
        for embeddings, expected in zip(found, wanted, strict=True):
            assert isinstance(embeddings, np.ndarray)
            assert embeddings.dtype == np.float32
            np.testing.assert_allclose(embeddings, expected, atol=TOLERANCE)
    assert stats.tokens_cached_total > 0
    assert stats.tokens_generated_total == 2 * 5 * 24
    if settings is TIGHT:
        assert stats.preemptions_total > len(PROMPTS)


@pytest.mark.parametrize(("name", "settings"), SCENES, ids=IDS)
@pytest.mark.asyncio
async def test_scores_are_those_of_transformers(name, settings, directory_of, oracle, backend):
    options = {**settings, "backend": backend.name, "dtype": "float32"}
    continuations = [prompt_of(50 + i, 1 + 6 * i) for i in range(3)]
    async with Engine(str(directory_of(name)), **options) as engine:
        neighbours = [engine.generate(prompt_of(90 + i, 20), NEIGHBOUR) for i in range(6)]
        scored = [engine.score_each(prompt, continuations, top_logprobs=3) for prompt in PROMPTS]
        async with preempting(engine):
            scores = (await asyncio.gather(*neighbours, *scored))[len(neighbours) :]
        cached = engine.stats().tokens_cached_total
        again = await engine.score(PROMPTS[2], continuations[2])
        cached = engine.stats().tokens_cached_total - cached
        stats = engine.stats()

    for prompt, of_prompt in zip(PROMPTS, scores, strict=True):
        assert isinstance(of_prompt, list)
        assert [list(score.token_ids) for score in of_prompt] == continuations
        for score in of_prompt:
            assert_score(oracle(name), prompt, score, 3)
    assert_score(oracle(name), PROMPTS[2], again, 0)
    assert stats.tokens_generated_total == 6 * 24
    if settings is TIGHT:
        assert stats.preemptions_total > len(PROMPTS)
    else:
        assert cached == len(PROMPTS[2]) - 1, "the last token of the prompt gives the first score"


@pytest.mark.asyncio
async def test_neighbours_of_embeddings_answer_as_they_do_alone(directory_of, backend):
    """A step with hidden states is computed op by op, and gives the same bits."""
    options = {"backend": backend.name, "dtype": "float32"}
    prompts = [prompt_of(60 + i, 5 + 7 * i) for i in range(6)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=24, ignore_eos=True, logprobs=2)
    async with Engine(str(directory_of("qwen3")), **TIGHT, **options) as engine:
        answers = [engine.generate(prompt, params) for prompt in prompts]
        looks = [engine.embed(PROMPTS, pooling=pooling) for pooling, _ in WAYS]
        together = await asyncio.gather(*answers, *looks)
    async with Engine(str(directory_of("qwen3")), **ROOMY, **options) as engine:
        alone = [await engine.generate(prompt, params) for prompt in prompts]

    for one, other in zip(together[: len(alone)], alone, strict=True):
        assert isinstance(one, Completion)
        assert one.token_ids == other.token_ids
        if backend.name == "native":
            assert one.logprobs == other.logprobs


@pytest.mark.asyncio
async def test_no_logits_are_made_of_hidden_states_that_are_only_added(
    directory_of, backend, monkeypatch
):
    """Logits of 2048 tokens would take 1.2 GB with a vocabulary of 151,936."""
    linear, rows = TensorOps.linear, []

    def seen(self: TensorOps, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        if layer.out_features == VOCAB_SIZE:
            rows.append(len(x))
        return linear(self, x, layer)

    monkeypatch.setattr(TensorOps, "linear", seen)
    options = {**ROOMY, "backend": backend.name, "max_num_batched_tokens": 40}
    async with Engine(str(directory_of("llama")), **options) as engine:
        rows.clear()  # those of the warm-up
        await engine.embed(prompt_of(4, 100), pooling="mean")
    assert rows == [0, 0, 1], "one row for the token that shows that all are numbers"
