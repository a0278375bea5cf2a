"""The core loop: one task that takes requests in, and steps through a pipeline.

      drain ──► advance ──► await the step that is due ──► finish ──► deliver ──┐
        ▲                                                                      │
        └──────────────────────────────────────────────────────────────────────┘

With overlap, the next step is planned and launched while one still runs, so the device never waits
for the host. Without overlap, each step is awaited right after its launch. The loop sleeps on one
event when there is nothing to do.

Between two awaits of this task nothing else touches the scheduler. New requests come at any moment,
and readers leave at any moment, perhaps from within the garbage collector. Both wait in the table
of requests. Pauses and the end of the engine come from other tasks of the loop, never in the middle
of a plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable

from aioserve.capacity.models import ModelShape
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
from aioserve.engine.step_work import MAX_NOTED, StepWork
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
        shape: ModelShape | None = None,
    ) -> None:
        """`shape` has the sizes of the runner's model; None: they are unknown."""
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
        self.work: StepWork = StepWork(shape)
        self.failure: BaseException | None = None
        """Cause of an end of the loop before `stop` was called: a bug, a cancelled task, or a
        runner that failed for good."""
        self._runner = runner
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._ended = False
        self._clock = clock_of(self._loop)
        self._progress_seconds = self._clock()
        self._step_seconds = 0.0
        """Seconds of the last step that has ended."""
        self._launched_seconds = 0.0
        """Start of the step that is due next: its launch, or the end of the step before it."""
        self._asleep = False
        """True while nothing can be computed until a request comes or a reader catches up."""

    # -- from outside

    @property
    def num_waiting(self) -> int:
        """Requests that haven't started. Excludes those that admission plugins are deciding on."""
        unscheduled = self.table.count(RequestState.ENCODING, RequestState.QUEUED)
        return unscheduled + self.scheduler.num_waiting

    @property
    def is_idle(self) -> bool:
        """True if there is no encoded request and no step in flight."""
        return self._idle.is_set()

    @property
    def step_age_seconds(self) -> float:
        waits = self._idle.is_set() or (self._asleep and not self.guides.is_busy)
        return 0.0 if waits else self._clock() - self._progress_seconds

    def submit(self, request: LiveRequest) -> None:
        """Queue an encoded request. It enters the scheduler before the next step is planned."""
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
        """Make a new error for a request that comes after the loop has ended."""
        if self.failure is None:
            return EngineClosedError("the engine was closed", state="closed")
        return _failed(self.failure)

    async def wait_idle(self) -> None:
        """Wait until there is no encoded request and no step in flight."""
        await self._idle.wait()

    def stop(self) -> None:
        """End `run` once the steps in flight are done."""
        self._stopping = True
        self._wake.set()

    # -- the loop

    async def run(self) -> None:
        """Serve until `stop`. A bug ends every request with an error, and the loop. An exception
        that ends the program, like Ctrl-C's, does the same and then goes on to the event loop."""
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
                raise  # GeneratorExit: the loop is gone and the task is being collected
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
        """Remove requests whose readers have left from the scheduler, and submit new ones.

        Yield to the event loop now and then, since there may be thousands.
        """
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
            raise  # no later step can succeed: the engine ends
        except Exception as error:
            failure = error
        else:
            failure = self._commit(outcome)
            if failure is None:
                noted = self.work.noted
                noted.append((plan, outcome.drafted, outcome.branched, self._step_seconds))
                if len(noted) == MAX_NOTED:
                    self.work.count()
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
        """Apply what a grammar allows next in a completion."""
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
        """Account for the time of a step that has ended. The next one, if in flight, begins now."""
        now = self._clock()
        step_seconds = now - self._launched_seconds
        self.times.step_seconds += step_seconds
        if self.table.waiting.tokens:
            self.table.waiting.step_ended(step_seconds)
        self._launched_seconds = now
        self._step_seconds = step_seconds
        self.scheduler.charge(plan, step_seconds)

    def _commit(self, outcome: StepOutcome) -> Exception | None:
        """Commit and deliver the outcome of the oldest step. Return the error if the outcome
        doesn't fit the step."""
        times, clock = self.times, self._clock
        began = clock()
        try:
            updates = self.pipeline.finish(outcome, began)
        except UnfitOutcomeError as error:
            return error
        committed = clock()
        self.delivery.deliver(updates)
        if self.guides.is_used:
            if outcome.token_counts:  # perhaps a mask came late
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
    """Make the error that readers get when the engine ends. It hides the details of a bug, but
    names the loss of a device."""
    if isinstance(failure, RunnerFailedError):
        return EngineFailedError(f"the engine failed: {failure}").with_cause(failure)
    error = EngineFailedError("the engine failed; see its log")
    return error.with_cause(failure) if isinstance(failure, Exception) else error
