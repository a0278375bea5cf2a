"""Failures of a real GPU: memory that runs out, and errors that stay."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from aioserve import Engine, SamplingParams
from aioserve.errors import RequestFailedError
from tests.gpu.answers import OPTIONS, answers, reference, requests
from tests.gpu.place import CountingCard, Place

ROOT = Path(__file__).resolve().parents[2]

WRECK = '''
from aioserve.ops.gpu.cupy_module import cupy_module

CODE = 'extern "C" __global__ void wreck() { *(volatile int *)8 = 1; }'


def wreck():
    """A kernel that writes where nothing is."""
    cupy = cupy_module()
    with cupy.cuda.Device(0):
        cupy.RawKernel(CODE, "wreck")((1,), (1,), ())
'''

ENGINE = """
import asyncio, sys
from pathlib import Path

from aioserve import Engine, EngineFailedError, SamplingParams
from tests.gpu.answers import OPTIONS
from tests.gpu.place import Place


async def main():
    path, way, graph_sizes = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3])
    source = Place.found().assembled(path, way=way)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)

    async def read(prompt):
        try:
            async with engine.stream(prompt, params) as stream:
                async for token in stream:
                    if token.index == 5 and prompt[0] == 5:
                        wreck()
        except EngineFailedError as error:
            print("stream:", error)

    engine = Engine(source, dtype="float32", graph_sizes=graph_sizes, **OPTIONS)
    async with engine:
        await asyncio.gather(read([5, 6]), read([7, 8, 9]))
        print("state:", engine.dump()["state"])
        try:
            await engine.generate([1, 2], params)
        except EngineFailedError as error:
            print("refused:", error)
    print("left")


asyncio.run(main())
sys.stdout.flush()
"""

DEVICE = """
import time

from aioserve.execution.gpu.cupy_device import CupyDevice

device = CupyDevice(0)
with device.within():
    event, stream = device.new_event(), device.new_stream()
    stream.record(event)
    event.synchronize()
    print("before:", type(device.meaning_of(ValueError("a mistake"))).__name__)
    wreck()
    ends = time.monotonic() + 20
    while type(device.meaning_of(ValueError("a mistake"))).__name__ == "ValueError":
        assert time.monotonic() < ends, "an idle stream never says that the device has failed"
    print("after:", device.meaning_of(ValueError("a mistake")))
    stages = {"query": lambda: event.is_done, "sleep": event.synchronize,
              "spin": lambda: event.spin(0.1), "new": lambda: stream.record(device.new_event())}
    for stage, call in stages.items():
        try:
            call()
            print(f"{stage}: nothing")
        except Exception as error:
            print(f"{stage}: {type(device.meaning_of(error)).__name__}")
"""


def run(program: str, *arguments: object) -> str:
    """Return a program's output, whatever a library prints at the end of the process."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    print(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}")
    return done.stdout


@pytest.mark.parametrize(
    ("way", "graph_sizes"),
    [("block", ()), ("spin", ()), ("callback", ()), ("block", (2,)), ("callback", (2,))],
    ids=str,
)
def test_an_illegal_access_ends_the_engine_with_the_reason(
    card: Place, directory_of: Callable[[str], Path], way: str, graph_sizes: tuple[int, ...]
) -> None:
    began = time.monotonic()
    lines = run(WRECK + ENGINE, directory_of("qwen3"), way, graph_sizes).splitlines()
    streams = [line for line in lines if line.startswith("stream: ")]
    assert len(streams) == 2
    for line in streams:
        assert "cuda:0" in line
        assert "llegal" in line or "unspecified launch failure" in line
    assert "state: failed" in lines
    assert any(line.startswith("refused: ") for line in lines)
    assert lines[-1] == "left"
    print(f"{time.monotonic() - began:.1f} s")


def test_a_stream_on_which_nothing_ever_was_tells_of_the_failure(card: Place) -> None:
    said = dict(line.split(": ", 1) for line in run(WRECK + DEVICE).splitlines())
    assert said["before"] == "ValueError"
    assert said["after"].startswith("cuda:0 (")
    # An event that was done before may say so, but a new query of the device may not.
    assert said["new"] == "DeviceFailedError"
    for stage in ("query", "sleep", "spin"):
        assert said[stage] in ("DeviceFailedError", "nothing")


# -- memory that runs out


@pytest.fixture
def _no_more_memory(card: Place) -> Iterator[None]:
    """Let tests forbid torch to take any memory; undo that afterwards."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, card.device)


def forbid_memory(device: torch.device) -> None:
    """Free what the allocator cached on the stream of steps, and let it get nothing new."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.0, device)


class GenerousCard(CountingCard):
    """A GPU on which another user frees memory when the runner frees its cache."""

    frees = 0

    def free_cached_memory(self) -> None:
        torch.cuda.set_per_process_memory_fraction(1.0, self.torch_device)
        super().free_cached_memory()
        self.frees += 1


@pytest.mark.usefixtures("_no_more_memory")
def test_a_step_without_memory_is_tried_once_more(
    card: Place, directory_of: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = directory_of("qwen3")
    asked = requests(6, 30)
    device = GenerousCard()
    source = card.assembled(path, card=device)

    async def main() -> list[list[int]]:
        async with Engine(source, dtype="float32", graph_sizes=(), **OPTIONS) as engine:
            await answers(engine, asked[:2])
            forbid_memory(card.device)
            device.frees = 0
            return await answers(engine, asked)

    with caplog.at_level(logging.WARNING):
        found = asyncio.run(main())
    assert found == asyncio.run(reference(path, asked))
    assert device.frees == 1
    assert caplog.text.count("enqueued once more") == 1


@pytest.mark.usefixtures("_no_more_memory")
def test_requests_of_a_step_without_memory_fail_and_later_ones_do_not(
    card: Place, directory_of: Callable[[str], Path]
) -> None:
    path = directory_of("qwen3")
    asked = requests(3, 20)
    source = card.assembled(path)

    async def main() -> list[list[int]]:
        async with Engine(source, dtype="float32", graph_sizes=(), **OPTIONS) as engine:
            await answers(engine, asked)
            forbid_memory(card.device)
            with pytest.raises(RequestFailedError, match=r"(?i)out of memory"):
                await engine.generate([9, 8, 7], SamplingParams(max_tokens=4))
            torch.cuda.set_per_process_memory_fraction(1.0, card.device)
            return await answers(engine, asked)

    assert asyncio.run(main()) == asyncio.run(reference(path, asked))
