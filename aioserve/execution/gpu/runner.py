"""Runner for a GPU: one thread launches steps, another waits for them.

    loop          read 8 ─┐   commit 6   read 9 ─┐        commit 7
    step thread           └─ pack, enqueue 8     └─ pack, enqueue 9
    device        [      step 7      ][      step 8      ][      step 9   ...
    wait thread                       └ results 7 ─ wake  └ results 8 ─ wake

One thread could not do both. While it waited for step 7, step 8 could not be launched, and the
device would idle between the two.

The worker limits the steps that are on the device or on their way to it; others wait here. Sampled
tokens stay on the device, where the next step finds them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aioserve.drafting.drafter import Drafter
from aioserve.errors import InvariantError
from aioserve.execution.gpu.device import Event
from aioserve.execution.gpu.failures import (
    HUNG_SECONDS,
    HungDeviceError,
    Watchdog,
)
from aioserve.execution.gpu.graphs import GraphKey
from aioserve.execution.gpu.timing import StepTime
from aioserve.execution.gpu.waiting import Expected, Handler, HostSide, Threads
from aioserve.execution.gpu.worker import CudaWorker, StepOnDevice
from aioserve.execution.host import Host
from aioserve.execution.loop_callbacks import LoopCallbacks, resolve
from aioserve.execution.runner import RunnerFailedError
from aioserve.execution.speculation.drafting import DrafterApart
from aioserve.execution.speculation.resolver import DraftRequest, StepFollower
from aioserve.execution.speculation.resolving_queue import ResolvingQueue
from aioserve.execution.step_arrays import StepArrays
from aioserve.sampling.masks import LateMasks
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import StepPlan

__all__ = ["CudaRunner"]

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True, kw_only=True)
class _Launched:
    """One step, from its launch until the loop has heard of its end."""

    block: StepArrays | GraphKey
    """The block to compute. A key stands for padding alone, which runs what a graph of it will
    be."""
    future: asyncio.Future[StepOutcome]
    on_done: Callable[[_Launched, StepOutcome | Exception], None]
    """Called on the loop with the step's result."""
    callbacks: LoopCallbacks
    followed: StepPlan | None = None
    """Plan that a follower must hear of before any of the step is enqueued."""
    pending: StepOnDevice | None = None
    """The step on the device; None while it is on its way there."""
    enqueued_seconds: float | None = None

    @property
    def begun(self) -> StepOnDevice:
        """The step on the device. Raises `InvariantError` before it is there."""
        if self.pending is None:
            raise InvariantError(f"{self} is waited for before it is on the device")
        return self.pending

    @property
    def event(self) -> Event:
        return self.begun.event

    @property
    def is_done(self) -> bool:
        return self.pending is not None and self.pending.is_done

    def end(self) -> None:
        result: StepOutcome | Exception
        try:
            result = self.begun.outcome()
        except Exception as error:
            result = error
        self.callbacks.put(functools.partial(self.on_done, self, result))
        del result  # an error would hold this frame, and with it the error and the step

    @property
    def name(self) -> str:
        if isinstance(self.block, GraphKey):
            return f"padding to {self.block.size} sequences"
        return f"step {self.block.step}"

    def __str__(self) -> str:
        if isinstance(self.block, GraphKey):
            return self.name
        batch = self.block.batch
        tokens = 0 if batch is None else len(batch.token_ids)
        sequences = 0 if batch is None else len(batch.context_lens)
        key = None if self.pending is None else self.pending.graph_key
        how = "eager" if key is None else f"padded to {key.size}"
        return (
            f"{self.name}: {tokens} tokens of {sequences} sequences, {how}, "
            f"{len(self.block.copies)} page copies"
        )


@dataclass(slots=True, frozen=True)
class _Drafting:
    """A step whose draft tokens are being computed, as the watchdog sees it. It may compile
    kernels, and so has as long as a launch."""

    step: int
    enqueued_seconds: None = None
    is_done: bool = False

    def __str__(self) -> str:
        return f"the draft tokens for step {self.step}"


