"""Measures the cost of each way to wait for the end of a step on this machine's GPU.

Steps of a set length follow one another, as those of one stream of tokens do. Each is a kernel that
does nothing until the device's clock has gone on for so long, with an event after it. The way waits
for that (`aioserve/execution/gpu/waiting.py`). For each way and length:

    after   from the kernel's end on the device to the call on the event loop, in microseconds
    cpu     processor time that a step takes of this process, launching included, in milliseconds
    late    how late a ticker of 1 ms in the same loop is, in milliseconds

The row `nothing` is the ticker alone; its time is no part of the other rows' cpu. The end of a
kernel is read from the device's clock. That clock is compared with the host's before and after each
row. The comparison is exact to the time that a write of the device takes to reach the host. In
microseconds, `clock` is the distance of the two bounds.

    python benchmarks/wait.py
    python benchmarks/wait.py --ways block spin --lengths 0.3 5 --seconds 5 --json wait.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import numpy as np

from aioserve.errors import ConfigError
from aioserve.execution.gpu.cupy_device import CupyDevice
from aioserve.execution.gpu.device import Device, Event, Stream
from aioserve.execution.gpu.waiting import Threads, Way
from aioserve.execution.loop_callbacks import LoopCallbacks
from aioserve.ops.gpu.cupy_module import cupy_module

WAYS: tuple[Way, ...] = get_args(Way)
LENGTHS_MS = (0.2, 2.0, 20.0)
"""Decodes of a small model, of a large one, and a step with a prompt."""
TICK_SECONDS = 0.001
WARM_STEPS = 20
CLOCK_ROUNDS = 200
ANSWER_SECONDS = 10.0
"""Most seconds until a kernel that ends at once reports its end."""

CODE = r"""
extern "C" __global__ void wait_for(unsigned long long nanoseconds, unsigned long long *ended) {
    unsigned long long began, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - began < nanoseconds);
    *(volatile unsigned long long *)ended = now;
    __threadfence_system();
}
"""


class Kernels(Protocol):
    """Kernels of a set length, one at a time, which report their ends."""

    def launch(self, stream: Stream, seconds: float) -> None: ...

    def ended(self) -> float:
        """Return the time at which the last one ended, on the clock of the kernels. It has."""
        ...

    def set_clock(self) -> tuple[float, float]:
        """Return the least and the most that `time.monotonic` can be ahead of that clock now."""
        ...


class CardKernels:
    """Kernels on a card, whose clock counts nanoseconds.

    The result is written to pinned memory, which has one address for the host and for the device.
    """

    def __init__(self, device: CupyDevice) -> None:
        self._memory = device.host_memory(8)
        self._cell = self._memory.array.view(np.uint64)
        self._stream = device.new_stream()
        self._kernel: Any = cupy_module().RawKernel(CODE, "wait_for")

    def launch(self, stream: Stream, seconds: float) -> None:
        self._cell[0] = 0
        address = np.uint64(self._memory.tensor.data_ptr())
        with stream.current():
            self._kernel((1,), (1,), (np.uint64(round(seconds * 1e9)), address))

    def ended(self) -> float:
        return int(self._cell[0]) / 1e9

    def set_clock(self) -> tuple[float, float]:
        least, most = -float("inf"), float("inf")
        for _ in range(CLOCK_ROUNDS):
            before = time.monotonic()
            self.launch(self._stream, 0.0)
            while self._cell[0] == 0:
                if time.monotonic() - before > ANSWER_SECONDS:
                    raise RuntimeError(f"no kernel has ended within {ANSWER_SECONDS:.0f} s")
            after = time.monotonic()
            least, most = max(least, before - self.ended()), min(most, after - self.ended())
        return least, most


@dataclass(frozen=True)
class Spread:
    """Spread of many values, in their unit."""

    median: float
    p99: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float], unit_seconds: float) -> Spread:
        """Return the spread of seconds. Raises ValueError without any."""
        if not values:
            raise ValueError("there must be at least one value")
        ordered = np.sort(np.asarray(values)) / unit_seconds
        median, p99 = ordered[len(ordered) // 2], ordered[int(0.99 * (len(ordered) - 1))]
        return cls(float(median), float(p99), float(ordered[-1]))


@dataclass(frozen=True)
class Row:
    """Measurements of a way, with steps of one length; of the ticker alone without a way."""

    way: Way | None
    length_ms: float
    steps: int
    after_us: Spread | None
    cpu_ms: float | None
    """Processor time of a step."""
    idle_cpu_share: float
    """Share of one processor that the ticker takes without steps."""
    late_ms: Spread
    clock_us: float


@dataclass(frozen=True)
class Step:
    """Step that reports on the loop when it heard of its end."""

    event: Event
    callbacks: LoopCallbacks
    told: asyncio.Future[float]

    def end(self) -> None:
        error = None
        try:
            self.event.synchronize()
        except Exception as raised:
            error = raised
        self.callbacks.put(lambda: self._tell(error))

    def _tell(self, error: Exception | None) -> None:
        if self.told.done():
            return
        if error is None:
            self.told.set_result(time.monotonic())
        else:
            self.told.set_exception(error)


class Ticker:
    """Timer of 1 ms on the loop. `late` has the seconds of each delay."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._set()

    def stop(self) -> None:
        self._timer.cancel()

    def _set(self) -> None:
        self._due = self._loop.time() + TICK_SECONDS
        self._timer = self._loop.call_later(TICK_SECONDS, self._tick)

    def _tick(self) -> None:
        self.late.append(self._loop.time() - self._due)
        self._set()


