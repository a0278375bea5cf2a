"""Events beside the steps: captures, other users of the GPU, and the program's own loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.testing.random_model import write_random_model
from tests.gpu.answers import OPTIONS, answers, reference, requests
from tests.gpu.place import Place
from tests.parity.tiny_models import CONFIGS

TICK_SECONDS = 0.001
LARGE: dict[str, Any] = CONFIGS["qwen3"] | {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 2048,
}
"""A model of a third of a billion parameters."""


@contextmanager
def another_user(device: torch.device) -> Iterator[list[int]]:
    """Run a thread that multiplies, allocates and waits on its own stream meanwhile.

    The yielded list holds the number of its rounds.
    """
    ended, rounds = threading.Event(), [0]

    def use() -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            while not ended.is_set():
                side = 256 + 64 * (rounds[0] % 8)
                x = torch.ones(side, side, device=device)
                if (x @ x).sum().item() != side**3:
                    return
                rounds[0] += 1
                if rounds[0] % 50 == 0:
                    torch.cuda.empty_cache()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        yield rounds
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "beside another user"])
def test_graphs_are_captured_while_steps_are_in_flight(
    card: Place,
    directory_of: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
    shared: bool,
) -> None:
    path = directory_of("qwen3")
    asked = requests(40, 30)
    source = card.assembled(path)
    options = OPTIONS | {"graph_sizes": tuple(range(1, 9)), "capture_graphs": False}

    async def main() -> list[list[int]]:
        async with Engine(source, dtype="float32", **options) as engine:
            return await answers(engine, asked)

    with caplog.at_level(logging.WARNING):
        if shared:
            with another_user(card.device) as rounds:
                found = asyncio.run(main())
            assert rounds[0] > 0
        else:
            found = asyncio.run(main())
    assert found == asyncio.run(reference(path, asked))
    assert "could not be captured" not in caplog.text
    assert source.device.captured > 4
    assert source.device.replays > 0


def test_the_loop_of_the_program_runs_on_while_steps_are_computed(
    place: Place, tmp_path: Path
) -> None:
    """Delays of a 1 ms ticker are printed, not tested: other programs may use the machine."""
    config, dtype = (LARGE, "bfloat16") if place.is_card else (CONFIGS["qwen3"], "float32")
    path = write_random_model(tmp_path / "model", config, dtype=dtype)
    streams, num_tokens = place.size(64, 3), place.size(128, 4)
    options: dict[str, Any] = {
        "num_pages": place.size(2000, 60),
        "max_num_seqs": streams,
        "max_model_len": place.size(512, 64),
        "graph_sizes": None if place.is_card else (),
    }
    late: list[float] = []

    async def tick() -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            late.append(time.monotonic() - due)

    async def main() -> list[int]:
        params = SamplingParams(temperature=0.7, max_tokens=num_tokens, ignore_eos=True)

        async def one(number: int) -> int:
            prompt = [number + 3, *range(3, place.size(200, 9))]
            async with engine.stream(prompt, params) as stream:
                return len([token async for token in stream])

        async with Engine(place.assembled(path), dtype=dtype, **options) as engine:
            ticking = asyncio.create_task(tick())
            found = await asyncio.gather(*map(one, range(streams)))
            ticking.cancel()
            return found

    assert asyncio.run(main()) == [num_tokens] * streams
    assert len(late) > 3
    late.sort()
    at = {name: late[int(share * (len(late) - 1))] for name, share in SHARES.items()}
    lag = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in at.items())
    print(f"{len(late)} ticks of 1 ms were late by: {lag}")


SHARES = {"median": 0.5, "p99": 0.99, "at most": 1.0}
