"""The device that a whole engine chooses on a machine with a GPU."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioserve import ConfigError, Engine
from tests.gpu.answers import OPTIONS, answers, reference, requests
from tests.gpu.place import Place


@pytest.mark.parametrize("options", [{}, {"device": "cuda"}, {"device": "cuda:0"}], ids=str)
def test_an_engine_takes_the_card(
    card: Place, directory_of: Callable[[str], Path], options: dict[str, Any]
) -> None:
    path = directory_of("qwen3")
    asked = requests(4, 12)

    async def main() -> list[list[int]]:
        async with Engine(path, dtype="float32", **{**OPTIONS, **options}) as engine:
            assert engine.dump()["model"]["backend"] == "cuda"
            return await answers(engine, asked)

    assert asyncio.run(main()) == asyncio.run(reference(path, asked))


def test_the_pool_takes_what_is_left_of_the_card_and_not_more(
    card: Place, directory_of: Callable[[str], Path]
) -> None:
    """Memory is a share of the whole GPU, for this process and all others."""
    path = directory_of("qwen3")
    gibibyte = 1 << 30

    async def enter(**options: Any) -> int:
        async with Engine(path, dtype="float32", graph_sizes=(1,), **options) as engine:
            return engine.dump()["model"]["kv_cache_bytes"]

    asyncio.run(enter(num_pages=40, max_model_len=96))  # libraries take their part
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(card.device)
    share = (total - free + gibibyte) / total
    kv_bytes = asyncio.run(enter(memory_utilization=share, max_num_seqs=16_384))
    assert gibibyte // 2 < kv_bytes <= gibibyte


def test_a_card_that_is_not_there_is_an_error_that_says_how_many_are(
    card: Place, directory_of: Callable[[str], Path]
) -> None:
    async def main() -> None:
        async with Engine(directory_of("qwen3"), device="cuda:99"):
            pass

    shown = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=rf"device='cuda:99'.* the driver shows {shown} GPUs"):
        asyncio.run(main())


def test_doctor_names_the_card(card: Place) -> None:
    command = [sys.executable, "-m", "aioserve", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cards = json.loads(done.stdout)["gpu"]["cards"]
    assert f"cuda:0 {torch.cuda.get_device_name(card.device)}" in cards
