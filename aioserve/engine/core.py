"""The core loop: one task that plans, launches, awaits and delivers steps.

      drain ──► plan ──► launch ──► await the step before ──► commit ──► deliver ──┐
        ▲                                                                          │
        └──────────────────────────────────────────────────────────────────────────┘

With overlap, the step before is still running while the next is planned and launched, so the
device never waits for the host; without, each step is awaited right after its launch. The loop
sleeps on one event when there is nothing to do. It holds mailboxes, never streams.

Between two awaits of this task the scheduler is its own. What may come at any moment (a new
request, a reader that left, perhaps from within the garbage collector) waits in the inbox; pauses
and the end of the engine come from other tasks of the loop, never in the middle of a plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.engine.mailbox import Mailbox, MailboxOwner
from aioserve.engine.notices import Notices
from aioserve.errors import (
    AioserveError,
    EngineError,
    RequestFailedError,
    RequestRejectedError,
    StepError,
    StreamStalledError,
)
from aioserve.execution.plan import StepOutcome, StepPlan
from aioserve.execution.runner import Runner
from aioserve.plugins import Observers, RequestInfo
from aioserve.request import FinishReason, SamplingParams, Token
from aioserve.scheduling.progress import Progress
from aioserve.scheduling.scheduler import Scheduler
from aioserve.text.assembler import TextAssembler

__all__ = ["CoreLoop", "Submission"]

logger = logging.getLogger(__name__)


class Submission(msgspec.Struct):
    """An encoded request on its way into the scheduler."""

    mailbox: Mailbox
    info: RequestInfo
    prompt_ids: npt.NDArray[np.int32]
    params: SamplingParams
    seed: int
    namespace: bytes
    """Requests share cached pages within one namespace alone."""
    end_ids: frozenset[int]
    max_length: int
    assemblers: tuple[TextAssembler, ...]
    """One per sample."""


class LiveRequest:
    """A request that the scheduler knows, with the samples that go on."""

    __slots__ = ("info", "mailbox", "samples", "stall_timer")

    def __init__(self, mailbox: Mailbox, info: RequestInfo) -> None:
        self.mailbox = mailbox
        self.info = info
        self.samples: list[LiveSample] = []
        self.stall_timer: asyncio.TimerHandle | None = None


class LiveSample:
    """One of a request's answers: a sequence of the scheduler's, and its text."""

    __slots__ = ("assembler", "index", "num_delivered", "request", "sequence_id")

    def __init__(
        self, request: LiveRequest, index: int, sequence_id: int, assembler: TextAssembler
    ) -> None:
        self.request = request
        self.index = index
        self.sequence_id = sequence_id
        self.assembler = assembler
        self.num_delivered = 0


class CoreLoop:
    """Runs one scheduler on one runner until stopped."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        observers: Observers,
        overlap: bool,
        stall_timeout_seconds: float,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.notices = Notices(observers, scheduler)
        self.failure: BaseException | None = None
        """What ended the loop before `stop` was called: a bug, or a cancelled task."""
        self.owner = MailboxOwner(self._reader_left, self._pause, self._resume)
        self._loop = asyncio.get_running_loop()
        self._stall_timeout_seconds = stall_timeout_seconds
        self._max_in_flight = 2 if overlap else 1
        self._inbox: deque[Submission] = deque()
        self._left: deque[Mailbox] = deque()
        self._requests: dict[Mailbox, LiveRequest] = {}
        self._samples: dict[int, LiveSample] = {}
        self._live: dict[str, Mailbox] = {}
        self._in_flight: deque[tuple[StepPlan, Awaitable[StepOutcome]]] = deque()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._ended = False
        self._progress_seconds = self._loop.time()
        self._asleep = False
        """Nothing can be computed until a request comes or a reader catches up."""

    # -- from outside

    @property
    def num_waiting(self) -> int:
        """Requests that haven't started."""
        return len(self._inbox) + self.scheduler.num_waiting

    def is_live(self, request_id: str) -> bool:
        """Whether a request of that id is queued or running."""
        return request_id in self._live

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """Steps launched and not yet committed."""
        return tuple(plan for plan, _ in self._in_flight)

    @property
    def step_age_seconds(self) -> float:
        waits = self._idle.is_set() or self._asleep
        return 0.0 if waits else self._loop.time() - self._progress_seconds

    def submit(self, submission: Submission) -> None:
        """Queue a request; it enters the scheduler before the next step is planned."""
        mailbox = submission.mailbox
        if self._ended:
            mailbox.finish(FinishReason.ERROR, EngineError("the engine has stopped; see its log"))
            return
        if self._idle.is_set():
            self._idle.clear()
            self._progress_seconds = self._loop.time()
        self._inbox.append(submission)
        self._live[mailbox.request_id] = mailbox
        self._wake.set()

    async def wait_idle(self) -> None:
        """Until no request is live and no step in flight."""
        await self._idle.wait()

    def abort_all(self, error: AioserveError) -> int:
        """End every request with `error`; how many there were."""
        for sequence_id in self._samples:
            self.scheduler.finish(sequence_id)
        self._wake.set()
        return self._end_all(FinishReason.ABORT, error)

    def stop(self) -> None:
        """End `run` once the steps in flight are done."""
        self._stopping = True
        self._wake.set()

    # -- the loop

    async def run(self) -> None:
        """Serve until `stop`. A bug here ends every request with an error, and the loop; what ends
        the program, Ctrl-C say, does so too and goes on to whoever runs the event loop."""
        try:
            await self._serve()
        except asyncio.CancelledError as error:
            self.failure = error
            self._end_all(FinishReason.ERROR, EngineError("the engine's task was cancelled"))
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            self.failure = error
            ended = EngineError(f"the engine was ended by {type(error).__name__}")
            self._end_all(FinishReason.ERROR, ended)
            raise
        except BaseException as error:
            logger.exception("the core loop failed")
            self.failure = error
            failed = _caused(EngineError("the engine failed; see its log"), error)
            self._end_all(FinishReason.ERROR, failed)
        finally:
            self._ended = True
            try:
                self.notices.tell()
            finally:
                self._idle.set()

    async def _serve(self) -> None:
        scheduler, in_flight = self.scheduler, self._in_flight
        while True:
            self._drain_inbox()
            plan = None if self._stopping else scheduler.plan(self._loop.time())
            self._deliver(scheduler.take_rejected())
            if plan is not None:
                in_flight.append((plan, self._launch(plan)))
            if in_flight and (plan is None or len(in_flight) == self._max_in_flight):
                await self._finish_step(*in_flight.popleft())
            elif plan is None:
                if self._stopping:
                    return
                self.notices.tell()
                if not self._requests and not self._inbox:
                    self._idle.set()
                self._asleep = True
                await self._wake.wait()
                self._asleep = False
                self._progress_seconds = self._loop.time()
            self._wake.clear()

    def _drain_inbox(self) -> None:
        while self._left:
            request = self._requests.get(self._left.popleft())
            if request is not None:
                self._drop(request)
        while self._inbox:
            entry = self._inbox[0]
            if entry.mailbox.finish_reason is not None:
                self._inbox.popleft()
                self._free_id(entry.mailbox)
                continue
            self._register(entry)
            # Only now: until a request is registered, the inbox is where a failing loop finds it.
            self._inbox.popleft()

    def _register(self, entry: Submission) -> None:
        sequence_ids = self.scheduler.submit(
            entry.mailbox.request_id,
            entry.prompt_ids,
            entry.params,
            seed=entry.seed,
            end_ids=entry.end_ids,
            max_length=entry.max_length,
            now_seconds=entry.mailbox.started_seconds,
            namespace=entry.namespace,
            tenant=entry.info.tenant,
            ttft_target_seconds=entry.info.ttft_target_seconds,
            tpot_target_seconds=entry.info.tpot_target_seconds,
        )
        self.notices.arrived(entry.info)
        request = LiveRequest(entry.mailbox, entry.info)
        for index, sequence_id in enumerate(sequence_ids):
            sample = LiveSample(request, index, sequence_id, entry.assemblers[index])
            request.samples.append(sample)
            self._samples[sequence_id] = sample
        self._requests[entry.mailbox] = request

    def _launch(self, plan: StepPlan) -> Awaitable[StepOutcome]:
        try:
            return self.runner.launch(plan)
        except Exception as error:
            failed: asyncio.Future[StepOutcome] = self._loop.create_future()
            failed.set_exception(error)
            return failed

    async def _finish_step(self, plan: StepPlan, handle: Awaitable[StepOutcome]) -> None:
        failed = False
        try:
            outcome = await handle
        except Exception as error:
            failed = True
            logger.exception("step %d failed; its %d sequences end", plan.step, len(plan.items))
            self._deliver(self.scheduler.fail(plan, repr(error)), step_error=error)
        else:
            self._deliver(self.scheduler.commit(plan, outcome, self._loop.time()))
        self._progress_seconds = self._loop.time()
        self.notices.tell_of_step(
            plan,
            failed=failed,
            now_seconds=self._progress_seconds,
            num_waiting=self.num_waiting,
        )

    # -- delivery

    def _deliver(self, progress: list[Progress], step_error: BaseException | None = None) -> None:
        for entry in progress:
            # Unknown: its request ended, perhaps by what this very step brought another sample.
            sample = self._samples.get(entry.sequence_id)
            if sample is None:
                continue
            if entry.rejected:
                request_id = sample.request.mailbox.request_id
                refused = f"the policy {self.scheduler.guard.name} refused request {request_id!r}"
                reason = "" if entry.error is None else f": {entry.error}"
                self._fail(sample.request, RequestRejectedError(refused + reason))
            elif step_error is not None:
                error = StepError(f"the step of this request failed: {entry.error}")
                self._fail(sample.request, _caused(error, step_error))
            elif entry.token_id is None:
                self._fail(sample.request, RequestFailedError(str(entry.error)))
            else:
                self._deliver_token(sample, entry.token_id, entry.finish_reason)

    def _deliver_token(
        self, sample: LiveSample, token_id: int, reason: FinishReason | None
    ) -> None:
        try:
            text, stopped = sample.assembler.push(token_id)
            if reason is not None and not stopped:
                text += sample.assembler.finish()
                if sample.assembler.matched_stop is not None:
                    reason = FinishReason.STOP
        except Exception as error:
            failed = RequestFailedError(f"token {token_id} can't be turned into text: {error}")
            self._fail(sample.request, _caused(failed, error))
            return
        sample.request.mailbox.put(Token(token_id, text, sample.num_delivered, sample.index))
        sample.num_delivered += 1
        if stopped:
            self.scheduler.finish(sample.sequence_id)
            reason = FinishReason.STOP
        if reason is not None:
            self._end(sample, reason)

    def _end(self, sample: LiveSample, reason: FinishReason) -> None:
        """A sample came to its own end, and with the last one its request."""
        request = sample.request
        del self._samples[sample.sequence_id]
        request.samples.remove(sample)
        request.mailbox.finish_sample(sample.index, reason)
        if not request.samples:
            self._forget(request)

    def _fail(self, request: LiveRequest, error: AioserveError) -> None:
        """What goes wrong in one sample ends its request."""
        self._drop(request)
        request.mailbox.finish(FinishReason.ERROR, error)

    def _drop(self, request: LiveRequest) -> None:
        """Compute no more of a request."""
        for sample in request.samples:
            self.scheduler.finish(sample.sequence_id)
        self._forget(request)

    def _forget(self, request: LiveRequest) -> None:
        for sample in request.samples:
            del self._samples[sample.sequence_id]
        del self._requests[request.mailbox]
        self.notices.ended(request.info, request.mailbox)
        self._free_id(request.mailbox)
        if request.stall_timer is not None:
            request.stall_timer.cancel()

    def _end_all(self, reason: FinishReason, error: AioserveError) -> int:
        ended = 0
        for request in list(self._requests.values()):
            self._forget(request)
            ended += request.mailbox.finish(reason, _copied(error))
        while self._inbox:
            mailbox = self._inbox.popleft().mailbox
            self._free_id(mailbox)
            ended += mailbox.finish(reason, _copied(error))
        return ended

    def _free_id(self, mailbox: Mailbox) -> None:
        # The id may be another request's by now.
        if self._live.get(mailbox.request_id) is mailbox:
            del self._live[mailbox.request_id]

    # -- readers

    def _reader_left(self, mailbox: Mailbox) -> None:
        self._free_id(mailbox)
        self._left.append(mailbox)
        self._wake.set()

    def _pause(self, mailbox: Mailbox) -> None:
        request = self._requests.get(mailbox)
        if request is None:
            return
        for sample in request.samples:
            self.scheduler.pause(sample.sequence_id)
        self._watch_stall(request, mailbox.taken)

    def _resume(self, mailbox: Mailbox) -> None:
        request = self._requests.get(mailbox)
        if request is None:
            return
        for sample in request.samples:
            self.scheduler.resume(sample.sequence_id)
        if request.stall_timer is not None:
            request.stall_timer.cancel()
        self._wake.set()

    def _watch_stall(self, request: LiveRequest, taken_before: int) -> None:
        request.stall_timer = self._loop.call_later(
            self._stall_timeout_seconds, self._check_stall, request, taken_before
        )

    def _check_stall(self, request: LiveRequest, taken_before: int) -> None:
        mailbox = request.mailbox
        if mailbox.taken != taken_before:
            self._watch_stall(request, mailbox.taken)
            return
        error = StreamStalledError(
            f"request {mailbox.request_id!r}: its reader took no token for "
            f"{self._stall_timeout_seconds:g} s (stall_timeout_seconds)"
        )
        mailbox.finish(FinishReason.ABORT, error)
        self._reader_left(mailbox)


def _caused(error: AioserveError, cause: BaseException) -> AioserveError:
    error.__cause__ = cause
    return error


def _copied(error: AioserveError) -> AioserveError:
    """One exception object for each reader: raising it ties it to that reader's frames."""
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__
    return copy
