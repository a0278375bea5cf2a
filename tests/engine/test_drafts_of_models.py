"""Draft tokens of the bundled drafters change no token of the embedded model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from aioserve import Completion, Engine, SamplingParams, Speculation

CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
LIST = "1. json\n2. csv\n3. json\n4. csv\n5."
QUESTION = "What does json.dumps do? json.dumps"
MAX_TOKENS = 32
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CODE, {"temperature": 0.0}),
    (LIST, {"temperature": 0.0, "logprobs": 2}),
    (QUESTION, {"temperature": 1.0, "seed": 1}),
    (QUESTION, {"temperature": 1.0, "seed": 2, "logprobs": 0}),
    (CODE, {"temperature": 0.7, "top_p": 0.9, "seed": 3}),
    (LIST, {"temperature": 0.4, "min_p": 0.05, "seed": 4, "n": 3}),
    (LIST, {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.3}),
    (CODE, {"temperature": 0.8, "top_k": 20, "presence_penalty": 0.5, "seed": 5}),
    (CODE, {"temperature": 0.0, "stop": ["sub", "return b"], "min_tokens": 4}),
    (CODE + LIST, {"temperature": 0.0, "bad_words": ["json"]}),
]


@dataclass(frozen=True)
class Told:
    """Result of a request, without its timings."""

    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    reasons: tuple[object, ...]
    logprobs: tuple[object, ...]


def told(completion: Completion) -> Told:
    samples = completion.samples
    return Told(
        tuple([tuple(one.token_ids) for one in samples]),
        tuple([one.text for one in samples]),
        tuple([one.finish_reason for one in samples]),
        tuple([one.logprobs for one in samples]),
    )


async def answers(rounds: int = 1, **options: Any) -> tuple[list[Told], Engine]:
    """Answer all requests together, `rounds` times."""
    found: list[Told] = []
    async with Engine("pyhelp", device="cpu", **options) as engine:
        for _ in range(rounds):
            asked = [
                engine.generate(
                    prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **params)
                )
                for prompt, params in REQUESTS
            ]
            found += map(told, await asyncio.gather(*asked))
    return found, engine


@pytest.mark.parametrize("drafter", ["ngram:min_ngram=1", "suffix"])
@pytest.mark.parametrize(
    ("backend", "dtype"), [("native", "float32"), ("native", "bfloat16"), ("reference", "float32")]
)
@pytest.mark.asyncio
async def test_drafts_of_drafters_that_ship_change_no_token(
    drafter: str, backend: str, dtype: str
) -> None:
    """Native kernels compute the same logits to the last bit.

    With torch, logits depend on the number of rows even without draft tokens. In bfloat16 then even
    tokens differ.
    """
    options: dict[str, Any] = {"backend": backend, "dtype": dtype}
    plain, _ = await answers(**options)
    speculation = Speculation(drafter=drafter, max_tokens=6)
    drafted, engine = await answers(2, speculation=speculation, **options)
    stats = engine.stats()
    assert sum(stats.tokens_accepted_total) > 0
    assert sum(stats.tokens_drafted_total) > sum(stats.tokens_accepted_total)
    assert stats.tokens_cached_total > 0  # the second time
    for number, one in enumerate(drafted):
        other = plain[number % len(plain)]
        assert (one.ids, one.texts, one.reasons) == (other.ids, other.texts, other.reasons)
        if backend == "native":
            assert one.logprobs == other.logprobs


@pytest.mark.asyncio
async def test_drafts_change_no_token_where_memory_is_short() -> None:
    plain, _ = await answers()
    drafted, engine = await answers(
        speculation=Speculation(drafter="ngram:min_ngram=1", max_tokens=6),
        num_pages=18,
        output_reserve_tokens=0,
    )
    assert drafted == plain
    assert engine.stats().preemptions_total > 0
    assert sum(engine.stats().tokens_accepted_total) > 0
