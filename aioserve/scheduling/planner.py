"""Builds one step: who decodes, whose prompt goes on, who may begin, and who must make room.

Sequences that run are served before new ones are admitted, decodes first. All pages of a prompt
are taken when it is admitted, so that a prefill never waits half-done for pages; decoding sequences
take one page at a time. When those run out, cached pages are evicted, then younger sequences give
theirs back. The oldest running sequence is never preempted for another and fits alone, so it always
gets to its end, and so does everyone in turn. One whose reader is behind doesn't run: it may be
preempted for anyone, and loses time but no token.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.plan import PENDING_TOKEN, StepPlan, WorkItem
from aioserve.scheduling.memory import Claim
from aioserve.scheduling.policy import Refusal, SchedulerView, Verdict
from aioserve.scheduling.sequence import Phase, SequenceState

if TYPE_CHECKING:
    from aioserve.scheduling.scheduler import Scheduler

__all__ = ["StepPlanner", "by_arrival"]

PENDING_IDS = (PENDING_TOKEN,)

by_arrival = attrgetter("sequence_id")


class StepPlanner:
    """Plans the step after the last one launched, and then is done with."""

    def __init__(self, scheduler: Scheduler, now_seconds: float) -> None:
        self.scheduler = scheduler
        self.memory = scheduler.memory
        self.guard = scheduler.guard
        self.now_seconds = now_seconds
        self.step = scheduler.launched + 1
        self.budget = scheduler.max_num_batched_tokens
        self.items: list[WorkItem] = []
        self.sequences: list[SequenceState] = []
        self._has_preempted = False
        self._reserved: int | None = None

    def plan(self) -> StepPlan | None:
        """The step, with the books of every sequence moved past it; None for an empty one."""
        scheduler = self.scheduler
        decoding, prefilling = self._split_running()
        self._decode(decoding)
        self._continue_prefills(prefilling)
        may_admit = not self._has_preempted and scheduler.waiting and self.budget > 0
        if may_admit and self._admit(forced=False):
            self._displace_a_paused_one()
        if not self.items and scheduler.launched == self.memory.pool.done_step:
            self._force_progress()
            if not self.items:
                self._check_idle()
        if not self.items:
            return None
        scheduler.launched = self.step
        scheduler.in_flight[self.step] = self.sequences
        return StepPlan(
            self.step,
            tuple(self.items),
            scheduler.take_preempted(),
            self.memory.take_copies(),
        )

    # -- those that run

    def _split_running(self) -> tuple[list[SequenceState], list[SequenceState]]:
        """Running sequences with one token to compute, and those with more. Oldest first."""
        decoding: list[SequenceState] = []
        prefilling: list[SequenceState] = []
        for sequence in self.scheduler.running:
            if sequence.paused:
                continue
            reach = sequence.num_known + sequence.pending
            remaining = reach - sequence.computed
            if remaining > 1:
                prefilling.append(sequence)
            elif remaining == 1 and reach < sequence.max_length:
                decoding.append(sequence)
        return decoding, prefilling

    def _decode(self, ready: list[SequenceState]) -> None:
        """A sequence for which no page is left sits this step out: pages that are fenced now are
        free in the next."""
        memory = self.memory
        growing = [s for s in ready[: self.budget] if memory.needs_page(s)]
        needed = memory.num_pages_needed(growing)
        memory.make_free(needed, self.step)
        if needed > memory.pool.num_free:
            self._make_room(growing)
            ready = [s for s in ready if s.phase is Phase.RUNNING]
            # Some that were beyond the budget may be within it now.
            growing = ready
        # A large batch asks once: in the course of this no sequence comes to need a page.
        may_grow = set(growing)
        for sequence in ready[: self.budget]:
            needs_page = sequence in may_grow and memory.needs_page(sequence)
            if not needs_page or memory.grow(sequence, self.step):
                self._launch(sequence, 1)

    def _make_room(self, growing: list[SequenceState]) -> None:
        """Preempt until every growing sequence can have its page, now or after the step in flight.

        Counts what comes back, not what is held: fenced pages of a victim are on their way.
        """
        scheduler, memory = self.scheduler, self.memory
        while True:
            growing = [s for s in growing if s.phase is Phase.RUNNING]
            ending = sum(memory.num_reclaimable(s) for s in scheduler.running if s.exhausted)
            coming = memory.num_available + memory.pool.num_fenced + ending
            short = memory.num_pages_needed(growing) - coming
            if short <= 0:
                return
            oldest = growing[0].sequence_id
            candidates = [
                s.view
                for s in scheduler.running
                if (s.sequence_id > oldest or s.paused) and not s.exhausted
            ]
            if not candidates:
                return
            chosen = self.guard.victim(candidates, short, self._view())
            self._preempt(chosen._state)

    def _preempt(self, victim: SequenceState) -> None:
        self.scheduler.preempt(victim, self.step)
        self._has_preempted = True

    def _displace_a_paused_one(self) -> bool:
        """Others wait for room: the youngest sequence whose reader is behind makes some, so that a
        slow reader holds up nobody but itself."""
        for sequence in reversed(self.scheduler.running):
            in_this_step = sequence.last_step == self.step  # a sample that has just begun
            if sequence.paused and not sequence.exhausted and not in_this_step:
                self._preempt(sequence)
                return True
        return False

    def _continue_prefills(self, prefilling: list[SequenceState]) -> None:
        """Next chunks of prompts that have begun, and were not just preempted."""
        prefilling = [s for s in prefilling if s.phase is Phase.RUNNING]
        if not prefilling or self.budget <= 0:
            return
        view = self._view()
        for sequence in prefilling:
            if self.budget <= 0:
                break
            count = self.guard.chunk(sequence.view, min(sequence.remaining, self.budget), view)
            if count:
                self._launch(sequence, count)

    # -- those that wait

    def _admit(self, *, forced: bool) -> bool:
        """Start waiting sequences in the policy's order while seats, budget and pages last.

        Returns whether nothing was started for want of room.
        """
        scheduler, memory = self.scheduler, self.memory
        seats = scheduler.num_seats_free
        if seats <= 0:
            return any(not s.paused for s in scheduler.waiting)
        view = self._view()
        waiting = [s.view for s in scheduler.waiting if not s.paused]
        refused: list[tuple[SequenceState, str | None]] = []
        started = 0
        blocked = False
        for request in waiting if forced else self.guard.order(waiting, view):
            sequence = request._state
            if len(sequence.unborn) >= seats:
                blocked = not started
                break
            verdict = Verdict.NOW if forced else self.guard.admit(request, view)
            if isinstance(verdict, Refusal):
                refused.append((sequence, verdict.reason))
            elif verdict is Verdict.NEVER:
                refused.append((sequence, None))
            if verdict is not Verdict.NOW:
                continue
            ahead = scheduler.reserve.pages_ahead(sequence)
            claim = memory.claim(sequence)
            if not self._fits(claim, ahead):
                claim = memory.without_tail(sequence, claim)
            if not self._fits(claim, ahead):
                memory.drop(claim)
                blocked = not started
                break
            count = min(sequence.remaining - claim.num_cached, self.budget)
            if not forced:
                count = self.guard.chunk(request, count, view)
            if count == 0:
                memory.drop(claim)
                continue
            if not memory.take(sequence, claim, self.step):
                blocked = not started
                break
            self._reserved = self._pages_reserved() + ahead
            scheduler.start(sequence)
            self._launch(sequence, count)
            started += 1
            seats = scheduler.num_seats_free
            if forced or self.budget <= 0 or seats <= 0:
                break
        if started:
            scheduler.waiting = [s for s in scheduler.waiting if s.phase is Phase.WAITING]
        scheduler.reject(refused)
        return blocked

    def _fits(self, claim: Claim, pages_ahead: int) -> bool:
        """Whether there is memory for what a sequence claims and for the answers of all that run.
        One that is alone may have all of it."""
        room = self.memory.num_available - claim.num_new_pages
        if room < 0:
            return False
        alone = not self.scheduler.running and not self.memory.pool.num_fenced
        return alone or pages_ahead + self._pages_reserved() <= room

    def _pages_reserved(self) -> int:
        if self._reserved is None:
            running = self.scheduler.running
            self._reserved = self.scheduler.reserve.total(s for s in running if not s.paused)
        return self._reserved

    def _force_progress(self) -> None:
        """Nothing is in flight and nothing was chosen: go on with the oldest sequence, whatever the
        policy says, so that an engine with work never stands still."""
        for sequence in self.scheduler.running:
            if not sequence.paused and sequence.remaining > 1:
                self._launch(sequence, min(sequence.remaining, self.budget))
                return
        while self._admit(forced=True):
            if not self._displace_a_paused_one():
                break

    def _check_idle(self) -> None:
        """Raise unless there is a reason that nothing runs: no work, or readers that are behind."""
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            if not sequence.paused:
                raise InvariantError(
                    f"nothing is planned, nothing is in flight, and sequence "
                    f"{sequence.sequence_id} is {sequence.phase.value} with {sequence.remaining} "
                    f"tokens to compute; {self.memory.pool.num_free} pages are free and "
                    f"{self.memory.num_cached} can be evicted"
                )

    # -- both

    def _launch(self, sequence: SequenceState, count: int) -> None:
        """Add `count` tokens of a sequence to the step and move its books past them."""
        start = sequence.computed
        end = start + count
        samples = end == sequence.num_known + sequence.pending
        token_ids = PENDING_IDS if sequence.pending else sequence.ids(start, count)
        written_step = sequence.last_step
        sequence.computed = end
        sequence.last_step = self.step
        self._add(sequence, start, count, token_ids, samples)
        if end // self.memory.page_size > sequence.published:
            self.memory.publish(sequence)
        if samples and sequence.unborn:
            self._fork(sequence, written_step)
        self.budget -= count
        prompt = sequence.prompt_tokens
        counters = self.scheduler.counters
        counters.tokens_processed += count
        if start < prompt:
            counters.tokens_prefilled += min(end, prompt) - start

    def _fork(self, sequence: SequenceState, written_step: int) -> None:
        """The prompt is computed: its further samples begin, from the same last row."""
        children, sequence.unborn = sequence.unborn, []
        for child in children:
            self.memory.fork(sequence, child, written_step)
            child.phase = Phase.RUNNING
            child.last_step = self.step
            insort(self.scheduler.running, child, key=by_arrival)
            self._add(child, child.computed, 0, (), True)
        self.scheduler.announce(children)

    def _add(
        self,
        sequence: SequenceState,
        start: int,
        count: int,
        token_ids: Sequence[int] | npt.NDArray[np.int32],
        samples: bool,
    ) -> None:
        if samples:
            sequence.pending += 1
        self.sequences.append(sequence)
        self.items.append(
            WorkItem(
                sequence.sequence_id,
                sequence.epoch,
                sequence.slot,
                start,
                count,
                token_ids,
                sequence.page_table.page_ids,
                sequence.params if samples else None,
                sequence.seed,
            )
        )

    def _view(self) -> SchedulerView:
        scheduler, pool = self.scheduler, self.memory.pool
        return SchedulerView(
            self.step,
            self.now_seconds,
            scheduler.counters.tokens_processed,
            scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs,
            pool.page_size,
            pool.num_pages,
            pool.num_free,
            self.memory.num_cached,
            pool.num_fenced,
            len(scheduler.running),
            len(scheduler.waiting),
        )
