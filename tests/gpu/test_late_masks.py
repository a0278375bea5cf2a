"""Masks that come while steps are on the GPU, which gets them long before it computes them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import aioserve
from aioserve import Engine, SamplingParams, StructuredOutput
from aioserve.execution.gpu.decoder_steps import DecoderSteps
from tests.gpu.place import Place

MODEL = Path(aioserve.__file__).parent / "assets" / "pyhelp"
NUM_TOKENS = 100
SLEEP_CYCLES = 20_000_000
"""Least cycles of a step, about ten milliseconds. Its host part takes much less."""


async def tokens_beside_plain(engine: Engine) -> list[int]:
    """Count the tokens of four plain streams and a constrained one when the first plain one ends.

    The last number is that of the constrained stream.
    """
    counts, ended = [0] * 5, asyncio.Event()
    plain = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, ignore_eos=True)
    letters = StructuredOutput(regex="[a-z ]{2000,3000}")
    guided = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS, structured_output=letters)

    async def read(index: int, params: SamplingParams) -> None:
        async with engine.stream("def main():", params) as stream:
            async for _ in stream:
                counts[index] += 1
                if ended.is_set():
                    return
        if params is plain:
            ended.set()

    await asyncio.gather(*(read(i, plain) for i in range(4)), read(4, guided))
    return counts


@pytest.mark.parametrize("graph_sizes", [(), (8,)], ids=["eager", "graphs"])
def test_a_stream_with_a_grammar_keeps_up_with_plain_ones_on_a_busy_card(
    card: Place, graph_sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = DecoderSteps.pack

    def slow_pack(self: DecoderSteps, *args: Any) -> Any:
        """Called on the thread that launches, on its stream."""
        torch.cuda._sleep(SLEEP_CYCLES)
        return pack(self, *args)

    options: dict[str, Any] = {"num_pages": 300, "max_num_seqs": 8, "max_num_batched_tokens": 256}

    async def main() -> list[int]:
        async with Engine(MODEL, device="cuda", graph_sizes=graph_sizes, **options) as engine:
            await tokens_beside_plain(engine)  # compiles and captures
            monkeypatch.setattr(DecoderSteps, "pack", slow_pack)
            return await tokens_beside_plain(engine)

    *plain, guided = asyncio.run(main())
    assert max(plain) == NUM_TOKENS
    assert guided >= 0.97 * NUM_TOKENS