class CudaRunner:
    """A `Runner` of a host and its worker. Made on the event loop that will await its steps.

    The runner fails if a step is the oldest on the device for `hung_seconds`. A hung device can't
    be told from one that computes.
    """

    def __init__(
        self,
        host: Host,
        worker: CudaWorker,
        *,
        name: str,
        host_side: HostSide | None = None,
        hung_seconds: float = HUNG_SECONDS,
        follower: StepFollower | None = None,
    ) -> None:
        """`follower` hears of every plan on the thread that launches steps. A drafter given
        later computes with it, on the same stream."""
        loop = asyncio.get_running_loop()
        self._device = worker.device
        self._host = host
        self._worker = worker
        self._queued: deque[_Launched] = deque()
        """Steps that wait for one in flight to end."""
        self._in_flight: deque[_Launched] = deque()
        self._follower = follower
        self._drafting: _Drafting | None = None
        """Step whose draft tokens are being computed. Nothing is in flight meanwhile."""
        self._resolving = ResolvingQueue(self._host, self._launch, self._pass_by)
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
        # In this order: an exiting interpreter ends first the thread that was started last.
        self._waiting = host_side.start_waiting(
            f"{name}-waits", self._worker.main, self._callbacks, self._device.within
        )
        self._launching = host_side.start_launching(name, self._worker.within)
        self._launching.put(self._worker.begin)

    @property
    def wake_delays_seconds(self) -> Sequence[float]:
        return self._callbacks.wake_delays_seconds

    def launch(self, plan: StepPlan, masks: LateMasks | None = None) -> Awaitable[StepOutcome]:
        """Launch a step. Its arrays are made here, while the step before is computed."""
        future: asyncio.Future[StepOutcome] = self._callbacks.loop.create_future()
        if self._failure is not None:
            _fail(future, self._failure)
            return future
        # A plan that can't be read fails when its turn comes: a follower of the steps hears of it.
        self._resolving.put(plan, self._host.read(plan, masks), future)
        return future

    def take_drafter(self, drafter: Drafter) -> None:
        """Let a drafter make the draft tokens that plans ask for. Call it before the first plan."""
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
        self._resolving = ResolvingQueue(self._host, self._launch, self._pass_by, ask)

    async def capture_graphs(self, progress: Callable[[int, int], None]) -> None:
        """Capture graphs of every size now, largest first.

        `progress` is called on the loop with graphs done and total graphs. Raises what a step of a
        size raises. If only the capture fails, that size stays eager.
        """
        keys = self._worker.graph_keys
        for done, key in enumerate(keys):
            progress(done, len(keys))
            future: asyncio.Future[StepOutcome] = self._callbacks.loop.create_future()
            self._launch(key, future, None)
            await future
        await self._launched_all()
        progress(len(keys), len(keys))

    def time_steps(self) -> list[StepTime]:
        """Time steps by `CudaWorker.time_steps`."""
        return self._worker.time_steps()

    async def aclose(self) -> None:
        await self._at_rest.wait()
        self._watchdog.stop()
        if isinstance(self._failure, HungDeviceError):
            # The threads may never return from the driver.
            self._launching.end()
            self._waiting.end()
        else:
            self._launching.put(self._worker.close)
            await self._launching.aclose()
            await self._waiting.aclose()
        self._callbacks.close()

    # -- on the loop

    def _launch(
        self,
        block: StepArrays | GraphKey,
        future: asyncio.Future[StepOutcome],
        followed: StepPlan | None,
    ) -> None:
        self._queued.append(
            _Launched(
                block=block,
                future=future,
                on_done=self._ended,
                callbacks=self._callbacks,
                followed=followed,
            )
        )
        self._at_rest.clear()
        self._begin_queued()

    def _begin_queued(self) -> None:
        while self._queued and len(self._in_flight) < self._worker.max_in_flight:
            launched = self._queued.popleft()
            self._in_flight.append(launched)
            if len(self._in_flight) == 1:
                self._watchdog.progress()
            begin = functools.partial(_begin, launched, self._worker, self._follower, self._waiting)
            self._launching.put(begin)

    def _pass_by(self, plan: StepPlan) -> None:
        if self._follower is not None:
            self._launching.put(functools.partial(_pass_by, self._follower, plan))

    def _have_drafted(
        self,
        drafter: DrafterApart,
        request: DraftRequest,
        on_done: Callable[[Exception | None], None],
    ) -> None:
        self._drafting = _Drafting(request.plan.step)
        self._at_rest.clear()
        self._watchdog.progress()
        drafter.ask(request, functools.partial(self._on_drafted, on_done))

    def _on_drafted(
        self, on_done: Callable[[Exception | None], None], error: Exception | None
    ) -> None:
        self._drafting = None
        if isinstance(error, RunnerFailedError):
            self._fail(error)
        else:
            on_done(error)
        self._watchdog.progress()
        self._note_rest()

    def _note_rest(self) -> None:
        if not self._in_flight and self._drafting is None:
            self._at_rest.set()

    def _ended(self, launched: _Launched, result: StepOutcome | Exception) -> None:
        if launched not in self._in_flight:
            return  # it was given up before
        self._in_flight.remove(launched)
        self._watchdog.progress()
        future = launched.future
        if isinstance(result, RunnerFailedError):
            self._fail(result)
            _fail(future, result)
        else:
            notes = isinstance(launched.block, StepArrays) and self._failure is None
            if notes:
                result = self._resolving.noted(result)
            resolve(future, result)
            if notes:
                self._resolving.go_on()
        self._begin_queued()
        self._note_rest()

    def _fail(self, failure: RunnerFailedError) -> None:
        """Fail all waiting steps, and every later one."""
        if self._failure is None:
            self._failure = failure
            logger.error("%s", failure)
        for queued in self._queued:
            _fail(queued.future, failure)
        self._queued.clear()
        self._resolving.fail(failure)

    def _oldest(self) -> _Launched | _Drafting | None:
        return self._in_flight[0] if self._in_flight else self._drafting

    def _hung(self, seconds: float) -> None:
        oldest = self._oldest()
        self._callbacks.tell()
        if oldest is None or self._oldest() is not oldest:
            return
        now = self._callbacks.clock()
        steps = "".join(f"\n  {_described(launched, now)}" for launched in self._in_flight)
        steps += "".join(f"\n  {one.name}, which waits" for one in self._queued)
        steps += "" if self._drafting is None else f"\n  {self._drafting}"
        logger.error(
            "%s: nothing has ended for %.1f s; in flight:%s", self._device.name, seconds, steps
        )
        if isinstance(oldest, _Launched):
            what = f"{oldest.name} hasn't ended"
        else:
            what = f"{oldest} haven't come"
        hung = f"{self._device.name}: {what} after {seconds:.1f} s"
        failure = HungDeviceError(hung)
        self._fail(failure)
        self._drafting = None
        given_up = [*self._in_flight]
        self._in_flight.clear()
        for launched in given_up:
            _fail(launched.future, failure)
        self._at_rest.set()

    async def _launched_all(self) -> None:
        """Wait until the step thread has made all calls put so far."""
        passed = self._callbacks.loop.create_future()
        callbacks = self._callbacks

        def tell() -> None:
            callbacks.put(functools.partial(resolve, passed, None))
            callbacks.wake()

        self._launching.put(tell)
        await passed


