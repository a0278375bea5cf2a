"""Loading leaves the loop alone, whatever the size of the tokenizer and whatever is to import."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from aioserve import Engine
from aioserve.testing.random_model import write_random_model
from aioserve.text.tokenizer import Tokenizer
from tests.attacks.held_loop import (
    MAX_HELD_SECONDS,
    TRIES,
    assert_loop_is_free,
    slowness,
    watched_loop,
)
from tests.text.large_file import write_large_file
from tests.tiers import clock_counts

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "eos_token_id": 151_643,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a vocabulary of real size."""
    path = write_random_model(tmp_path_factory.mktemp("model"), CONFIG)
    write_large_file(path)
    return path


async def open_and_close(model: Path | str) -> None:
    async with Engine(model, num_pages=64):
        pass


async def seconds_held_by_the_library(file: Path) -> float:
    async with watched_loop() as held:
        await asyncio.to_thread(tokenizers.Tokenizer.from_file, str(file))
    return held.seconds


@pytest.mark.more
@pytest.mark.asyncio
async def test_a_large_tokenizer_holds_the_loop_for_half_of_what_the_library_alone_does(
    model: Path,
) -> None:
    """One call of the library can't be divided; the measure is what it takes on this machine."""
    await open_and_close("pyhelp")  # imports what there is to import
    library = min([await seconds_held_by_the_library(model / "tokenizer.json") for _ in range(3)])
    await assert_loop_is_free(lambda: open_and_close(model), most_seconds=library / 2)


@pytest.mark.more
@pytest.mark.asyncio
async def test_a_tokenizer_of_fifty_thousand_tokens_leaves_the_loop_free(tmp_path: Path) -> None:
    write_large_file(tmp_path, num_tokens=50_000)
    await assert_loop_is_free(lambda: asyncio.to_thread(Tokenizer.from_directory, tmp_path))


OPENS = """
import asyncio, gc, sys
from aioserve import Engine
from tests.attacks.held_loop import watched_loop

async def main():
    assert "torch" not in sys.modules
    async with watched_loop() as held:
        if sys.argv[1] == "collecting":
            gc.enable()
        async with Engine("pyhelp", num_pages=64):
            pass
    assert "torch" in sys.modules
    print(held.seconds)

asyncio.run(main())
"""


@pytest.mark.more
@pytest.mark.parametrize("collector", ["collecting", "off"])
def test_importing_torch_leaves_the_loop_free(collector: str) -> None:
    """It is imported once in a process, so each try has one of its own."""
    holds: list[float] = []
    while len(holds) < TRIES:
        done = subprocess.run(
            [sys.executable, "-c", OPENS, collector],
            capture_output=True,
            text=True,
            check=True,
            timeout=200,
        )
        holds.append(float(done.stdout))
        if not clock_counts() or holds[-1] <= MAX_HELD_SECONDS * slowness():
            return
    raise AssertionError(f"the loop was held for {holds} seconds in {TRIES} tries")


FREEZES = """
import asyncio, gc
from aioserve import Engine

async def main():
    gc.freeze()
    frozen = gc.get_freeze_count()
    async with Engine("pyhelp", num_pages=64):
        pass
    # Some of them are gone by now, and torch brings a hundred thousand.
    print(frozen / 2 < gc.get_freeze_count() <= frozen, gc.isenabled())

asyncio.run(main())
"""


def test_what_the_program_froze_stays_frozen_and_nothing_else_is() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREEZES], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "True True"


IMPORTS = """
import asyncio, sys, threading
from aioserve import Engine

imported = []

def note(event, args):
    if event == "import" and threading.current_thread() is threading.main_thread():
        imported.append(args[0])

async def main():
    async with Engine("pyhelp", num_pages=64) as engine:
        sys.addaudithook(note)
        await engine.generate("import os")
        await engine.drain(1)
    print(imported)

asyncio.run(main())
"""


@pytest.mark.more
def test_nothing_is_imported_on_the_loop_once_an_engine_is_open() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[]"
