"""The golden property: the answer to a request doesn't depend on how it was computed.

Models are tiny, in float32, and their tokens are those of the reference on the CPU. Linear layers
are cuBLAS's, which may sum in another order for another number of rows. The differences must be
much smaller than the distance between two tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from aioserve import Engine, EngineStats
from aioserve.execution.gpu.waiting import Way
from tests.execution.gpu.assembled import Assembled
from tests.gpu.answers import (
    OPTIONS,
    Request,
    answers,
    asking_requests,
    check_close,
    completions,
    reference,
    reference_completions,
    requests,
)
from tests.gpu.place import Place

SMALL_POOL = {"num_pages": 30}
VARIATIONS: dict[str, dict[str, Any]] = {
    "step by step": {"graph_sizes": (), "overlap": False},
    "overlapped": {"graph_sizes": ()},
    "graphs": {"graph_sizes": (1, 2, 4, 8)},
    "graphs, step by step": {"graph_sizes": (2, 8), "overlap": False},
    "graphs when needed": {"graph_sizes": (2, 8), "capture_graphs": False},
    "padded": {"graph_sizes": (8,)},
    "chunks": {"graph_sizes": (4,), "max_num_batched_tokens": 9},
    "pages of a token": {"graph_sizes": (8,), "page_size": 1, "num_pages": 600},
    "large pages": {"graph_sizes": (8,), "page_size": 32},
    "no prefix cache": {"graph_sizes": (8,), "prefix_caching": False},
    "computed again": {"graph_sizes": (8,), "preemption": "recompute", **SMALL_POOL},
    "swapped": {"graph_sizes": (8,), "preemption": "swap", "num_host_pages": 90, **SMALL_POOL},
    "swapped, eager": {
        "graph_sizes": (),
        "preemption": "swap",
        "num_host_pages": 90,
        **SMALL_POOL,
    },
    "whatever is there": {},
}
WINDOW_PAGES = {"gemma2": 4, "gpt-oss": 4}
"""Pages for window layers, beside those of full layers, in a small pool."""
OF_MIXTURES = ("step by step", "graphs", "chunks", "large pages", "computed again", "swapped")


@cache
def expected(path: Path, count: int, max_tokens: int) -> list[list[int]]:
    return asyncio.run(reference(path, requests(count, max_tokens)))


async def serve(
    source: Assembled, asked: list[Request], **options: Any
) -> tuple[list[list[int]], EngineStats]:
    async with Engine(source, dtype="float32", **{**OPTIONS, **options}) as engine:
        return await answers(engine, asked), engine.stats()


def asked_at(place: Place) -> tuple[int, int]:
    """Number of requests, and of tokens for each."""
    return place.size(24, 5), place.size(40, 5)


@pytest.mark.parametrize(
    ("name", "variation"),
    [
        *((name, each) for name in ("qwen3", "gemma2") for each in VARIATIONS),
        *((name, each) for name in ("gpt-oss", "deepseek3-moe") for each in OF_MIXTURES),
    ],
)
def test_tokens_are_those_of_the_reference(
    place: Place, directory_of: Callable[[str], Path], name: str, variation: str
) -> None:
    path, options = directory_of(name), VARIATIONS[variation]
    if options.get("num_pages") == SMALL_POOL["num_pages"]:
        options = {**options, "num_pages": 30 + WINDOW_PAGES.get(name, 0)}
    count, max_tokens = asked_at(place)
    source = place.assembled(path)
    asked = requests(count, max_tokens)
    found, stats = asyncio.run(serve(source, asked, **options))
    assert found == expected(path, count, max_tokens)
    # It was computed in the intended way.
    assert (source.device.replays > 0) == (options.get("graph_sizes") != ())
    if "preemption" in options and place.is_card:
        assert stats.preemptions_total > 0
    if not options.get("prefix_caching", True):
        assert stats.tokens_cached_total == 0


@pytest.mark.parametrize("variation", ["overlapped", "graphs", "chunks", "swapped"])
def test_rows_that_ask_for_more_than_a_draw_get_what_the_reference_gives(
    place: Place, directory_of: Callable[[str], Path], variation: str
) -> None:
    path, options = directory_of("qwen3"), {**OPTIONS, **VARIATIONS[variation]}
    asked = asking_requests(*asked_at(place))
    source = place.assembled(path)

    async def main() -> None:
        async with Engine(source, dtype="float32", **options) as engine:
            found = await completions(engine, asked)
        assert (source.device.replays > 0) == (options["graph_sizes"] != ())
        check_close(found, await reference_completions(path, asked))

    asyncio.run(main())


@pytest.mark.parametrize("way", ["block", "spin", "callback"])
@pytest.mark.parametrize("graph_sizes", [(), (2, 8)], ids=["eager", "graphs"])
def test_every_way_of_waiting_ends_every_step(
    place: Place, directory_of: Callable[[str], Path], way: Way, graph_sizes: tuple[int, ...]
) -> None:
    path = directory_of("qwen3")
    count, max_tokens = asked_at(place)
    source = place.assembled(path, way=way)
    asked = requests(count, max_tokens)
    found, _ = asyncio.run(serve(source, asked, graph_sizes=graph_sizes))
    assert found == expected(path, count, max_tokens)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_request_is_answered_the_same_alone_whatever_computes_its_steps(
    place: Place, directory_of: Callable[[str], Path], dtype: str
) -> None:
    """Numbers of rows are the same each time, so the bits must be the same."""
    path = directory_of("qwen3")
    asked = requests(1, place.size(60, 5))

    async def serve_alone(**options: Any) -> list[list[int]]:
        source = place.assembled(path)
        options = {**OPTIONS, "dtype": dtype, **options}
        async with Engine(source, **options) as engine:
            return await answers(engine, asked)

    eager = asyncio.run(serve_alone(graph_sizes=(), overlap=False))
    assert asyncio.run(serve_alone(graph_sizes=())) == eager
    assert asyncio.run(serve_alone(graph_sizes=(1,))) == eager
    assert asyncio.run(serve_alone(graph_sizes=(1,), capture_graphs=False)) == eager
