"""Warm decodes take no memory, neither of the GPU nor pinned, by any library.

No step waits for the GPU while it is launched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.ops.gpu.cupy_module import cupy_module
from tests.gpu.answers import OPTIONS, asking_requests, completions
from tests.gpu.place import Place

STREAMS = 4
FIRST, LAST = 20, 220
"""Tokens of an answer between which nothing may be allocated."""


def counts(device: torch.device) -> dict[str, int]:
    """Count all allocations since the process began."""
    cupy = cupy_module()
    stats = torch.cuda.memory_stats(device)
    with cupy.cuda.Device(device.index):
        cupy_bytes = cupy.get_default_memory_pool().total_bytes()
    return {
        "tensors": stats["allocation.all.allocated"],
        "segments": stats["segment.all.allocated"],
        "pinned blocks": torch.cuda.host_memory_stats()["num_host_alloc"],
        "CuPy's bytes": cupy_bytes,
        "CuPy's pinned blocks": cupy.get_default_pinned_memory_pool().n_free_blocks(),
    }


async def serve(engine: Engine, device: torch.device) -> list[dict[str, int]]:
    """Serve streams that begin together; return the counts once all have some tokens, and before
    any end."""
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=LAST + 10, ignore_eos=True)
    streams = [engine.stream([3 + i, 9, 4], params) for i in range(STREAMS)]
    noted = []
    for at in (FIRST, LAST, None):
        for stream in streams:
            async for token in stream:
                if token.index + 1 == at:
                    break
        if at is not None:
            noted.append(counts(device))
    return noted


@pytest.mark.parametrize("graph_sizes", [(), (4,)], ids=["eager", "graphs"])
def test_warm_decodes_allocate_nothing(
    card: Place, directory_of: Callable[[str], Path], graph_sizes: tuple[int, ...]
) -> None:
    """An eager step makes tensors, whose memory comes from the allocator's cache."""
    options: dict[str, Any] = OPTIONS | {"num_pages": 300, "max_model_len": 256}
    source = card.assembled(directory_of("qwen3"))

    async def main() -> list[dict[str, int]]:
        engine = Engine(
            source, dtype="bfloat16", graph_sizes=graph_sizes, max_buffered_tokens=512, **options
        )
        async with engine:
            await serve(engine, card.device)
            return await serve(engine, card.device)

    before, after = asyncio.run(main())
    if not graph_sizes:
        assert after.pop("tensors") > before.pop("tensors")
    assert after == before


def test_rows_that_ask_for_more_than_a_draw_make_no_launch_wait(
    card: Place, directory_of: Callable[[str], Path]
) -> None:
    """torch raises if it would wait for the GPU; the runner waits for CuPy's events."""

    async def main() -> None:
        source = card.assembled(directory_of("qwen3"))
        async with Engine(source, dtype="float32", **OPTIONS) as engine:
            torch.cuda.set_sync_debug_mode("error")
            try:
                await completions(engine, asking_requests(10, 12))
            finally:
                torch.cuda.set_sync_debug_mode("default")

    asyncio.run(main())


def test_embeddings_make_no_launch_wait(card: Place, directory_of: Callable[[str], Path]) -> None:
    """Prompts have one token each, or many."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    async def main() -> None:
        source = card.assembled(directory_of("qwen3"))
        async with Engine(source, dtype="float32", **OPTIONS) as engine:
            torch.cuda.set_sync_debug_mode("error")
            try:
                texts = [[5 + i] * (3 + 7 * i) for i in range(6)]
                await asyncio.gather(
                    engine.generate([3, 9, 4], params),
                    *(engine.embed(texts, pooling=pooling) for pooling in ("last", "mean")),
                )
            finally:
                torch.cuda.set_sync_debug_mode("default")

    asyncio.run(main())
