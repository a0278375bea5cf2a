"""Shared prefixes, copied pages, swaps and forks on real models: less work, the same tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine, EngineStats, SamplingParams
from aioserve.testing.random_model import write_random_model

pytestmark = pytest.mark.asyncio

Request = tuple[list[int], SamplingParams]
Answers = list[list[tuple[int, ...]]]
"""Token ids of each sample of each request."""

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
MODELS = ("pyhelp", "random-qwen3")
PREFIX_TOKENS = {"pyhelp": 1008, "random-qwen3": 1024}
"""pyhelp's context holds 1,024 tokens. This leaves room for a question and its answer."""

every_model = pytest.mark.parametrize("model", MODELS)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directory: Path = tmp_path_factory.mktemp("model") / "qwen3"
    write_random_model(directory, QWEN3, dtype="float32")
    return {"pyhelp": "pyhelp", "random-qwen3": str(directory)}


def token_ids(count: int, seed: int = 0) -> list[int]:
    """Return ids that every model here knows and that end no answer."""
    return [3 + (31 * seed + 17 * i * i + i) % 250 for i in range(count)]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def drawn(max_tokens: int, seed: int, n: int = 1) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, top_p=0.95, max_tokens=max_tokens, seed=seed, n=n, ignore_eos=True
    )


async def ask(engine: Engine, requests: Sequence[Request]) -> Answers:
    """Submit all requests at once."""
    completions = await asyncio.gather(*(engine.generate(*request) for request in requests))
    return [[sample.token_ids for sample in completion.samples] for completion in completions]


async def answers_of(
    path: str, *waves: Sequence[Request], **options: Any
) -> tuple[Answers, EngineStats]:
    """Submit each wave after the previous one has been answered."""
    options = {"num_pages": 1000, **options}
    async with Engine(path, dtype="float32", **options) as engine:
        answers: Answers = []
        for wave in waves:
            answers += await ask(engine, wave)
        await engine.drain()
        return answers, engine.stats()


# -- one prefix, many requests


@pytest.mark.parametrize("chunk_tokens", [2048, 300])
@every_model
async def test_thirty_two_requests_at_once_compute_their_common_prefix_once(
    model, chunk_tokens, path_of
):
    prefix = token_ids(PREFIX_TOKENS[model])
    tails = [[3 + i, *token_ids(i % 5, seed=i)] for i in range(32)]
    requests = [(prefix + tail, greedy(6)) for tail in tails]
    options = {"num_pages": 4096, "max_num_batched_tokens": chunk_tokens}

    shared, with_cache = await answers_of(path_of[model], requests, **options)

    tail_tokens = sum(len(tail) for tail in tails)
    assert with_cache.tokens_prefilled_total == len(prefix) + tail_tokens
    assert with_cache.tokens_cached_total == 31 * len(prefix)
    if chunk_tokens == 2048:
        # Requests that compute everything themselves: a quarter of them is enough.
        computed, without = await answers_of(
            path_of[model], requests[::4], prefix_caching=False, **options
        )
        assert computed == shared[::4]
        assert without.tokens_prefilled_total == sum(len(prompt) for prompt, _ in requests[::4])
        assert without.tokens_cached_total == without.pages_cached == 0