async def measure_nothing(seconds: float) -> Row:
    ticker = Ticker()
    began, cpu_began = time.monotonic(), time.process_time()
    await asyncio.sleep(seconds)
    share = (time.process_time() - cpu_began) / (time.monotonic() - began)
    ticker.stop()
    return Row(None, 0.0, 0, None, None, share, Spread.of(ticker.late, 1e-3), 0.0)


async def measure(
    way: Way,
    device: Device,
    kernels: Kernels,
    *,
    length_seconds: float,
    seconds: float,
    idle_cpu_share: float,
) -> Row:
    """Run steps one after the other for so many seconds, after some that aren't counted."""
    callbacks = LoopCallbacks()
    stream, event = device.new_stream(), device.new_event()
    waiting = Threads(way).start_waiting(f"waits-{way}", stream, callbacks, device.within)

    async def step() -> float:
        kernels.launch(stream, length_seconds)
        stream.record(event)
        told = callbacks.loop.create_future()
        waiting.put(Step(event, callbacks, told))
        return await told

    ends: list[float] = []
    heard: list[float] = []
    try:
        for _ in range(WARM_STEPS):
            await step()
        first = time.monotonic(), kernels.set_clock()
        ticker = Ticker()
        began, cpu_began = time.monotonic(), time.process_time()
        while time.monotonic() - began < seconds or not ticker.late:
            heard.append(await step())
            ends.append(kernels.ended())
        taken, cpu = time.monotonic() - began, time.process_time() - cpu_began
        ticker.stop()
        last = time.monotonic(), kernels.set_clock()
    finally:
        await waiting.aclose()
        callbacks.close()
    ahead = interpolated(first, last)
    after = [at - (end + ahead(at)) for at, end in zip(heard, ends, strict=True)]
    return Row(
        way,
        1e3 * length_seconds,
        len(ends),
        Spread.of(after, 1e-6),
        1e3 * (cpu - idle_cpu_share * taken) / len(ends),
        idle_cpu_share,
        Spread.of(ticker.late, 1e-3),
        1e6 * max(most - least for _, (least, most) in (first, last)),
    )


Clock = tuple[float, tuple[float, float]]
"""Time at which it was set, and by how much the host's can be ahead of it."""


def interpolated(first: Clock, last: Clock) -> Callable[[float], float]:
    """Return a function from a time to how far the host's clock is ahead then.

    A write that reaches the host takes less time than a launch, so the upper bound is the closer
    one.
    """
    (began, (_, at_first)), (ended, (_, at_last)) = first, last
    drift = (at_last - at_first) / (ended - began)
    return lambda at: at_first + (at - began) * drift


async def measure_all(
    device: Device,
    kernels: Kernels,
    ways: Sequence[Way],
    lengths_ms: Sequence[float],
    seconds: float,
    tell: Callable[[Row], None],
) -> list[Row]:
    """Measure all ways and lengths. `tell` is called with each row when it is complete."""
    with device.within():
        rows = [await measure_nothing(seconds)]
        tell(rows[0])
        for length_ms in lengths_ms:
            for way in ways:
                row = await measure(
                    way,
                    device,
                    kernels,
                    length_seconds=length_ms / 1e3,
                    seconds=seconds,
                    idle_cpu_share=rows[0].idle_cpu_share,
                )
                rows.append(row)
                tell(row)
    return rows


def print_head(name: str) -> None:
    print(name)
    print(
        f"{'':<9} {'':>8} {'':>7} {'after, us':^26} {'cpu, ms':>8} {'late, ms':^26} {'clock':>6}\n"
        f"{'way':<9} {'step, ms':>8} {'steps':>7} {'median':>8} {'p99':>8} {'at most':>8} "
        f"{'a step':>8} {'median':>8} {'p99':>8} {'at most':>8} {'us':>6}"
    )


def print_row(row: Row) -> None:
    late = shown(row.late_ms, 3)
    if row.after_us is None or row.cpu_ms is None:
        print(f"{'nothing':<9} {'':>8} {'':>7} {'':>26} {'':>8} {late}", flush=True)
        return
    print(
        f"{row.way:<9} {row.length_ms:8g} {row.steps:7} {shown(row.after_us, 1)} "
        f"{row.cpu_ms:8.3f} {late} {row.clock_us:6.1f}",
        flush=True,
    )


def shown(spread: Spread, digits: int) -> str:
    values = (spread.median, spread.p99, spread.largest)
    return " ".join(f"{value:8.{digits}f}" for value in values)


def main() -> None:
    options = parse_arguments()
    try:
        device = CupyDevice(options.device)
    except ConfigError as error:
        sys.exit(f"benchmarks/wait.py needs a GPU: {error}")
    with device.within():
        kernels = CardKernels(device)
    print_head(device.name)
    rows = asyncio.run(
        measure_all(device, kernels, options.ways, options.lengths, options.seconds, print_row)
    )
    if options.json is not None:
        written = {"device": device.name, "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="of those CUDA shows")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--lengths", nargs="+", type=positive, default=LENGTHS_MS, metavar="MS", help="of steps"
    )
    parser.add_argument("--seconds", type=positive, default=2.0, help="for each row")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def positive(text: str) -> float:
    value = 0.0
    with suppress(ValueError):
        value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


if __name__ == "__main__":
    main()
