"""The mechanism: turns requests into step plans, and outcomes into tokens and ends.

    submit ──► plan ──► (a runner computes the step) ──► commit, or fail

Steps may overlap: a step can be planned while others run. They are committed in the order in which
they were planned. `aioserve.scheduling.state` says where sequences are meanwhile, the planner
chooses what goes into a step, and `aioserve.scheduling.recovery` says what happens when something
fails.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from aioserve.errors import InvariantError
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
"""In a row: the next one is raised. Whatever it is, it is no matter of single requests."""
MAX_UNEXPLAINED_FAILURES = 3
"""In a row, and at no sequence: the next one is raised, since nothing is left to try."""


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
        """`clock` gives seconds; with one, a policy whose methods take long is named in the log.
        `policy_name` stands in logs and errors, that of its class unless given. A step scores at
        most `max_scored_tokens` tokens of prompts."""
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
        """Slots that its plans may name."""
        return SLOTS_PER_SEQUENCE * self.state.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self.state.queue)

    @property
    def num_running(self) -> int:
        return len(self.state.running)

    # -- requests come and go

    def submit(self, request: Request) -> tuple[int, ...]:
        """Queue a sequence for each of the request's samples and return their ids.

        The request must fit the pool when it runs alone, prompt and longest answer together: that
        every run ends rests on it. Raises `InvariantError` otherwise; the edge refuses such
        requests.
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
        """The account of the request that a sequence belongs to. The sequence hasn't ended. The
        account is kept up to date until no step that the request was in is in flight."""
        return self.state.sequences[sequence_id].account

    def finish(self, sequence_id: int) -> None:
        """End a sequence from outside (cancelled, stop string found), and the pending samples that
        depend on it. Unknown ids are ignored, so that a cancel may cross the natural end. Tokens
        still in flight are dropped at commit."""
        sequence = self.state.sequences.get(sequence_id)
        if sequence is not None:
            self.state.end([sequence])

    def num_known(self, sequence_id: int) -> int:
        """Tokens of a live sequence that are known, those of its prompt included; raises KeyError
        for another."""
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
        """A mask can be had for what comes next in a sequence whose request asks for structured
        output, behind the `forced` tokens, which are taken without being sampled. Where steps in
        flight sample some of these, they bring nothing new. Unknown ids are ignored. The first
        token of an answer is always sampled: before it, samples share what they have.

        Where the forced tokens are to be `drawn`, steps draw several of them at once, since there
        are masks for all."""
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
        """Rows of a step in flight that are drawn from under a mask: index, sequence, and position
        of the token."""
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
        """No more requests come: nothing is kept for them."""
        self.state.pins.end_all()

    # -- one step

    def plan(self, now_seconds: float) -> StepPlan | None:
        """What to compute next; None when nothing can be computed now.

        An exception in here, which is a bug, ends the request that was being planned and no other.
        One that comes while none is ends none. The fourth such in a row is raised, and so is the
        seventeenth of any kind.
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
                    attempt += 1  # what is left may have work, and is asked for by no other
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
        """Sequences that have ended, since the last call, before anything of them was planned: the
        policy refused them, or planning them failed."""
        ended, self.state.ended_unplanned = self.state.ended_unplanned, []
        return ended

    def not_launched(self, plan: StepPlan) -> None:
        """No runner heard of `plan`, the last one: it is about to fail."""
        self.state.slots.repeat_changes(plan)

    def charge(self, plan: StepPlan, step_seconds: float) -> None:
        """Share out the time of a step in flight by the tokens of those in it, whatever came of it:
        to be called once, before its `commit` or `fail`."""
        self.state.times.took(plan, step_seconds)
        self._step_seconds = step_seconds
        token_seconds = step_seconds / plan.num_tokens
        for run, item, _ in self.state.in_flight[plan.step]:
            count, num_rows = item.count, len(item.rows)
            # An item with several rows has as many entries, all of one request.
            share = count / num_rows if num_rows > 1 else count
            run.sequence.account.device_seconds += token_seconds * share

    def commit(
        self, plan: StepPlan, outcome: StepOutcome, now_seconds: float
    ) -> list[SequenceUpdate]:
        """Take in what a step produced, in the order in which steps were planned.

        Raises `InvariantError` for another order, `UnfitOutcomeError` for the outcome of another
        step, and has then changed nothing.
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
        """A step failed as a whole: end the sequences in it. Those planned since that took over
        what it should have written begin again; all others go on. The order is that of `commit`."""
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
