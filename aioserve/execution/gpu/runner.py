"""The runner for a GPU: steps are launched by one thread and waited for by another.

    loop          read 8 ─┐   commit 6   read 9 ─┐        commit 7
    step thread           └─ pack, enqueue 8     └─ pack, enqueue 9
    device        [      step 7      ][      step 8      ][      step 9   ...
    wait thread                       └ results 7 ─ wake  └ results 8 ─ wake

One thread could not do both: while it waits for step 7, step 8 could not be launched, and the
device would stand still from the end of the one to the launch of the other.

A step's inputs and results have a pinned block of their own, which is used again when the loop has
heard of the step's end. So as many steps as there are blocks are on the device or on their way to
it; others wait for a block. Sampled tokens stay on the device, where the next step finds them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aioserve.drafting.drafter import Drafter
from aioserve.execution.batch import NO_COPIES, StepArrays
from aioserve.execution.gpu.device import Device
from aioserve.execution.gpu.failures import (
    HUNG_SECONDS,
    HungDeviceError,
    Watchdog,
)
from aioserve.execution.gpu.graphs import DecodeGraphs, GraphKey
from aioserve.execution.gpu.launching import Block, Launcher, StepInFlight
from aioserve.execution.gpu.step_model import StepModel
from aioserve.execution.gpu.timing import StepTime, StepTimer
from aioserve.execution.gpu.waiting import HostSide, Threads
from aioserve.execution.host import Host
from aioserve.execution.loop_callbacks import LoopCallbacks, settle
from aioserve.execution.runner import RunnerFailedError
from aioserve.execution.speculation.drafting import DrafterApart
from aioserve.execution.speculation.resolver import DraftRequest, StepFollower
from aioserve.execution.speculation.resolving_queue import ResolvingQueue
from aioserve.ops import SampleRows
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan
from aioserve.timings import clock_of

__all__ = ["CudaRunner"]

logger: logging.Logger = logging.getLogger(__name__)

NUM_BLOCKS = 2
"""Blocks of pinned memory: one for the step that runs, one for the step behind it."""

PADDING_STEP = -1
"""The number of a step that is nothing but padding, in the log."""


@dataclass(slots=True, frozen=True)
class _Queued:
    step: StepArrays
    future: asyncio.Future[StepOutcome]
    padding: GraphKey | None = None
    """What one that is nothing but padding is for."""
    followed: StepPlan | None = None
    """As in `StepInFlight`."""


@dataclass(slots=True, frozen=True)
class _Drafting:
    """A step whose draft tokens are being computed, as the watchdog sees one: like a launch it may
    compile kernels, so that it has as long."""

    step: int
    enqueued_seconds: None = None
    is_done: bool = False

    def __str__(self) -> str:
        return f"the guesses for step {self.step}"


class CudaRunner:
    """Drives a model on a device. Made on the event loop that will await its steps.

    Decodes run as graphs of `graph_sizes`, captured by `capture_graphs` or when they are first
    needed; with none every step runs eagerly. A step that is the oldest on the device for
    `hung_seconds` ends the runner: a device that hangs can't be told from one that computes.
    """

    def __init__(
        self,
        device: Device,
        model: StepModel,
        *,
        num_slots: int,
        name: str,
        graph_sizes: Sequence[int] = (),
        host_side: HostSide | None = None,
        processors: Sequence[Callable[[str], Any]] = (),
        hung_seconds: float = HUNG_SECONDS,
        follower: StepFollower | None = None,
    ) -> None:
        """`follower` hears of every plan on the thread that launches steps, where the drafter that
        comes later computes with it, on the same stream."""
        loop = asyncio.get_running_loop()
        self._device = device
        self._host = Host(model.page_size, num_slots, model.num_groups, processors)
        self._graphs = DecodeGraphs(device, graph_sizes)
        self._variants = tuple(model.variants)
        with device.within():
            self._launcher = Launcher(device, model, self._graphs, clock_of(loop), follower)
            self._free_blocks = deque(Block(device, model) for _ in range(NUM_BLOCKS))
        self._queued: deque[_Queued] = deque()
        """Steps for which there is no block."""
        self._in_flight: deque[StepInFlight] = deque()
        self._follower = follower
        self._drafting: _Drafting | None = None
        """The step for which draft tokens are being computed: nothing is in flight then."""
        self._resolving = ResolvingQueue(self._host, self._launch_resolved, self._pass_by)
        self._futures: dict[StepInFlight, asyncio.Future[StepOutcome]] = {}
        self._failure: RunnerFailedError | None = None
        self._at_rest = asyncio.Event()
        self._at_rest.set()
        self._watchdog = Watchdog(loop, self._oldest, self._hung, hung_seconds=hung_seconds)
        self._callbacks = LoopCallbacks()
        try:
            self._start(host_side or Threads(), f"aioserve-{name}")
        except RuntimeError:
            self._callbacks.close()
            raise

    def _start(self, host_side: HostSide, name: str) -> None:
        # In this order: an interpreter that exits ends the thread first that was started last.
        self._waiting = host_side.start_waiting(
            f"{name}-waits", self._launcher.main, self._callbacks, self._device.within
        )
        self._launching = host_side.start_launching(name, self._launcher.within)
        self._launching.put(self._launcher.begin)

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._callbacks.wake_delays_seconds

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        """Its arrays are made here, while the step before is computed."""
        future: asyncio.Future[StepOutcome] = self._callbacks.loop.create_future()
        if self._failure is not None:
            _fail(future, self._failure)
            return future
        # One that can't be read fails where its turn comes: what follows the steps hears of it.
        self._resolving.put(plan, self._host.read(plan, masks), future)
        return future

    def take_drafter(self, drafter: Drafter) -> None:
        """Let a drafter make the draft tokens that plans ask for. To be called before the first."""
        clock, ask = self._callbacks.clock, None
        if self._follower is not None:
            apart = DrafterApart(
                drafter,
                self._follower,
                self._launching.put,
                self._callbacks,
                self._device.meaning_of,
            )
            drafter, ask = apart, functools.partial(self._have_drafted, apart)
        self._host.take_drafter(drafter, clock)
        self._resolving = ResolvingQueue(self._host, self._launch_resolved, self._pass_by, ask)

    async def capture_graphs(self, progress: Callable[[int, int], None]) -> None:
        """Capture graphs of every size now, largest first. `progress` is called on the loop with
        how many are done, and how many there are.

        Raises what a step of a size raises; one that only can't be captured stays eager.
        """
        sizes = self._graphs.sizes[::-1]
        keys = [GraphKey(size, variant) for size in sizes for variant in self._variants]
        for done, key in enumerate(keys):
            progress(done, len(keys))
            future: asyncio.Future[StepOutcome] = self._callbacks.loop.create_future()
            nothing = StepArrays(PADDING_STEP, NO_COPIES, None, SampleRows.none())
            self._launch(_Queued(nothing, future, padding=key))
            await future
        await self._launched_all()
        progress(len(keys), len(keys))

    def time_steps(self) -> list[StepTime]:
        """Have the device time each step that is launched from here on. What is returned grows by
        one with each that ends well, before the loop hears of that; another call begins anew.

        A step is launched as before, and two events later; nothing waits for them.
        """
        with self._device.within():
            timer = StepTimer(self._device, NUM_BLOCKS)
        self._launcher.timer = timer
        return timer.times

    async def aclose(self) -> None:
        await self._at_rest.wait()
        self._watchdog.stop()
        if isinstance(self._failure, HungDeviceError):
            # They may never return from the driver.
            self._launching.end()
            self._waiting.end()
        else:
            await self._launching.aclose()
            await self._waiting.aclose()
        self._callbacks.close()

    # -- on the loop

    def _launch_resolved(
        self, step: StepArrays, future: asyncio.Future[StepOutcome], followed: StepPlan | None
    ) -> None:
        self._launch(_Queued(step, future, followed=followed))

    def _launch(self, queued: _Queued) -> None:
        self._queued.append(queued)
        self._at_rest.clear()
        self._start_queued()

    def _pass_by(self, plan: StepPlan) -> None:
        if self._follower is not None:
            self._launching.put(functools.partial(self._launcher.pass_by, plan))

    def _have_drafted(
        self, drafter: DrafterApart, request: DraftRequest, told: Callable[[Exception | None], None]
    ) -> None:
        self._drafting = _Drafting(request.plan.step)
        self._at_rest.clear()
        self._watchdog.progress()
        drafter.ask(request, functools.partial(self._have_heard, told))

    def _have_heard(
        self, told: Callable[[Exception | None], None], error: Exception | None
    ) -> None:
        self._drafting = None
        if isinstance(error, RunnerFailedError):
            self._fail(error)
        else:
            told(error)
        self._watchdog.progress()
        self._note_rest()

    def _note_rest(self) -> None:
        if not self._in_flight and self._drafting is None:
            self._at_rest.set()

    def _start_queued(self) -> None:
        while self._queued and self._free_blocks:
            queued = self._queued.popleft()
            step = queued.step
            block = self._free_blocks.popleft()
            flight = StepInFlight(
                step=step,
                block=block,
                padding=queued.padding,
                followed=queued.followed,
                locations_in_flight=self._locations_in_flight() if len(step.copies) else (),
                device=self._device,
                told=self._ended,
                callbacks=self._callbacks,
            )
            self._in_flight.append(flight)
            self._futures[flight] = queued.future
            if len(self._in_flight) == 1:
                self._watchdog.progress()
            self._launching.put(functools.partial(self._launcher.launch, flight, self._waiting))

    def _locations_in_flight(self) -> list[np.ndarray]:
        batches = [flight.step.batch for flight in self._in_flight]
        return [batch.token_locations for batch in batches if batch is not None]

    def _ended(self, flight: StepInFlight, result: StepOutcome | Exception) -> None:
        future = self._futures.pop(flight, None)
        if future is None:
            return  # it was given up before
        self._in_flight.remove(flight)
        self._free_blocks.append(flight.block)
        self._watchdog.progress()
        if isinstance(result, RunnerFailedError):
            self._fail(result)
            _fail(future, result)
        else:
            notes = flight.padding is None and self._failure is None
            if notes:
                result = self._resolving.noted(result)
            settle(future, result)
            if notes:
                self._resolving.go_on()
        self._start_queued()
        self._note_rest()

    def _fail(self, failure: RunnerFailedError) -> None:
        """No step succeeds from here on."""
        if self._failure is None:
            self._failure = failure
            logger.error("%s", failure)
        for queued in self._queued:
            _fail(queued.future, failure)
        self._queued.clear()
        self._resolving.fail(failure)

    def _oldest(self) -> StepInFlight | _Drafting | None:
        return self._in_flight[0] if self._in_flight else self._drafting

    def _hung(self, seconds: float) -> None:
        oldest = self._oldest()
        self._callbacks.tell()
        if oldest is None or self._oldest() is not oldest:
            return
        now = self._callbacks.clock()
        steps = "".join(f"\n  {_described(flight, now)}" for flight in self._in_flight)
        steps += "".join(f"\n  step {one.step.step}, which waits" for one in self._queued)
        steps += "" if self._drafting is None else f"\n  {self._drafting}"
        logger.error(
            "%s: nothing has ended for %.1f s; in flight:%s", self._device.name, seconds, steps
        )
        if isinstance(oldest, StepInFlight):
            what = f"step {oldest.step.step} hasn't ended"
        else:
            what = f"{oldest} haven't come"
        hung = f"{self._device.name}: {what} after {seconds:.1f} s"
        failure = HungDeviceError(hung)
        self._fail(failure)
        self._in_flight.clear()
        self._drafting = None
        futures, self._futures = self._futures, {}
        for future in futures.values():
            _fail(future, failure)
        self._at_rest.set()

    async def _launched_all(self) -> None:
        """Until the step thread has done all that was put until now."""
        passed = self._callbacks.loop.create_future()
        callbacks = self._callbacks

        def tell() -> None:
            callbacks.put(functools.partial(settle, passed, None))
            callbacks.wake()

        self._launching.put(tell)
        await passed


def _fail(future: asyncio.Future[StepOutcome], failure: RunnerFailedError) -> None:
    """Fail a future that may not be awaited, as the failure of a step before it is told already."""
    settle(future, failure)
    if not future.cancelled():
        future.exception()


def _described(flight: StepInFlight, now_seconds: float) -> str:
    since = flight.enqueued_seconds
    if since is None:
        return f"{flight}, on its way to the device"
    return f"{flight}, enqueued {now_seconds - since:.1f} s ago"
