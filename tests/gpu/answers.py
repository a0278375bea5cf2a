"""Requests for tiny models, and what the reference on the CPU answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aioserve import Engine, SamplingParams

__all__ = ["OPTIONS", "Request", "answers", "reference", "requests"]

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
    """Half of them begin alike, across pages; two of three are greedy."""
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


async def answers(engine: Engine, asked: Sequence[Request]) -> list[list[int]]:
    """All at once."""

    async def one(prompt: list[int], params: SamplingParams) -> list[int]:
        async with engine.stream(prompt, params) as stream:
            return [token.id async for token in stream]

    return list(await asyncio.gather(*(one(*request) for request in asked)))


async def reference(path: Path, asked: Sequence[Request]) -> list[list[int]]:
    """In float32, in plain torch on the CPU."""
    options = {"backend": "reference", "dtype": "float32", **OPTIONS}
    async with Engine(path, **options) as engine:
        return await answers(engine, asked)
