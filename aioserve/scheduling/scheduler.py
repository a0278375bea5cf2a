"""Scheduler: turn requests into step plans, and outcomes into tokens and ends.

    submit ──► plan ──► (a runner computes the step) ──► commit, or fail

Steps may overlap: a step can be planned while others run. They are committed in the order in which
they were planned. `aioserve.scheduling.state` tracks where sequences are meanwhile. The planner
chooses the work of a step, and `aioserve.scheduling.recovery` handles failures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aioserve.errors import InvariantError
from aioserve.kv.filling import num_empty_slots
from aioserve.kv.memory import KVMemory
from aioserve.request import Request
from aioserve.scheduling.account import RequestAccount
from aioserve.scheduling.parts.base import DoneStep
from aioserve.scheduling.planner import fill
from aioserve.scheduling.policy import SchedulingPolicy
from aioserve.scheduling.policy_calls import PolicyCalls
from aioserve.scheduling.recovery import (
    after_bad_rows,
    after_failed_planning,
    after_failed_step,
    after_late_rows,
    draw_again,
)
from aioserve.scheduling.sanity import check_state
from aioserve.scheduling.sequence import Run
from aioserve.scheduling.state import SLOTS_PER_SEQUENCE, SchedulerState
from aioserve.scheduling.step_builder import StepBuilder
from aioserve.scheduling.updates import SchedulerCounters, SequenceUpdate
from aioserve.steps.outcome import StepOutcome, check_outcome
from aioserve.steps.plan import MAX_SCORED_TOKENS, ItemKind, StepPlan, WorkItem

__all__ = ["Scheduler"]

logger: logging.Logger = logging.getLogger(__name__)

MAX_PLANNING_FAILURES = 16
"""Most planning failures in a row. The next one is raised: single requests can't be the cause."""
MAX_UNEXPLAINED_FAILURES = 3
"""Most planning failures in a row outside of any sequence. The next one is raised, since no
sequence is left to end."""


