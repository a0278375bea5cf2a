"""The core loop: one task that takes requests in, and steps through a pipeline.

      drain ──► advance ──► await the step that is due ──► finish ──► deliver ──┐
        ▲                                                                      │
        └──────────────────────────────────────────────────────────────────────┘

With overlap, a step is still running while the next is planned and launched, so the device never
waits for the host; without, each step is awaited right after its launch. The loop sleeps on one
event when there is nothing to do.

Between two awaits of this task the scheduler is its own. What may come at any moment (a new
request, a reader that left, perhaps from within the garbage collector) waits in the table of
requests; pauses and the end of the engine come from other tasks of the loop, never in the middle of
a plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from aioserve.engine.constrained import Guide
from aioserve.engine.delivery import Delivery
from aioserve.engine.event_loop import running_loop
from aioserve.engine.grammar_guides import GrammarGuides
from aioserve.engine.measures import HostTimes
from aioserve.engine.observer_events import ObserverEvents
from aioserve.engine.requests import (
    MAX_HANDLED_AT_ONCE,
    LiveRequest,
    LiveSample,
    RequestState,
    RequestTable,
)
from aioserve.errors import (
    AioserveError,
    EngineClosedError,
    EngineError,
    EngineFailedError,
    RequestFailedError,
    StepError,
)
from aioserve.execution.runner import Runner, RunnerFailedError
from aioserve.plugins import Observers
from aioserve.request import FinishReason
from aioserve.scheduling.pipeline import StepPipeline
from aioserve.scheduling.scheduler import Scheduler
from aioserve.steps.outcome import StepOutcome, UnfitOutcomeError
from aioserve.steps.plan import StepPlan
from aioserve.timings import clock_of

__all__ = ["CoreLoop"]

logger: logging.Logger = logging.getLogger(__name__)

IN_CORE = (RequestState.QUEUED, RequestState.RUNNING, RequestState.LEAVING)


class CoreLoop:
    """Runs one scheduler on one runner until stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        observers: Observers,
        name: str,
        overlap: bool,
        jump_forward: bool,
        stall_timeout_seconds: float,
    ) -> None:
        self._wake = asyncio.Event()
        self.scheduler = scheduler
        self.table: RequestTable = RequestTable()
        self.observer_events: ObserverEvents = ObserverEvents(observers, scheduler, self.table)
        self.guides: GrammarGuides = GrammarGuides(name, self._guide, jump_forward=jump_forward)
        self.delivery: Delivery = Delivery(
            self.table,
            scheduler,
            self.observer_events,
            stall_timeout_seconds=stall_timeout_seconds,
            wake=self._wake.set,
            note=self.guides.note,
        )
        self.pipeline: StepPipeline[Awaitable[StepOutcome]] = StepPipeline(
            scheduler, self._launch, depth=2 if overlap else 1
        )
        self.times: HostTimes = HostTimes()
        self.failure: BaseException | None = None
        """What ended the loop before `stop` was called: a bug, a cancelled task, or a runner that
        failed for good."""
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._ended = False
        self._clock = clock_of(self._loop)
        self._progress_seconds = self._clock()
        self._launched_seconds = 0.0
        """When the step that is due next began: at its launch, or at the end of the one before."""
        self._asleep = False
        """Nothing can be computed until a request comes or a reader catches up."""

    # -- from outside

    @property
    def num_waiting(self) -> int:
        """Requests that haven't started, wherever they wait; the one that plugins are asked about
        doesn't yet."""
        unscheduled = self.table.count(RequestState.ENCODING, RequestState.QUEUED)
        return unscheduled + self.scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """Whether no encoded request is left and no step in flight."""
        return self._idle.is_set()

    @property
    def step_age_seconds(self) -> float:
        waits = self._idle.is_set() or (self._asleep and not self.guides.is_busy)
        return 0.0 if waits else self._clock() - self._progress_seconds

    def submit(self, request: LiveRequest) -> None:
        """Queue an encoded request; it enters the scheduler before the next step is planned."""
        request.mailbox.encoded()
        if self._ended:
            self.table.end(request)
            request.mailbox.finish(FinishReason.ERROR, self.why_ended())
            return
        if self._idle.is_set():
            self._idle.clear()
            self._progress_seconds = self._clock()
        self.table.queue(request)
        self._wake.set()

    def why_ended(self) -> AioserveError:
        """A new error for a request that the loop can't serve, as it has ended."""
        if self.failure is None:
            return EngineClosedError("the engine was closed", state="closed")
        return _failed(self.failure)

    async def wait_idle(self) -> None:
        """Until no encoded request is left and no step in flight."""
        await self._idle.wait()

    def stop(self) -> None:
        """End `run` once the steps in flight are done."""
        self._stopping = True
        self._wake.set()

    # -- the loop

    async def run(self) -> None:
        """Serve until `stop`. A bug here ends every request with an error, and the loop; what ends
        the program, Ctrl-C say, does so too and goes on to the event loop."""
        try:
            await self._serve()
        except asyncio.CancelledError as error:
            self._fail(error, EngineFailedError("the engine's task was cancelled"))
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            ended = f"the engine was ended by {type(error).__name__}"
            self._fail(error, EngineFailedError(ended))
            raise
        except BaseException as error:
            if running_loop() is not self._loop:
                raise  # GeneratorExit: the loop has gone and the task is collected
            logger.exception("the core loop failed")
            self._fail(error, _failed(error).with_cause(error))
        finally:
            self._ended = True
            if running_loop() is self._loop:
                try:
                    self.observer_events.tell()
                finally:
                    self._idle.set()

    def _fail(self, failure: BaseException, error: EngineError) -> None:
        self.failure = failure
        self.delivery.end_all(FinishReason.ERROR, error)

    async def _serve(self) -> None:
        pipeline = self.pipeline
        while True:
            await self._drain()
            plan = pipeline.drain() if self._stopping else self._advance()
            if ended := self.scheduler.take_ended_unplanned():
                self.delivery.deliver(ended)
            if (handle := pipeline.due) is not None:
                await self._finish_step(handle)
            elif plan is None:
                if self._stopping:
                    self.scheduler.end_pins()
                    return
                await self._sleep()
            self._wake.clear()

    def _advance(self) -> StepPlan | None:
        began = self._clock()
        was_idle = not self.pipeline.steps
        plan = self.pipeline.advance(began)
        now = self._clock()
        self.times.planning_seconds += now - began
        if was_idle:
            self._launched_seconds = now
        return plan

    async def _drain(self) -> None:
        """Take requests out of the scheduler whose readers have left, and new ones in. Where there
        are thousands, the loop has others to run meanwhile."""
        table, handled = self.table, 0
        while table.leaving or table.queued:
            if (leaving := table.next_leaving()) is not None:
                self.delivery.drop(leaving)
            elif (queued := table.next_queued()) is not None:
                self._register(queued)
            handled += 1
            if handled % MAX_HANDLED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _register(self, live: LiveRequest) -> None:
        request = live.request
        if request is None:
            raise EngineError(f"{live!r} is queued and its prompt isn't encoded")
        sequence_ids = self.scheduler.submit(request)
        samples = [
            LiveSample(live, index, sequence_id, live.assemblers[index])
            for index, sequence_id in enumerate(sequence_ids)
        ]
        if self.table.run(live, samples):
            live.mailbox.account = self.scheduler.account_of(sequence_ids[0])
            self.observer_events.arrived(live)
            if live.grammar is not None:
                try:
                    for sample in samples:
                        self.guides.begin(sample, live.grammar)
                except RuntimeError as error:
                    failed = RequestFailedError(f"no thread for structured_output: {error}")
                    self.delivery.fail(live, failed.with_cause(error))
        else:
            for sequence_id in sequence_ids:
                self.scheduler.finish(sequence_id)

    async def _sleep(self) -> None:
        self.observer_events.tell()
        if not self.table.count(*IN_CORE):
            self._idle.set()
        self._asleep = True
        await self._wake.wait()
        self._asleep = False
        self._progress_seconds = self._clock()

    def _launch(self, plan: StepPlan) -> Awaitable[StepOutcome]:
        masked = self.scheduler.masked_rows(plan) if self.guides.is_used else None
        masks, samples = None, self.table.samples
        try:
            if masked:
                masks = self.guides.expect(
                    plan.step, [(row, samples.get(id), at) for row, id, at in masked]
                )
            return self._runner.launch(plan, masks)
        except Exception as error:
            self.scheduler.not_launched(plan)
            failed: asyncio.Future[StepOutcome] = self._loop.create_future()
            failed.set_exception(error)
            return failed

    async def _finish_step(self, handle: Awaitable[StepOutcome]) -> None:
        plan, parts, brought = self.pipeline.steps[0][0], None, None
        began = self._launched_seconds
        try:
            try:
                outcome = brought = await handle
            finally:
                self._note_end(plan)
                if self.observer_events.observers.watch_steps:
                    parts = self.observer_events.parts_of(plan, brought)
        except RunnerFailedError:
            raise  # no step will do better: the engine ends
        except Exception as error:
            failure = error
        else:
            failure = self._commit(outcome)
        if failure is not None:
            self._fail_step(plan, failure)
        if self.guides.is_used:
            self.guides.release(plan.step, self.table.samples)
        self._progress_seconds = self._clock()
        if parts is None:
            self.observer_events.tell()
            return
        self.observer_events.tell_of_step(
            plan,
            parts,
            failed=failure is not None,
            began_seconds=began,
            now_seconds=self._progress_seconds,
            num_waiting=self.num_waiting,
        )

    def _guide(self, sample: LiveSample, guide: Guide) -> None:
        """What may come next in a completion is known."""
        if self.table.samples.get(sample.sequence_id) is not sample:
            return  # it has ended meanwhile
        sequence_id, error = sample.sequence_id, guide.error
        try:
            guided = self.scheduler.guide(sequence_id, guide.forced, drawn=guide.drawn)
            self.delivery.deliver(guided)
        except Exception as raised:
            failed = RequestFailedError("structured_output can't be followed")
            error = failed.with_cause(raised)
        if error is not None and sequence_id in self.table.samples:
            self.delivery.fail(sample.request, error)
        self._wake.set()

    def _note_end(self, plan: StepPlan) -> None:
        """A step in flight has ended; the next one, if there is one, goes on from here."""
        now = self._clock()
        step_seconds = now - self._launched_seconds
        self.times.step_seconds += step_seconds
        if self.table.waiting.tokens:
            self.table.waiting.step_ended(step_seconds)
        self._launched_seconds = now
        self.scheduler.charge(plan, step_seconds)

    def _commit(self, outcome: StepOutcome) -> Exception | None:
        """Take in and deliver what the oldest step brought; why it fails, where that isn't an
        outcome of this step."""
        times, clock = self.times, self._clock
        began = clock()
        try:
            updates = self.pipeline.finish(outcome, began)
        except UnfitOutcomeError as error:
            return error
        committed = clock()
        self.delivery.deliver(updates)
        if self.guides.is_used:
            if outcome.token_counts:  # a mask came late, perhaps
                for plan in self.pipeline.in_flight:
                    self.guides.let_go(plan.step, self.scheduler.dropped_rows(plan))
            self.guides.ask()
        times.commit_seconds += committed - began
        times.delivery_seconds += clock() - committed
        return None

    def _fail_step(self, plan: StepPlan, failure: Exception) -> None:
        """End the sequences of the oldest step, and no others."""
        logger.error(
            "step %d failed; its %d sequences end",
            plan.step,
            plan.num_sequences,
            exc_info=failure,
        )
        error = StepError(f"the step of this request failed: {failure!r}", step=plan.step)
        self.delivery.deliver(self.pipeline.fail(repr(failure)), error.with_cause(failure))


def _failed(failure: BaseException) -> EngineFailedError:
    """What a reader is told of the end of the engine. A bug says nothing to it; that its device is
    gone does."""
    if isinstance(failure, RunnerFailedError):
        return EngineFailedError(f"the engine failed: {failure}").with_cause(failure)
    error = EngineFailedError("the engine failed; see its log")
    return error.with_cause(failure) if isinstance(failure, Exception) else error
