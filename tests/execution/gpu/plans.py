"""Plans for a runner on a fake GPU, and runners for them, on a simulated loop or with threads."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.runner import CudaRunner
from aioserve.execution.gpu.step_model import StepModel
from aioserve.execution.gpu.worker import CudaWorker
from aioserve.execution.host import Host
from aioserve.request import SamplingParams
from aioserve.steps.pages import PageCopy
from aioserve.steps.plan import PENDING_TOKEN, SampleRow, SlotStart, StepPlan, WorkItem
from tests.doubles.fake_gpu import FakeGpu
from tests.doubles.fake_gpu_model import FakeStepModel
from tests.doubles.simulated_host import SimulatedHost
from tests.placed import PlacedItem, placed_item, placed_plan

PAGE_SIZE = 4
NUM_SLOTS = 8
GREEDY = SamplingParams(temperature=0.0)


def step_model(gpu: FakeGpu, **sizes: int) -> FakeStepModel:
    sizes = {"num_pages": 32, "num_host_pages": 8, **sizes}
    return FakeStepModel(
        gpu,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_tokens=64,
        max_rows=NUM_SLOTS,
        max_model_len=64,
        **sizes,
    )


def runner_of(
    gpu: Device, model: StepModel, graph_sizes: Sequence[int] = (), **options: Any
) -> CudaRunner:
    """Make a runner for the slots and pages of these plans. Call it on the loop."""
    host = Host(model.page_size, NUM_SLOTS, model.num_groups)
    return CudaRunner(host, CudaWorker(gpu, model, graph_sizes), **{"name": "test", **options})


def simulated_runner(gpu: FakeGpu, model: StepModel | None = None, **options: Any) -> CudaRunner:
    """Make a runner on the simulated loop."""
    return runner_of(gpu, model or step_model(gpu), host_side=SimulatedHost(gpu), **options)


def starts(*slots: int) -> tuple[SlotStart, ...]:
    """Start slots whose seeds are their numbers."""
    return tuple(SlotStart(slot=slot, params=GREEDY, seed=slot) for slot in slots)


def pages_of(slot: int) -> np.ndarray:
    """Four pages that belong to this slot only."""
    return np.arange(4 * slot, 4 * slot + 4, dtype=np.int32)


def item(
    slot: int,
    start: int,
    token_ids: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    pages: Sequence[int] | np.ndarray | None = None,
) -> PlacedItem:
    """Make an item that samples from its last token for the slots in `rows`, by default for its
    own."""
    slots = [slot] if rows is None else rows
    return placed_item(
        sequence_id=slot,
        slot=slot,
        start=start,
        count=len(token_ids),
        token_ids=np.array(token_ids, np.int32),
        page_ids=np.array(pages_of(slot) if pages is None else pages, np.int32),
        rows=tuple(SampleRow(offset=len(token_ids) - 1, slot=each) for each in slots),
    )


def decode(slot: int, start: int, **options: Any) -> PlacedItem:
    return item(slot, start, [PENDING_TOKEN], **options)


def plan(
    step: int,
    *items: WorkItem,
    started: Sequence[int] = (),
    copies: Sequence[PageCopy] = (),
) -> StepPlan:
    return placed_plan(step=step, items=items, started_slots=starts(*started), copies=tuple(copies))


def device_clock() -> float:
    """Read a clock that the host's clocks don't affect (`tests/clocks.py`)."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class DeviceThread:
    """Makes calls after real time. A fake GPU uses it without a simulated loop."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="fake gpu", daemon=True)
        self._thread.start()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        with self._changed:
            self._count += 1
            heapq.heappush(self._calls, (device_clock() + seconds, self._count, call))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._open = False
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._open and not (self._calls and self._calls[0][0] <= device_clock()):
                    left = self._calls[0][0] - device_clock() if self._calls else None
                    self._changed.wait(left)
                if not self._open:
                    return
                call = heapq.heappop(self._calls)[2]
            call()


@contextmanager
def threaded_gpu(**options: Any) -> Iterator[FakeGpu]:
    """Make a fake GPU in real time, for runners with threads."""
    thread = DeviceThread()
    try:
        yield FakeGpu(later=thread.later, **options)
    finally:
        thread.close()


def threads_of(name: str) -> set[str]:
    """Names of the living threads of that runner."""
    names = {thread.name for thread in threading.enumerate()}
    return {each for each in names if each.startswith(f"aioserve-{name}")}