class Scheduler:
    """Owns every sequence and, through its memory, every page. Not thread-safe; never blocks."""

    def __init__(
        self,
        memory: KVMemory,
        policy: SchedulingPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        output_reserve_tokens: int,
        clock: Callable[[], float] | None = None,
        policy_name: str | None = None,
        max_scored_tokens: int = MAX_SCORED_TOKENS,
    ) -> None:
        """`clock` returns seconds. With a clock, policy methods that take long are named in the
        log. Logs and errors show `policy_name`, by default the name of the policy's class. A step
        scores at most `max_scored_tokens` prompt tokens."""
        self.memory = memory
        self.policy_calls: PolicyCalls = PolicyCalls(policy, clock, name=policy_name)
        self.state: SchedulerState = SchedulerState(
            memory,
            self.policy_calls,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_scored_tokens=max_scored_tokens,
            output_reserve_tokens=output_reserve_tokens,
        )
        self._step_seconds = 0.0
        self._planning_failures = 0
        self._unexplained_failures = 0

    @property
    def counters(self) -> SchedulerCounters:
        return self.state.counters

    @property
    def num_slots(self) -> int:
        """Number of slots that plans may name."""
        return SLOTS_PER_SEQUENCE * self.state.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self.state.queue)

    @property
    def num_running(self) -> int:
        return len(self.state.running)

    @property
    def num_empty_slots(self) -> int:
        """Token slots without an entry in pages of sequences."""
        leases = [sequence.lease for sequence in self.state.sequences.values()]
        return num_empty_slots(leases, self.memory.page_size)

    # -- requests come and go

    def submit(self, request: Request) -> tuple[int, ...]:
        """Queue a sequence for each of the request's samples and return their ids.

        The request must fit the pool when it runs alone, prompt and longest completion together.
        The guarantee that every run ends rests on this. Raises `InvariantError` otherwise; the edge
        refuses such a request before.
        """
        fits, prompt_tokens = self.memory.capacity_tokens, request.prompt_tokens
        if not 0 < prompt_tokens < request.max_length <= fits:
            raise InvariantError(
                f"prompt of {prompt_tokens} tokens, max_length {request.max_length}: need "
                f"0 < prompt < max_length <= {fits} tokens of KV cache"
            )
        if request.num_samples > self.state.max_num_seqs:
            raise InvariantError(
                f"n={request.num_samples} of at most {self.state.max_num_seqs} sequences"
            )
        return self.state.enter(request)

    def account_of(self, sequence_id: int) -> RequestAccount:
        """Account of the request that a live sequence belongs to. It is kept up to date until no
        step with the request is in flight."""
        return self.state.sequences[sequence_id].account

    def finish(self, sequence_id: int) -> None:
        """End a sequence from outside (cancelled, stop string found), and the pending samples that
        depend on it. Tokens still in flight are dropped at commit.

        Unknown ids are ignored, because a cancel may cross the natural end.
        """
        sequence = self.state.sequences.get(sequence_id)
        if sequence is not None:
            self.state.end([sequence])

    def num_known(self, sequence_id: int) -> int:
        """Known tokens of a live sequence, its prompt included. Raises KeyError for other ids."""
        return self.state.sequences[sequence_id].num_known

    def pause(self, sequence_id: int) -> None:
        """Plan no more work for a sequence whose reader is behind."""
        if sequence_id in self.state.sequences:
            self.state.pause(self.state.sequences[sequence_id])

    def resume(self, sequence_id: int) -> None:
        if sequence_id in self.state.sequences:
            self.state.sequences[sequence_id].paused = False

    def guide(
        self, sequence_id: int, forced: Sequence[int] = (), *, drawn: bool = False
    ) -> list[SequenceUpdate]:
        """Tell that a mask can be made for the next token of a constrained sequence, after the
        `forced` tokens.

        Forced tokens are appended without being sampled, and returned as updates. Steps in flight
        that sample some of them bring nothing new. With `drawn`, steps draw the forced tokens
        instead, several at once, since there are masks for all.

        Unknown ids are ignored. Raises `InvariantError` for forced tokens before the first one of a
        completion: that one is always sampled, because samples share what they have before it.
        """
        sequence = self.state.sequences.get(sequence_id)
        if sequence is None:
            return []
        has_begun = sequence.num_known > sequence.prompt_tokens
        if not sequence.constrained or (forced and not has_begun):
            raise InvariantError(f"{sequence} can't be constrained to {len(forced)} tokens now")
        updates: list[SequenceUpdate] = []
        sequence.forced_ids = tuple(forced) if drawn else ()
        if drawn:
            self.state.forced[sequence] = None
        for token_id in () if drawn else forced:
            if sequence.pending:
                sequence.pending -= 1
                sequence.forced_in_flight += 1
            reason = sequence.append(token_id)
            updates.append(SequenceUpdate(sequence_id, token_id, reason, forced=True))
            if reason is not None:
                self.state.end([sequence])
                break
        sequence.masked_to = sequence.num_known + len(sequence.forced_ids)
        draw_again(self.state, sequence)
        self.state.counters.tokens_generated += len(updates)
        return updates

    def masked_rows(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """Masked rows of a step in flight: index, sequence id, and position of the token."""
        return [
            (
                row,
                run.sequence.sequence_id,
                item.start + 1 if item.kind is ItemKind.VERIFY else item.end,
            )
            for row, (run, item) in enumerate(self._rows_in_flight(plan))
            if run.sequence.constrained
        ]

    def dropped_rows(self, plan: StepPlan) -> list[int]:
        """Indices of rows of a step in flight whose tokens will be dropped."""
        rows = self._rows_in_flight(plan)
        return [row for row, (run, _) in enumerate(rows) if not run.goes_on]

    def _rows_in_flight(self, plan: StepPlan) -> list[tuple[Run, WorkItem]]:
        return [(run, item) for run, item, _ in self.state.in_flight[plan.step] if item.rows]

    def end_pins(self) -> None:
        """End all pins, since no more requests come."""
        self.state.pins.end_all()

    # -- one step

    def plan(self, now_seconds: float) -> StepPlan | None:
        """Plan the next step; None when nothing can be computed now.

        An exception while planning is a bug. It ends the request that was being planned and no
        other; if it came between requests, it ends none. The fourth in a row between requests is
        raised, and so is the seventeenth of any kind.
        """
        state = self.state
        attempt = 0
        while True:
            step = None
            try:
                if attempt == 0:
                    self.policy_calls.begin_step()
                if state.arrived:
                    state.tell_arrivals()
                if state.running or len(state.queue) or self.policy_calls.acts_on_running:
                    step = StepBuilder(state, now_seconds)
                    fill(step)
                self._planning_failures = self._unexplained_failures = 0
            except Exception as error:
                self._recover(step, error)
                if step is None or not step.entries:
                    attempt += 1  # other requests may have work
                    continue
            if step is None:
                return None
            try:
                return step.plan()
            except Exception:
                logger.exception("step %d can't be built; it is tried once more", step.number)
                return step.plan()

    def _recover(self, step: StepBuilder | None, error: Exception) -> None:
        ended = [] if step is None else after_failed_planning(self.state, step, error)
        lost = {update.sequence_id for update in ended}
        told = [u for u in self.state.ended_unplanned if u.sequence_id not in lost]
        self.state.ended_unplanned = [*told, *ended]
        self._planning_failures += 1
        self._unexplained_failures = 0 if ended else self._unexplained_failures + 1
        if (
            self._planning_failures > MAX_PLANNING_FAILURES
            or self._unexplained_failures > MAX_UNEXPLAINED_FAILURES
        ):
            raise error

    def take_ended_unplanned(self) -> list[SequenceUpdate]:
        """Ends since the last call that no commit reports: the policy refused or dropped the
        request, or planning it failed."""
        ended, self.state.ended_unplanned = self.state.ended_unplanned, []
        return ended

    def not_launched(self, plan: StepPlan) -> None:
        """Take back the slot changes of `plan`, the last one, since no runner heard of it. The step
        is about to fail."""
        self.state.slots.repeat_changes(plan)

    def charge(self, plan: StepPlan, step_seconds: float) -> None:
        """Share out the seconds of a step in flight among its sequences, by their tokens. Call it
        once, before `commit` or `fail` of the step."""
        self.state.times.record(plan, step_seconds)
        self._step_seconds = step_seconds
        token_seconds = step_seconds / plan.num_tokens
        for run, item, _ in self.state.in_flight[plan.step]:
            count, num_rows = item.count, len(item.rows)
            # An item with several rows has one entry per row, all of one request.
            share = count / num_rows if num_rows > 1 else count
            run.sequence.account.device_seconds += token_seconds * share

    def commit(
        self, plan: StepPlan, outcome: StepOutcome, now_seconds: float
    ) -> list[SequenceUpdate]:
        """Take in the outcome of the oldest step in flight.

        Raises `InvariantError` for a step out of order and `UnfitOutcomeError` for the outcome of
        another step. Neither changes anything.
        """
        state = self.state
        check_outcome(plan, outcome)
        self._check_order(plan)
        state.complete(plan.step)
        entries, parts = state.in_flight.pop(plan.step), state.parts_in_flight.pop(plan.step)
        is_plain = plan.num_decodes == len(plan.items)
        step = DoneStep(
            plan=plan,
            outcome=outcome,
            now_seconds=now_seconds,
            seconds=self._step_seconds,
            entries=entries,
            rows=entries if is_plain else [entry for entry in entries if entry[1].rows],
            memory=self.memory,
            counters=state.counters,
            speculation=state.speculation,
        )
        self._step_seconds = 0.0
        for part in parts:
            part.take(step)
        if step.ended:
            state.end(step.ended)
        if step.broken:
            step.updates += after_bad_rows(state, step.broken)
        if step.late:
            after_late_rows(state, step.late)
        self.policy_calls.step_finished(plan.step, plan.num_tokens)
        return step.updates

    def fail(self, plan: StepPlan, error: str) -> list[SequenceUpdate]:
        """End the sequences in a step that failed as a whole. Sequences planned since that took
        over what it should have written begin again; all others go on. Steps fail in the same order
        as they commit."""
        self._check_order(plan)
        self.state.times.failed(plan)
        ended = after_failed_step(self.state, plan.step, error)
        self.policy_calls.step_finished(plan.step, plan.num_tokens)
        return ended

    def _check_order(self, plan: StepPlan) -> None:
        done = self.memory.pool.done_step
        if plan.step != done + 1:
            raise InvariantError(f"step {plan.step} is to be done, and the last one is {done}")

    def sanity_check(self) -> None:
        """Raise `InvariantError` unless pools, prefix tree, page tables and queues agree."""
        check_state(self.state)
