"""Requests for tiny models, and the answers of the reference on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aioserve import Completion, Engine, SamplingParams

__all__ = [
    "OPTIONS",
    "Request",
    "answers",
    "asking_requests",
    "check_close",
    "completions",
    "reference",
    "reference_completions",
    "requests",
]

Request = tuple[list[int], SamplingParams]

OPTIONS: dict[str, Any] = {
    "page_size": 4,
    "num_pages": 200,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 96,
    "output_reserve_tokens": 0,
}


def requests(count: int, max_tokens: int) -> list[Request]:
    """Make requests: half of them begin alike, across pages, and two of three are greedy."""
    shared = [7 + i * i % 200 for i in range(22)]
    return [
        (
            [*(shared if index % 2 else ()), *(3 + (index * 31 + i * i) % 250 for i in range(9))],
            SamplingParams(
                temperature=0.8 if index % 3 == 2 else 0.0,
                top_p=0.9,
                seed=index,
                max_tokens=max_tokens - index % 3,
                ignore_eos=True,
            ),
        )
        for index in range(count)
    ]


def asking_requests(count: int, max_tokens: int) -> list[Request]:
    """Make requests with the same prompts: one of five is plain, and the others ask for more
    than a draw."""
    asked: list[dict[str, Any]] = [
        {"logprobs": 3, "prompt_logprobs": 0},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"logit_bias": {5: 3.0, 40: -100.0}, "min_tokens": 2, "logprobs": 0},
        {},
        {"allowed_token_ids": list(range(3, 90)), "repetition_penalty": 0.8, "prompt_logprobs": 4},
    ]
    return [
        (prompt, msgspec.structs.replace(params, **asked[index % 5]))
        for index, (prompt, params) in enumerate(requests(count, max_tokens))
    ]


async def completions(engine: Engine, asked: Sequence[Request]) -> list[Completion]:
    """Send all requests at once."""
    return list(await asyncio.gather(*(engine.generate(*request) for request in asked)))


async def reference_completions(path: Path, asked: Sequence[Request]) -> list[Completion]:
    """Answer in float32, in plain torch on the CPU."""
    options = {"backend": "reference", "dtype": "float32", **OPTIONS}
    async with Engine(path, **options) as engine:
        return await completions(engine, asked)


def check_close(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """Check for the same tokens, and for log-probabilities that only differ by rounding."""
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in (
            (one.logprobs, other.logprobs),
            (one.prompt_logprobs, other.prompt_logprobs),
        ):
            assert (mine is None) == (theirs is None)
            for each, wanted in zip(mine or (), theirs or (), strict=True):
                assert (each is None) == (wanted is None)
                if each is None or wanted is None:
                    continue
                assert each.logprob == pytest.approx(wanted.logprob, abs=1e-3)
                logprobs = [top.logprob for top in wanted.top]
                assert [top.logprob for top in each.top] == pytest.approx(logprobs, abs=1e-3)


async def answers(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    """Send all requests at once."""

    async def one(prompt: list[int], params: SamplingParams) -> list[int]:
        async with engine.stream(prompt, params) as stream:
            return [token.id async for token in stream]

    return list(await asyncio.gather(*(one(*request) for request in asked)))


async def reference(path: Path, asked: Sequence[Request]) -> list[list[int]]:
    """Answer in float32, in plain torch on the CPU."""
    options = {"backend": "reference", "dtype": "float32", **OPTIONS}
    async with Engine(path, **options) as engine:
        return await answers(engine, asked)