@pytest.mark.parametrize("page_size", [1, 16])
@every_model
async def test_the_second_of_two_equal_prompts_of_16_tokens_computes_1(model, page_size, path_of):
    request = (token_ids(16), greedy(4))
    options = {"dtype": "float32", "page_size": page_size, "num_pages": 2000 // page_size}
    async with Engine(path_of[model], **options) as engine:
        first = await ask(engine, [request])
        assert engine.stats().tokens_prefilled_total == 16
        assert await ask(engine, [request]) == first
        assert engine.stats().tokens_prefilled_total == 17
        assert engine.stats().tokens_cached_total == 15


@pytest.mark.parametrize(
    ("page_size", "partial", "answer_tokens", "reused"),
    [
        (1, True, 1, "all"),
        (1, False, 1, "all"),
        # A page counts once it is full, and may then hold prompt and answer.
        (16, True, 20, "all"),
        (16, True, 1, "none"),
        (16, False, 20, "none"),
    ],
)
async def test_a_question_reuses_the_one_before_up_to_the_difference(
    page_size, partial, answer_tokens, reused
):
    options: dict[str, Any] = {"dtype": "float32", "num_pages": 100, "page_size": page_size}
    async with Engine("pyhelp", partial_page_reuse=partial, **options) as engine:
        first, second = (
            engine.tokenizer.encode(text) for text in ("What is 2 + 2?", "What is 2 + 3?")
        )
        common = next(
            i for i, pair in enumerate(zip(first, second, strict=True)) if len({*pair}) > 1
        )
        assert 3 <= common < len(second) <= 16
        await ask(engine, [(first, greedy(answer_tokens))])
        before = engine.stats()
        answers = await ask(engine, [(second, greedy(8))])
        after = engine.stats()

    computed = after.tokens_prefilled_total - before.tokens_prefilled_total
    assert computed == len(second) - (common if reused == "all" else 0)
    assert after.tokens_cached_total - before.tokens_cached_total == len(second) - computed
    assert after.pages_copied_total - before.pages_copied_total == (
        computed < len(second) and page_size > 1
    )
    plain, _ = await answers_of("pyhelp", [(second, greedy(8))], prefix_caching=False)
    assert answers == plain


@pytest.mark.parametrize(("page_size", "reused"), [(1, 49), (16, 49)])
@every_model
async def test_a_second_turn_starts_after_the_first_answer(model, page_size, reused, path_of):
    """All tokens but the answer's last were computed."""
    options = {"dtype": "float32", "page_size": page_size, "num_pages": 2000 // page_size}
    async with Engine(path_of[model], **options) as engine:
        prompt = token_ids(30)
        ((answer,),) = await ask(engine, [(prompt, greedy(20))])
        before = engine.stats()
        turn = [*prompt, *answer, *token_ids(10, seed=1)]
        second = await ask(engine, [(turn, greedy(5))])
        after = engine.stats()

    cached = after.tokens_cached_total - before.tokens_cached_total
    assert cached == (reused if page_size == 1 else reused - reused % page_size)
    assert after.tokens_prefilled_total - before.tokens_prefilled_total == len(turn) - cached
    plain, _ = await answers_of(path_of[model], [(turn, greedy(5))], prefix_caching=False)
    assert second == plain


async def test_prompts_share_within_one_salt_alone():
    prompt = token_ids(40)
    async with Engine("pyhelp", page_size=1, num_pages=500) as engine:
        for salt, cached in (("a", 0), (None, 0), ("b", 0), ("a", 39), (None, 39)):
            before = engine.stats().tokens_cached_total
            await engine.generate(prompt, greedy(2), cache_salt=salt)
            assert engine.stats().tokens_cached_total - before == cached, salt


# -- several samples of one prompt


@pytest.mark.parametrize("page_size", [1, 16])
@every_model
async def test_eight_samples_of_a_thousand_tokens_take_pages_for_what_is_new_alone(
    model, page_size, path_of
):
    prompt, answer_tokens = token_ids(1000), 20
    whole_pages, in_last_page = divmod(1000, page_size)
    own_pages = -(-(in_last_page + answer_tokens) // page_size)
    tokens: list[list[int]] = [[] for _ in range(8)]
    held = []
    options = {"dtype": "float32", "page_size": page_size, "num_pages": 2000 // page_size}
    async with Engine(path_of[model], **options) as engine:
        async with engine.stream(prompt, drawn(answer_tokens, seed=5, n=8)) as stream:
            async for token in stream:
                tokens[token.sample].append(token.id)
                held.append(engine.stats().pages_held_by_requests)
        await engine.drain()
        stats = engine.stats()

    assert stats.tokens_prefilled_total == 1000
    assert whole_pages + 8 <= max(held) <= whole_pages + 8 * own_pages
    assert stats.pages_held_by_requests == 0
    assert stats.pages_copied_total == (7 if in_last_page else 0)
    alone, _ = await answers_of(
        path_of[model], [(prompt, drawn(answer_tokens, seed=5 + i)) for i in range(8)]
    )
    assert tokens == [list(ids) for (ids,) in alone]
    assert len({tuple(ids) for ids in tokens}) == 8


# -- preemption


@pytest.mark.parametrize("prefix_caching", [True, False])
@every_model
async def test_swapped_requests_go_on_as_recomputed_ones_do(model, prefix_caching, path_of):
    requests = [(token_ids(100, seed=i), greedy(60)) for i in range(6)]
    scarce = {"num_pages": 24, "output_reserve_tokens": 0, "prefix_caching": prefix_caching}
    expected, _ = await answers_of(path_of[model], requests)

    recomputed, without = await answers_of(
        path_of[model], requests, preemption="recompute", **scarce
    )
    swapped, stats = await answers_of(
        path_of[model], requests, preemption="swap", num_host_pages=100, **scarce
    )

    assert recomputed == swapped == expected
    assert without.preemptions_total > 0
    assert without.pages_swapped_out_total == without.pages_swapped_in_total == 0
    assert stats.preemptions_total > 0
    assert stats.pages_swapped_out_total > 0
    assert stats.pages_swapped_in_total > 0
    assert stats.tokens_prefilled_total < without.tokens_prefilled_total
    assert stats.pages_host_total == 100
    assert stats.pages_held_by_requests == 0


# -- all settings

SCARCE: dict[str, Any] = {"output_reserve_tokens": 0, "num_pages": 22}
SETTINGS: dict[str, dict[str, Any]] = {
    "pages of 1": {"page_size": 1, "num_pages": 4000},
    "pages of 2": {"page_size": 2, "num_pages": 2000},
    "pages of 64": {"page_size": 64},
    "no cache": {"prefix_caching": False},
    "no partial pages": {"partial_page_reuse": False},
    "no overlap": {"overlap": False},
    "chunks": {"max_num_batched_tokens": 7},
    "chunks, pages of 2, no overlap": {
        "max_num_batched_tokens": 23,
        "page_size": 2,
        "num_pages": 2000,
        "overlap": False,
    },
    "few sequences": {"max_num_seqs": 3},
    "scarce": SCARCE,
    "scarce, no cache": {**SCARCE, "prefix_caching": False},
    "scarce, pages of 1": {**SCARCE, "page_size": 1, "num_pages": 350},
    "scarce, chunks, no overlap": {**SCARCE, "max_num_batched_tokens": 37, "overlap": False},
    "scarce, swap": {**SCARCE, "num_host_pages": 60, "preemption": "swap"},
    "scarce, swap, no cache": {
        **SCARCE,
        "num_host_pages": 60,
        "preemption": "swap",
        "prefix_caching": False,
    },
    "scarce, swap, small host pool": {**SCARCE, "num_host_pages": 5, "preemption": "swap"},
    "scarce, second tier, recompute": {
        **SCARCE,
        "num_host_pages": 60,
        "preemption": "recompute",
        "eviction": "slru",
    },
    "scarce, pages of 2, swap, chunks": {
        **SCARCE,
        "page_size": 2,
        "num_pages": 180,
        "num_host_pages": 300,
        "preemption": "swap",
        "max_num_batched_tokens": 50,
    },
    "scarce, least frequently used": {**SCARCE, "eviction": "lfu", "page_size": 8, "num_pages": 44},
}


def conversation() -> tuple[list[Request], list[Request]]:
    """Prompts that share beginnings in and across pages, equal ones, and one within another."""
    base, other = token_ids(150), token_ids(60, seed=9)
    first = [
        (base, greedy(40)),
        (base[:100] + other, greedy(30)),
        (base[:97] + other[5:], drawn(30, seed=11)),
        (base, drawn(40, seed=12)),
        (base[:16], greedy(60)),
        (other, drawn(25, seed=13, n=3)),
        (base[:40] + other[:3], drawn(50, seed=14, n=2)),
        (base[:1], greedy(20)),
    ]
    second = [
        (base + other, greedy(30)),
        (base, greedy(40)),
        (other + base[:90], drawn(30, seed=15, n=3)),
        (other[:33], greedy(50)),
        (base[:120], drawn(30, seed=16)),
    ]
    return first, second


@pytest.fixture(scope="module")
def expected(path_of) -> dict[str, Answers]:
    """Answers of every request by itself, without a cache."""

    async def compute(path: str) -> Answers:
        async with Engine(path, dtype="float32", prefix_caching=False, num_pages=100) as engine:
            return [(await ask(engine, [r]))[0] for wave in conversation() for r in wave]

    return {model: asyncio.run(compute(path_of[model])) for model in MODELS}


def _case(model: str, settings: str) -> Any:
    """Make a case. The embedded model takes a second or two each time: only its hardest cases
    are not marked slow."""
    quick = model != "pyhelp" or settings in ("chunks", "scarce, pages of 2, swap, chunks")
    return pytest.param(model, settings, marks=() if quick else pytest.mark.slow)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("model", "settings"), [_case(model, settings) for model in MODELS for settings in SETTINGS]
)
async def test_tokens_are_the_same_with_any_settings(model, settings, path_of, expected):
    options = SETTINGS[settings]

    answers, stats = await answers_of(path_of[model], *conversation(), **options)

    assert answers == expected[model]
    assert stats.pages_held_by_requests == 0
    assert (stats.tokens_cached_total > 0) == options.get("prefix_caching", True)
    if "scarce" in settings:
        assert stats.preemptions_total > 0
    if "num_host_pages" in options:
        assert stats.pages_swapped_in_total > 0
