"""Delivery of the scheduler's updates to readers: text, mailboxes, ends, and readers too slow.

Everything here concerns one request at a time. An error in one ends only that one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from aioserve.engine.mailbox import ReaderEvent
from aioserve.engine.observer_events import ObserverEvents
from aioserve.engine.params_intake import no_token_left
from aioserve.engine.requests import (
    MAX_HANDLED_AT_ONCE,
    LiveRequest,
    LiveSample,
    RequestState,
    RequestTable,
)
from aioserve.errors import (
    AioserveError,
    DeadlineExceededError,
    RequestFailedError,
    RequestRejectedError,
    StepError,
    StreamStalledError,
)
from aioserve.request import FinishReason, Token
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.steps.plan import NO_TOKEN_LEFT

__all__ = ["Delivery"]


class Delivery:
    """Brings a scheduler's updates to the readers of one engine, and tells the scheduler of
    readers.

    `wake` is called when the core loop has something to do. `note` is called with each token drawn
    for a constrained completion that goes on.
    """

    def __init__(
        self,
        table: RequestTable,
        scheduler: Scheduler,
        observer_events: ObserverEvents,
        *,
        stall_timeout_seconds: float,
        wake: Callable[[], None],
        note: Callable[[LiveSample, int], None],
    ) -> None:
        self._table = table
        self._scheduler = scheduler
        self._observer_events = observer_events
        self._stall_timeout_seconds = stall_timeout_seconds
        self._wake = wake
        self._note = note
        self._loop = asyncio.get_running_loop()

    # -- to the readers

    def deliver(
        self, updates: Sequence[SequenceUpdate], step_error: StepError | None = None
    ) -> None:
        """Deliver updates in order. `step_error` is the error for requests whose step failed."""
        for number, update in enumerate(updates):
            # Not found: its request ended, perhaps by what this step brought another sample.
            sample = self._table.samples.get(update.sequence_id)
            if sample is None:
                continue
            if update.token_id is not None:
                if self._deliver_token(sample, update.token_id, update):
                    self._disregard(sample, updates[number + 1 :])
            elif update.scored:
                scored = [sample.assembler.with_texts(each) for each in update.scored]
                sample.request.mailbox.put_scored(scored, update.scored_before)
            elif update.finish_reason is FinishReason.LENGTH:
                self._deliver_look(sample, update)
            else:
                self.fail(sample.request, self._error_of(update, sample.request, step_error))

    def _error_of(
        self, update: SequenceUpdate, request: LiveRequest, step_error: StepError | None
    ) -> AioserveError:
        if update.rejected:
            policy = self._scheduler.policy_calls.name
            refused = f"the policy {policy} refused request {request.request_id!r}"
            return RequestRejectedError(
                refused if update.error is None else f"{refused}: {update.error}",
                refused_by=policy,
                reason=update.error,
                retry_after_seconds=update.retry_after_seconds,
            )
        if step_error is not None:
            return step_error
        if update.cause is not None:
            error = RequestFailedError(f"the step of this request can't be planned: {update.error}")
            return error.with_cause(update.cause)
        if update.error == NO_TOKEN_LEFT and request.request is not None:
            refused = no_token_left(request.request.params)
            if refused is not None:
                return refused
            return RequestFailedError("the model's logits leave no token to draw")
        return RequestFailedError(str(update.error))

    def _disregard(self, sample: LiveSample, updates: Sequence[SequenceUpdate]) -> None:
        """Uncount tokens that a step drew after the token that completed a stop string.

        They are not part of the completion, and accepted draft tokens among them were of no use.
        """
        drawn = [one for one in updates if one.sequence_id == sample.sequence_id and not one.forced]
        self._scheduler.counters.tokens_generated -= len(drawn)
        constrained = sample.constrained
        if constrained is None or constrained.num_forced_behind(sample.num_delivered) < 0:
            sample.mailbox.account.accepted_tokens -= len(drawn)

    def _deliver_token(self, sample: LiveSample, token_id: int, update: SequenceUpdate) -> bool:
        """Deliver a token; return True if it completed a stop string."""
        reason, assembler = update.finish_reason, sample.assembler
        is_end = reason is FinishReason.STOP and sample.request.ends_with(token_id)
        try:
            text, stopped = assembler.push(token_id, is_end=is_end)
            if reason is not None and not stopped:
                text += assembler.finish()
            if (logprobs := update.logprobs) is not None:
                logprobs = assembler.with_texts(logprobs)
        except Exception as error:
            failed = RequestFailedError(f"token {token_id} can't be turned into text: {error}")
            self.fail(sample.request, failed.with_cause(error))
            return False
        index = sample.num_delivered
        place = sample.mailbox.first_index + index
        marks = assembler.marks_in(text) if assembler.shown else ()
        sample.mailbox.put(Token(token_id, text, place, sample.index, logprobs, marks))
        if index == 0:
            self._table.begin(sample.request)
        sample.num_delivered = index + 1
        if stopped:
            self._scheduler.finish(sample.sequence_id)
        if assembler.matched_stop is not None:
            self._end_sample(sample, FinishReason.STOP, assembler.matched_stop)
        elif reason is not None:
            named = is_end and sample.request.names_stop(token_id)
            self._end_sample(sample, reason, token_id if named else None)
        elif sample.matcher is not None and not update.forced:
            self._note(sample, token_id)
        return stopped

    def _deliver_look(self, sample: LiveSample, update: SequenceUpdate) -> None:
        """Deliver results for the prompt itself: a request without completion has ended."""
        sample.request.mailbox.pooled = update.pooled
        self._table.begin(sample.request)
        self._end_sample(sample, FinishReason.LENGTH, None)

    def _end_sample(
        self, sample: LiveSample, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """End a sample, and with the last one its request."""
        was_last = self._table.end_sample(sample)
        sample.request.mailbox.finish_sample(sample.index, reason, stop_reason)
        if was_last:
            self._end(sample.request)

    # -- the ends of requests

    def fail(self, request: LiveRequest, error: AioserveError) -> None:
        """End a request with an error, all of its samples included."""
        self.drop(request)
        request.mailbox.finish(FinishReason.ERROR, error)

    def drop(self, request: LiveRequest) -> None:
        """Compute no more of a request."""
        for sample in request.samples:
            self._scheduler.finish(sample.sequence_id)
        self._end(request)

    async def abort_all(self, error: AioserveError) -> int:
        """End all present requests with `error`; return their number.

        Yield to the event loop now and then, since there may be thousands.
        """
        ended = 0
        for handled, request in enumerate(list(self._table), 1):
            self.drop(request)
            ended += request.mailbox.finish(FinishReason.ABORT, error)
            if handled % MAX_HANDLED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._wake()
        return ended

    def end_all(self, reason: FinishReason, error: AioserveError) -> int:
        """End every encoded request without telling the scheduler; return their number."""
        ended = 0
        for request in self._table:
            if request.state is not RequestState.ENCODING:
                self._end(request)
                ended += request.mailbox.finish(reason, error)
        return ended

    def _end(self, request: LiveRequest) -> None:
        if request.state in (RequestState.RUNNING, RequestState.LEAVING):
            self._observer_events.ended(request)
        self._table.end(request)

    # -- from the readers

    def reader_did(self, request: LiveRequest, event: ReaderEvent) -> None:
        """Handle an event of a reader. A reader may leave at any moment, perhaps from within the
        garbage collector, so the core loop tells the scheduler later."""
        if event is ReaderEvent.LEFT:
            self._table.leave(request)
            self._wake()
        elif request.state is not RequestState.RUNNING:
            return
        elif event is ReaderEvent.FELL_BEHIND:
            for sample in request.samples:
                self._scheduler.pause(sample.sequence_id)
            self._watch_stall(request, request.mailbox.taken)
        else:
            for sample in request.samples:
                self._scheduler.resume(sample.sequence_id)
            if request.stall_timer is not None:
                request.stall_timer.cancel()
            self._wake()

    # -- deadlines and stalls

    def watch_deadline(self, request: LiveRequest, deadline_seconds: float | None) -> None:
        """End a new request `deadline_seconds` after its submission, whatever its state."""
        if deadline_seconds is not None:
            at = request.mailbox.started_seconds + deadline_seconds
            request.deadline_timer = self._loop.call_at(at, self._expire, request, deadline_seconds)

    def _expire(self, request: LiveRequest, deadline_seconds: float) -> None:
        error = DeadlineExceededError(
            f"request {request.request_id!r} hadn't ended {deadline_seconds:g} s after it was sent "
            "(deadline_seconds)",
            deadline_seconds=deadline_seconds,
        )
        request.mailbox.finish(FinishReason.ABORT, error)
        self.reader_did(request, ReaderEvent.LEFT)

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
            f"{self._stall_timeout_seconds:g} s (stall_timeout_seconds)",
            timeout_seconds=self._stall_timeout_seconds,
        )
        mailbox.finish(FinishReason.ABORT, error)
        self.reader_did(request, ReaderEvent.LEFT)
