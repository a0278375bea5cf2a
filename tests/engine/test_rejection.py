"""Rejection sampling in an engine: tokens have the distribution of those without draft tokens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from aioserve import (
    Completion,
    ConfigError,
    Engine,
    SamplingParams,
    Speculation,
    StructuredOutput,
)
from aioserve.config import Acceptance
from aioserve.engine.stats import EngineStats
from aioserve.testing.random_model import write_random_model
from tests.engine.idle import all_given_back
from tests.parity import tiny_models
from tests.sampling.chi_square import deviate_of_two
from tests.tiers import examples

pytestmark = pytest.mark.asyncio

VOCAB = 8
Counts = npt.NDArray[np.int64]

PROMPT = [1, 2, 3, 7]
SAMPLES, REQUESTS = 64, examples(64)
LEAST_ACCEPTED = 1000 * REQUESTS // 64
TIGHT: dict[str, Any] = {
    "num_pages": 60,
    "max_num_batched_tokens": 40,
    "output_reserve_tokens": 0,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a draft with few tokens, and a draft that is mostly right. Also two models
    with more than bytes, which mostly disagree."""
    path = tmp_path_factory.mktemp("models")
    config = tiny_models.CONFIGS["qwen3"] | {"num_hidden_layers": 1, "tie_word_embeddings": False}
    for seed, name in enumerate(("target", "draft")):
        few = config | {"vocab_size": VOCAB}
        write_random_model(path / name, few, seed=seed, dtype="float32")
        write_random_model(path / f"wide-{name}", config, seed=seed, dtype="float32")
    near = config | {"vocab_size": VOCAB, "rms_norm_eps": 3.0}
    write_random_model(path / "near", near, seed=0, dtype="float32")
    return path


async def completions(
    model: Path,
    prompts: list[tuple[list[int], SamplingParams]],
    draft: Path | None = None,
    acceptance: Acceptance = "rejection",
    **options: Any,
) -> tuple[list[Completion], EngineStats]:
    speculation = None
    if draft is not None:
        drafter = f"model:path={draft}"
        speculation = Speculation(drafter=drafter, max_tokens=3, acceptance=acceptance)
    given: dict[str, Any] = {"num_pages": 2000, "page_size": 4, "max_model_len": 128} | options
    async with Engine(str(model), speculation=speculation, **given) as engine:
        done = await asyncio.gather(*[engine.generate(*prompt) for prompt in prompts])
        assert await all_given_back(engine)
        stats = engine.stats()
        assert stats.drafter_faults_total == 0
        return done, stats


async def counts(
    models: Path,
    params: SamplingParams,
    draft: str | None,
    first_seed: int,
    requests: int = REQUESTS,
    **options: Any,
) -> tuple[Counts, EngineStats]:
    """Count pairs of tokens in a row: `[places, V * V]`, from the second token on.

    The first token comes with the prompt, without a draft token.
    """
    prompts = [
        (PROMPT, msgspec.structs.replace(params, seed=first_seed + SAMPLES * number, n=SAMPLES))
        for number in range(requests)
    ]
    drafting = None if draft is None else models / draft
    done, stats = await completions(models / "target", prompts, drafting, **options)
    tokens = np.array([sample.token_ids for each in done for sample in each.samples])
    assert tokens.shape == (SAMPLES * requests, 6)
    pairs = VOCAB * tokens[:, 1:-1] + tokens[:, 2:]
    return np.array([np.bincount(place, minlength=VOCAB**2) for place in pairs.T]), stats


def check_alike(found: Counts, expected: Counts) -> None:
    deviates = [deviate_of_two(*each) for each in zip(found, expected, strict=True)]
    assert max(map(abs, deviates)) < 4.5, deviates


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "limits": {"temperature": 0.8, "top_k": 5, "top_p": 0.95},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "edits": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "logit_bias": {5: 2.0},
        "logprobs": 1,
    },
    "one draft token": {"temperature": 0.9, "max_draft_tokens": 1},
    "masks": {"allowed_token_ids": [0, 2, 4, 5, 7]},
}


@pytest.mark.hypothesis  # more requests in `make test-more`
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_come_as_often_as_without_drafts(models: Path, kind: str) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **KINDS[kind])
    undrafted = msgspec.structs.replace(params, max_draft_tokens=None)
    expected, _ = await counts(models, undrafted, None, 10**6)
    for draft in ("draft", "near"):
        found, stats = await counts(models, params, draft, 0)
        assert sum(stats.tokens_accepted_total) > LEAST_ACCEPTED
        assert sum(stats.tokens_drafted_total) > sum(stats.tokens_accepted_total) + LEAST_ACCEPTED
        check_alike(found, expected)


async def test_the_reference_backend_says_the_same(models: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, top_k=6, seed=5, n=8)
    found: list[list[tuple[int, ...]]] = []
    for backend in ("native", "reference"):
        (done,), stats = await completions(
            models / "target",
            [(PROMPT, params)],
            models / "draft",
            backend=backend,
            overlap=False,
        )
        assert sum(stats.tokens_accepted_total) > 10
        found.append([sample.token_ids for sample in done.samples])
    assert found[0] == found[1]