# -- on the step thread


def _begin(
    launched: _Launched,
    worker: CudaWorker,
    follower: StepFollower | None,
    waiting: Handler[Expected],
) -> None:
    """Begin a step, and have its end waited for."""
    block, followed = launched.block, launched.followed
    if isinstance(block, GraphKey):
        pending = worker.pad(block)
    else:
        try:
            if followed is not None and follower is not None:
                _follow(follower, followed)
        except Exception as error:
            pending = worker.fail(block.step, error)
        else:
            pending = worker.step(block)
    launched.enqueued_seconds = launched.callbacks.clock()
    launched.pending = pending
    waiting.put(launched)
    # From here on its buffers may belong to another step.
    worker.capture(pending)


def _follow(follower: StepFollower, plan: StepPlan) -> None:
    """Tell a follower of a step that is enqueued next. Raises what the follower raises."""
    follower.take(plan)
    follower.follow(plan)


def _pass_by(follower: StepFollower, plan: StepPlan) -> None:
    """Tell a follower of a step that has failed."""
    with contextlib.suppress(Exception):  # the step has failed for another reason
        _follow(follower, plan)


def _fail(future: asyncio.Future[StepOutcome], failure: RunnerFailedError) -> None:
    """Fail a future that may never be awaited, as an earlier step has already reported the
    failure."""
    resolve(future, failure)
    if not future.cancelled():
        future.exception()


def _described(launched: _Launched, now_seconds: float) -> str:
    since = launched.enqueued_seconds
    if since is None:
        return f"{launched}, on its way to the device"
    return f"{launched}, enqueued {now_seconds - since:.1f} s ago"
