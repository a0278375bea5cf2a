"""What the engine does must not hold up the other tasks of the event loop.

A ticker in the same loop stands for them. How late it may be depends on how busy the machine is, so
each test compares its lateness with how long the work takes when it does block the loop.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from aioserve import Engine, PromptTooLongError, SamplingParams


class Ticker:
    """Sleeps 1 ms at a time; `worst_seconds` is the latest that it woke."""

    worst_seconds = 0.0

    async def __aenter__(self) -> Ticker:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            late = time.perf_counter() - before - 0.001
            self.worst_seconds = max(self.worst_seconds, late)


@pytest.mark.asyncio
async def test_encoding_a_long_prompt_does_not_block_the_loop() -> None:
    text = "def function(argument):\n    return [value * 2 for value in argument]\n" * 4_000
    async with Engine("pyhelp") as engine:
        started = time.perf_counter()
        engine.tokenizer.encode(text)
        blocking_seconds = time.perf_counter() - started
        async with Ticker() as ticker:
            with pytest.raises(PromptTooLongError):
                await engine.generate(text)
    assert ticker.worst_seconds < blocking_seconds / 2


@pytest.mark.asyncio
async def test_loading_a_model_does_not_block_the_loop() -> None:
    async with Engine("pyhelp"):
        pass  # what is imported once is imported now
    started = time.perf_counter()
    async with Ticker() as ticker, Engine("pyhelp"):
        loading_seconds = time.perf_counter() - started
    assert ticker.worst_seconds < max(0.05, loading_seconds / 2)


@pytest.mark.asyncio
async def test_a_long_prefill_does_not_block_the_loop() -> None:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async with Engine("pyhelp") as engine:
        prompt = [5 + n % 1000 for n in range(engine.limits.max_model_len - 2)]
        await engine.generate(prompt[:8], params)
        started = time.perf_counter()
        async with Ticker() as ticker:
            await asyncio.gather(*(engine.generate(prompt, params) for _ in range(8)))
        serving_seconds = time.perf_counter() - started
    assert ticker.worst_seconds < serving_seconds / 2


IMPORTS = """
import asyncio, sys, threading

class Watch:
    threads = {}
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "aioserve_plugins"):
            self.threads.setdefault(name, threading.current_thread() is threading.main_thread())

sys.meta_path.insert(0, Watch())
from aioserve import Engine

async def main():
    async with Engine("pyhelp", num_pages=8):
        pass

asyncio.run(main())
print(sorted(Watch.threads.items()))
"""


def test_torch_and_plugins_are_imported_off_the_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=50
    )
    assert done.stdout.strip() == "[('aioserve_plugins', False), ('torch', False)]"