@pytest.mark.more
async def test_preemption_changes_no_distribution(models: Path) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    expected, _ = await counts(models, params, None, 10**6)
    found, stats = await counts(models, params, "draft", 0, **TIGHT)
    assert stats.preemptions_total > 0
    check_alike(found, expected)


@pytest.mark.more
async def test_more_drafts_are_kept_than_by_sampler_match(models: Path) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    shares: list[float] = []
    for acceptance in get_args(Acceptance):
        _, stats = await counts(models, params, "draft", 0, acceptance=acceptance)
        shares.append(stats.tokens_accepted_total[0] / stats.tokens_drafted_total[0])
    match, rejection = shares
    assert rejection > match + 0.03


async def test_a_seed_has_its_tokens_again(models: Path) -> None:
    """Requires the same number of draft tokens; without overlap it depends on no timing."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    found: list[list[tuple[int, ...]]] = []
    for first_seed in (0, 0, 1000):
        prompts = [(PROMPT, msgspec.structs.replace(params, seed=first_seed, n=5))]
        (done,), _ = await completions(models / "target", prompts, models / "draft", overlap=False)
        found.append([sample.token_ids for sample in done.samples])
    assert found[0] == found[1] != found[2]


async def test_greedy_answers_are_those_without_drafts(models: Path) -> None:
    """Holds beside requests that sample, and with penalties and log-probabilities."""
    greedy = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0, logprobs=2)
    penal = msgspec.structs.replace(greedy, repetition_penalty=1.4, presence_penalty=0.3)
    others = SamplingParams(max_tokens=30, ignore_eos=True, seed=7)
    prompts = [([*PROMPT, number % 8], (greedy, others, penal)[number % 3]) for number in range(12)]
    for name in ("target", "draft"):
        expected, _ = await completions(models / "target", prompts)
        done, stats = await completions(models / "target", prompts, models / name)
        assert sum(stats.tokens_drafted_total) > 0
        for number, (mine, theirs) in enumerate(zip(done, expected, strict=True)):
            if number % 3 != 1:
                assert mine.token_ids == theirs.token_ids
                assert mine.samples[0].logprobs == theirs.samples[0].logprobs


async def test_log_probabilities_are_those_of_the_model(models: Path) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.9, top_k=6, logprobs=2)
    prompts = [(PROMPT, msgspec.structs.replace(params, seed=100 + number)) for number in range(20)]
    done, stats = await completions(models / "target", prompts, models / "draft")
    assert sum(stats.tokens_accepted_total) > 50
    scored = SamplingParams(max_tokens=1, prompt_logprobs=2)
    again = [([*PROMPT, *each.token_ids], scored) for each in done]
    expected, _ = await completions(models / "target", again)
    for mine, theirs in zip(done, expected, strict=True):
        places = (theirs.prompt_logprobs or ())[len(PROMPT) :]
        assert mine.samples[0].logprobs is not None
        for one, other in zip(mine.samples[0].logprobs, places, strict=True):
            assert other is not None
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [top.id for top in one.top] == [top.id for top in other.top]


async def test_guided_answers_stay_in_their_form(models: Path) -> None:
    """Masks come late here, and most draft tokens are forbidden by masks."""
    pattern = "[a-z0-9]{20}(-[a-z]{2,5}){3}"
    form = StructuredOutput(regex=pattern)
    params = SamplingParams(max_tokens=60, temperature=0.4, structured_output=form)
    prompts = [(PROMPT, msgspec.structs.replace(params, seed=number * 11)) for number in range(20)]
    for draft in ("wide-draft", "wide-target"):
        done, stats = await completions(
            models / "wide-target", prompts, models / draft, max_num_batched_tokens=64
        )
        assert sum(stats.tokens_drafted_total) > 0
        for each in done:
            assert each.finish_reason == "stop"
            assert re.fullmatch(pattern, each.text)


async def test_drafters_that_draw_nothing_change_no_token(models: Path) -> None:
    """A draft token without a distribution counts as certain, so the same tokens are drawn as
    without it."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.3, seed=3)
    expected, _ = await completions(models / "target", [(PROMPT, params)])
    for drafter in ("ngram:min_ngram=1", "suffix"):
        speculation = Speculation(drafter=drafter, acceptance="rejection")
        async with Engine(
            str(models / "target"), speculation=speculation, max_model_len=128, num_pages=200
        ) as engine:
            done = await engine.generate(PROMPT, params)
        assert done.usage.accepted_draft_tokens > 0
        assert done.token_ids == expected[0].token_ids


async def test_another_acceptance_is_refused() -> None:
    with pytest.raises(ConfigError, match="acceptance must be one of 'match', 'rejection'"):
        Speculation(drafter="model", acceptance="no")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="acceptance='rejection' of speculation has no effect"):
        Speculation.of(acceptance="rejection")
