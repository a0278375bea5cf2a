"""The benchmark of ways to wait measures what it says, on a fake GPU whose times are known."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import time
from types import ModuleType
from typing import Any

import pytest
import torch

from aioserve.execution.gpu.waiting import Way
from tests.doubles.fake_gpu import Access, FakeGpu, FakeStream
from tests.examples.test_benchmarks import BENCHMARKS
from tests.execution.gpu.plans import threaded_gpu

CLOCK_AHEAD = 1234.5
"""Seconds by which the host's clock is ahead of the kernels'."""


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("wait_benchmark", BENCHMARKS / "wait.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "wait_benchmark", module)
    spec.loader.exec_module(module)
    return module


class FakeKernels:
    """The device takes as long as `threaded_gpu` was told."""

    def __init__(self, drift: float = 0.0) -> None:
        self.began = time.monotonic()
        self.drift = drift
        self._ended = 0.0

    def clock(self) -> float:
        now = time.monotonic()
        return now - CLOCK_AHEAD - self.drift * (now - self.began)

    def launch(self, stream: FakeStream, seconds: float) -> None:
        def kernel(access: Access) -> None:
            self._ended = self.clock()

        stream.launch("kernel", kernel)

    def ended(self) -> float:
        return self._ended

    def set_clock(self) -> tuple[float, float]:
        ahead = time.monotonic() - self.clock()
        return ahead - 2e-6, ahead


def measure(wait: ModuleType, gpu: FakeGpu, kernels: Any, way: Way, length: float) -> Any:
    return asyncio.run(
        wait.measure(way, gpu, kernels, length_seconds=length, seconds=0.4, idle_cpu_share=0.0)
    )


@pytest.mark.more
@pytest.mark.parametrize("way", ["block", "spin", "callback"])
def test_what_is_behind_the_end_on_the_device_is_measured_and_what_is_before_is_not(
    wait: ModuleType, way: Way
) -> None:
    """Steps of 20 ms; the clock of the kernels goes at half the speed."""
    length = 0.02
    with threaded_gpu(op_seconds=lambda name: length if name == "kernel" else 0.0) as gpu:
        row = measure(wait, gpu, FakeKernels(drift=0.5), way, length)
    assert row.way == way
    assert 3 <= row.steps <= 0.4 / length + 1
    # A thread of the fake GPU says that it is done, the waiting one wakes, the loop hears of it.
    assert -1e3 < row.after_us.median < 1e3 * length * 1e3 / 2
    assert row.after_us.median <= row.after_us.p99 <= row.after_us.largest
    assert row.late_ms.largest >= 0
    assert row.cpu_ms > 0
    assert row.clock_us == pytest.approx(2, abs=1)


@pytest.mark.more
def test_a_loop_that_is_held_up_shows_in_the_ticker(wait: ModuleType) -> None:
    async def main() -> Any:
        measuring = asyncio.create_task(wait.measure_nothing(0.3))
        await asyncio.sleep(0.05)
        time.sleep(0.1)
        return await measuring

    row = asyncio.run(main())
    assert row.way is None
    assert row.late_ms.largest > 80
    assert row.late_ms.median < 80


def test_every_way_and_length_has_a_row_and_the_first_is_of_nothing(
    wait: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with threaded_gpu(op_seconds=0.001) as gpu:
        rows = asyncio.run(
            wait.measure_all(
                gpu, FakeKernels(), ("spin", "block"), (0.5, 1.0), 0.05, wait.print_row
            )
        )
    assert [(row.way, row.length_ms) for row in rows] == [
        (None, 0.0),
        ("spin", 0.5),
        ("block", 0.5),
        ("spin", 1.0),
        ("block", 1.0),
    ]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["nothing", "spin", "block", "spin", "block"]


@pytest.mark.more
def test_the_share_of_a_step_is_without_what_the_ticker_takes(wait: ModuleType) -> None:
    with threaded_gpu(op_seconds=lambda name: 0.01) as gpu:
        row = asyncio.run(
            wait.measure(
                "block", gpu, FakeKernels(), length_seconds=0.01, seconds=0.3, idle_cpu_share=2.0
            )
        )
    assert row.cpu_ms < 0  # two processors are more than it takes


def test_a_spread_is_of_values(wait: ModuleType) -> None:
    spread = wait.Spread.of([0.003, 0.001, 0.002], 1e-3)
    assert (spread.median, spread.p99, spread.largest) == pytest.approx((2.0, 2.0, 3.0))
    with pytest.raises(ValueError, match="at least one"):
        wait.Spread.of([], 1.0)
    assert json.dumps(wait.asdict(spread))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "wait.py"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1
    assert done.stderr.startswith("benchmarks/wait.py needs a GPU: ")
    assert done.stderr.count("\n") == 1
