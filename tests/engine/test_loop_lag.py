"""The engine must not hold up the other tasks of the event loop.

Two measures are taken, since a busy machine delays every task. One is the CPU time of each callback
on the loop's own thread. Other programs don't add to it, so a long callback is the engine's fault.

The other is the delay of a ticker in the same loop. It also sees a loop that waits for a lock or a
device. A stall in every step delays as many ticks as there are steps, but the machine's hiccups
only a few. Planted stalls are found.
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from aioserve import Engine, PromptTooLongError, SamplingParams, SchedulingPolicy

pytestmark = pytest.mark.alone

LINE = "def function(argument):\n    return [value * 2 for value in argument]\n"
STALL_SECONDS = 0.2
MAX_CALLBACK_CPU_SECONDS = 0.05
MAX_LATE_SECONDS = 0.1


class LoopWatch:
    """Notes CPU seconds of each callback of the loop, and delays of a task that sleeps 1 ms at a
    time.

    Garbage collection is off meanwhile: its time depends on the whole test run.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.callback_cpu_seconds: list[float] = []
        self.late_seconds: list[float] = []
        run = asyncio.Handle._run

        def timed_run(handle: asyncio.Handle) -> None:
            before = time.thread_time()
            run(handle)
            self.callback_cpu_seconds.append(time.thread_time() - before)

        monkeypatch.setattr(asyncio.Handle, "_run", timed_run)

    async def __aenter__(self) -> LoopWatch:
        gc.collect()
        gc.disable()
        self._task = asyncio.create_task(self._tick())
        await asyncio.sleep(0.01)  # ends the current callback
        self.callback_cpu_seconds.clear()
        self.late_seconds.clear()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.sleep(0)
        gc.enable()
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _tick(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(0.001)
            self.late_seconds.append(time.perf_counter() - before - 0.001)

    def late_seconds_in_every_second_step(self, num_steps: int) -> float:
        """Return a delay that the ticks of at most half of the steps exceed."""
        return sorted(self.late_seconds)[-(num_steps // 2) - 1]


@pytest.mark.parametrize(
    "prompt_of",
    [lambda text: text, lambda text: [{"role": "user", "content": text}]],
    ids=["text", "messages"],
)
@pytest.mark.asyncio
async def test_encoding_a_long_prompt_does_not_block_the_loop(
    prompt_of: Callable[[str], str | list[dict[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = LoopWatch(monkeypatch)
    async with Engine("pyhelp") as engine:
        # Short enough not to be refused unread.
        text = LINE * (100 * engine.limits.max_model_len // len(LINE))
        before = time.thread_time()
        assert len(engine.tokenizer.encode(text)) > engine.limits.max_model_len
        encoding_seconds = time.thread_time() - before
        async with watch:
            with pytest.raises(PromptTooLongError, match=r"prompt has \d+ tokens"):
                await engine.generate(prompt_of(text))
    assert max(watch.callback_cpu_seconds) < encoding_seconds / 4
    assert len(watch.late_seconds) > 3


@pytest.mark.asyncio
async def test_loading_a_model_does_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = LoopWatch(monkeypatch)
    async with Engine("pyhelp"):
        pass  # one-time imports happen now
    async with watch:
        before = time.process_time()
        engine = await Engine("pyhelp").__aenter__()
        loading_seconds = time.process_time() - before
        await engine.__aexit__(None, None, None)
    assert max(watch.callback_cpu_seconds) < loading_seconds / 4


async def serve_long_prompts(watch: LoopWatch, policy: SchedulingPolicy) -> None:
    """Serve steps full of prompt tokens. Raises AssertionError if they hold up the loop."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    async with Engine("pyhelp", policy=policy) as engine:
        length = engine.limits.max_model_len - 2
        await engine.generate(range(5, 13), params)
        before = engine.stats().steps_total
        async with watch:
            started = time.perf_counter()
            # They differ from the first token on, so the cache finds none of them.
            prompts = [[5 + n, *range(1000, 1000 + length - 1)] for n in range(14)]
            await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
            serving_seconds = time.perf_counter() - started
        num_steps = engine.stats().steps_total - before
    assert num_steps >= 7
    assert max(watch.callback_cpu_seconds) < MAX_CALLBACK_CPU_SECONDS, "a callback computes"
    late_seconds = watch.late_seconds_in_every_second_step(num_steps)
    # A lock held during the computation would be held for about a step.
    most = min(MAX_LATE_SECONDS, serving_seconds / num_steps / 3)
    assert late_seconds < most, "the loop waits"


@pytest.mark.asyncio
async def test_steps_do_not_block_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    await serve_long_prompts(LoopWatch(monkeypatch), SchedulingPolicy())


class Stalling(SchedulingPolicy):
    """A policy that holds up the event loop whenever a step is planned."""

    def __init__(self, stall: Callable[[], None]) -> None:
        self.stall = stall

    def order(self, waiting, view):
        self.stall()
        return waiting

    def step_finished(self, step, tokens):
        self.stall()


def compute() -> None:
    ends = time.thread_time() + STALL_SECONDS
    while time.thread_time() < ends:
        pass


@pytest.mark.parametrize(
    ("stall", "found"),
    [(compute, "a callback computes"), (lambda: time.sleep(STALL_SECONDS), "the loop waits")],
    ids=["computing", "waiting"],
)
@pytest.mark.asyncio
async def test_a_stall_in_every_step_is_found(
    stall: Callable[[], None], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=found):
        await serve_long_prompts(LoopWatch(monkeypatch), Stalling(stall))


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
        [sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True, timeout=200
    )
    assert done.stdout.strip() == "[('aioserve_plugins', False), ('torch', False)]"
