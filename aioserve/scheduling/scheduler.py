"""The mechanism: turns waiting and running sequences into step plans, and outcomes into progress.

    submit ──► waiting ──admit──► running ──commit──► finished
                  ▲                  │
                  └─────preempt──────┘

`plan` and `commit` are the only places where a sequence moves along these arrows (`cancel` and
`finish` end it from anywhere). Steps may overlap: a step can be planned while the one before runs.
A sequence that is being sampled then has one *pending* token, whose id only the device knows.

Memory: all pages of a prompt are taken when it is admitted, so a prefill never waits half-done for
pages; decoding sequences take one page at a time. When those run out, younger sequences give
theirs back. The oldest running sequence is never preempted for another and fits alone, so it always
gets to its end, and so does everyone in turn. One whose reader is behind doesn't run: it may be
preempted for anyone, and loses time but no token.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.plan import PENDING_TOKEN, StepOutcome, StepPlan, WorkItem
from aioserve.kv.page_pool import NO_STEP, PagePool
from aioserve.kv.pages import capacity_tokens, pages_for
from aioserve.request import FinishReason, SamplingParams
from aioserve.scheduling.guard import PolicyGuard
from aioserve.scheduling.policy import RequestView, SchedulerView, SchedulingPolicy, Verdict
from aioserve.scheduling.reserve import OutputReserve
from aioserve.scheduling.sequence import NO_SLOT, Phase, SequenceState
from aioserve.scheduling.slots import SlotPool

__all__ = ["Progress", "Scheduler", "SchedulerCounters"]

PENDING_IDS = (PENDING_TOKEN,)
SLOTS_PER_SEQUENCE = 2
"""Slots of ended sequences stay fenced for a step; with spare ones, successors need not wait."""

by_arrival = attrgetter("sequence_id")


class Progress(msgspec.Struct, frozen=True, gc=False):
    """What one step brought one sequence: a token, an end, or both."""

    sequence_id: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: str | None = None
    rejected: bool = False
    """The policy answered NEVER."""


class SchedulerCounters(msgspec.Struct):
    """Totals since the scheduler was made."""

    steps: int = 0
    tokens_processed: int = 0
    tokens_prefilled: int = 0
    """Prompt tokens computed, those recomputed after a preemption included."""
    tokens_generated: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns every sequence and, through the pool, every page. Not thread-safe; never blocks."""

    def __init__(
        self,
        pool: PagePool,
        policy: SchedulingPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        output_reserve_tokens: int,
    ) -> None:
        self.pool = pool
        self.guard = PolicyGuard(policy)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.counters = SchedulerCounters()
        self.launched = NO_STEP
        """Number of the last step planned; `pool.done_step` is the last one done."""
        self._slots = SlotPool(SLOTS_PER_SEQUENCE * max_num_seqs)
        self._reserve = OutputReserve(pool.page_size, output_reserve_tokens)
        self._sequences: dict[int, SequenceState] = {}
        self._waiting: list[SequenceState] = []
        self._running: list[SequenceState] = []
        self._arrived: list[RequestView] = []
        self._rejected: list[Progress] = []
        self._next_id = 0

    @property
    def num_slots(self) -> int:
        return SLOTS_PER_SEQUENCE * self.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def sequences(self) -> Iterable[SequenceState]:
        """Those that haven't ended."""
        return self._sequences.values()

    # -- requests come and go

    def submit(
        self,
        request_id: str,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        end_ids: frozenset[int],
        max_length: int,
        now_seconds: float,
    ) -> int:
        """Queue one sequence and return its id.

        `max_length`, prompt and answer together, must fit the pool when it runs alone: that every
        run ends rests on it. Raises `InvariantError` otherwise; the edge refuses such requests.
        """
        fits = capacity_tokens(self.pool.num_pages, self.pool.page_size)
        if not 0 < len(prompt_ids) < max_length <= fits:
            raise InvariantError(
                f"prompt of {len(prompt_ids)} tokens, max_length {max_length}: need "
                f"0 < prompt < max_length <= {fits} tokens of KV cache"
            )
        self._next_id += 1
        sequence = SequenceState(
            self._next_id,
            request_id,
            prompt_ids,
            params,
            seed=seed,
            end_ids=end_ids,
            max_length=max_length,
            arrival_seconds=now_seconds,
            arrival_processed_tokens=self.counters.tokens_processed,
        )
        self._sequences[sequence.sequence_id] = sequence
        self._waiting.append(sequence)
        self._arrived.append(sequence.view)
        return sequence.sequence_id

    def finish(self, sequence_id: int) -> None:
        """End a sequence from outside (cancelled, stop string found). Unknown ids are ignored, so
        that a cancel may cross the natural end. Tokens still in flight are dropped at commit."""
        sequence = self._sequences.get(sequence_id)
        if sequence is not None:
            self._end([sequence])

    def pause(self, sequence_id: int) -> None:
        """Plan no more work for a sequence whose reader is behind."""
        if sequence_id in self._sequences:
            self._sequences[sequence_id].paused = True

    def resume(self, sequence_id: int) -> None:
        if sequence_id in self._sequences:
            self._sequences[sequence_id].paused = False

    # -- one step

    def plan(self, now_seconds: float) -> StepPlan | None:
        """What to compute next; None when nothing can be computed now."""
        self.guard.begin_step()
        self._announce_arrivals()
        step = self.launched + 1
        budget = self.max_num_batched_tokens
        chosen: list[tuple[SequenceState, int]] = []

        decodes, preempted = self._decodes(now_seconds, budget)
        chosen += [(sequence, 1) for sequence in decodes]
        budget -= len(decodes)
        budget = self._continue_prefills(chosen, budget, now_seconds)
        may_admit = not preempted and self._waiting and budget > 0
        if may_admit and self._admit(chosen, budget, now_seconds, forced=False):
            preempted = self._displace_a_paused_one()
        if not chosen and self.launched == self.pool.done_step:
            preempted += self._force_progress(chosen, now_seconds)
            if not chosen:
                self._check_idle()
        if not chosen:
            return None

        self.launched = step
        items = tuple(self._launch(sequence, count, step) for sequence, count in chosen)
        return StepPlan(step, items, tuple(victim.sequence_id for victim in preempted))

    def take_rejected(self) -> list[Progress]:
        """Requests that the policy refused since the last call; they have ended."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def commit(self, plan: StepPlan, outcome: StepOutcome) -> list[Progress]:
        """Take in what a step produced, in the order in which steps were planned."""
        self._complete(plan)
        progress = []
        ended = []
        for index, item in enumerate(plan.items):
            if item.sampling is None:
                continue
            sequence = self._sequences.get(item.sequence_id)
            # The one place where results in flight are dropped: the sequence has ended, or was
            # preempted (and samples the same token again, since its noise depends on the position).
            if sequence is None or sequence.epoch != item.epoch:
                continue
            sequence.pending -= 1
            error = outcome.row_errors.get(index)
            if error is not None:
                ended.append(sequence)
                progress.append(Progress(item.sequence_id, None, FinishReason.ERROR, error))
                continue
            token_id = outcome.token_ids[index]
            reason = sequence.append(token_id)
            self.counters.tokens_generated += 1
            progress.append(Progress(item.sequence_id, token_id, reason))
            if reason is not None:
                ended.append(sequence)
        self._end(ended)
        self.guard.step_finished(plan.step, plan.num_tokens)
        return progress

    def fail(self, plan: StepPlan, error: str) -> list[Progress]:
        """A step failed as a whole: end the sequences in it; all others go on."""
        self._complete(plan)
        progress = []
        ended = []
        for item in plan.items:
            sequence = self._sequences.get(item.sequence_id)
            if sequence is not None and sequence.epoch == item.epoch:
                ended.append(sequence)
                progress.append(Progress(item.sequence_id, None, FinishReason.ERROR, error))
        self._end(ended)
        self.guard.step_finished(plan.step, plan.num_tokens)
        return progress

    def sanity_check(self) -> None:
        """Raise `InvariantError` unless pool, page tables and queues agree."""
        self.pool.sanity_check()
        tables = [page for s in self._sequences.values() for page in s.page_table.page_ids.tolist()]
        if len(tables) != len(set(tables)) or len(tables) != self.pool.num_held:
            raise InvariantError(
                f"page tables name {len(tables)} pages ({len(set(tables))} distinct), "
                f"the pool holds {self.pool.num_held}"
            )
        queued = len(self._waiting) + len(self._running)
        if queued != len(self._sequences):
            raise InvariantError(
                f"{len(self._waiting)} waiting + {len(self._running)} running sequences "
                f"!= {len(self._sequences)} live ones"
            )
        for sequence in self._sequences.values():
            capacity = capacity_tokens(len(sequence.page_table), self.pool.page_size)
            waiting = sequence.phase is Phase.WAITING
            if sequence.computed > capacity or (waiting and capacity):
                raise InvariantError(
                    f"sequence {sequence.sequence_id} is {sequence.phase.value} with "
                    f"{sequence.computed} computed tokens in room for {capacity}"
                )

    # -- parts of a plan

    def _decodes(
        self, now_seconds: float, budget: int
    ) -> tuple[list[SequenceState], list[SequenceState]]:
        """Sequences that take one decode step now, and those preempted to make room.

        Oldest first. A sequence for which no page is left sits this step out: pages that are
        fenced now are free in the next.
        """
        ready = [s for s in self._running if not s.paused and s.remaining == 1 and not s.exhausted]
        page_size = self.pool.page_size
        growing = [
            s for s in ready[:budget] if s.computed == capacity_tokens(len(s.page_table), page_size)
        ]
        preempted: list[SequenceState] = []
        if len(growing) > self.pool.num_free:
            preempted = self._make_room(growing, now_seconds)
            ready = [s for s in ready if s.phase is Phase.RUNNING]
        granted = []
        for sequence in ready[:budget]:
            if sequence.computed == capacity_tokens(len(sequence.page_table), page_size):
                if not self.pool.num_free:
                    continue
                sequence.page_table.append(self.pool.acquire(1))
            granted.append(sequence)
        return granted, preempted

    def _make_room(self, growing: list[SequenceState], now_seconds: float) -> list[SequenceState]:
        """Preempt until every growing sequence can have its page, now or after the step in flight.

        Counts what comes back, not what is held: fenced pages of a victim are on their way.
        """
        preempted: list[SequenceState] = []
        while True:
            growing = [s for s in growing if s.phase is Phase.RUNNING]
            ending = sum(len(s.page_table) for s in self._running if s.exhausted)
            short = len(growing) - self.pool.num_free - self.pool.num_fenced - ending
            if short <= 0:
                return preempted
            oldest = growing[0].sequence_id
            candidates = [
                s.view
                for s in self._running
                if (s.sequence_id > oldest or s.paused) and not s.exhausted
            ]
            if not candidates:
                return preempted
            chosen = self.guard.victim(candidates, short, self._view(now_seconds))
            self._preempt(chosen._state)
            preempted.append(chosen._state)

    def _preempt(self, victim: SequenceState) -> None:
        self._running.remove(victim)
        self._give_back(victim)
        victim.restart()
        insort(self._waiting, victim, key=by_arrival)
        self.counters.preemptions += 1

    def _displace_a_paused_one(self) -> list[SequenceState]:
        """Others wait for room: the youngest sequence whose reader is behind makes some, so that a
        slow reader holds up nobody but itself."""
        for sequence in reversed(self._running):
            if sequence.paused and not sequence.exhausted:
                self._preempt(sequence)
                return [sequence]
        return []

    def _continue_prefills(
        self, chosen: list[tuple[SequenceState, int]], budget: int, now_seconds: float
    ) -> int:
        """Next chunks of prompts that have begun. Returns the budget that is left."""
        prefilling = [s for s in self._running if not s.paused and s.remaining > 1]
        if not prefilling or budget <= 0:
            return budget
        view = self._view(now_seconds)
        for sequence in prefilling:
            if budget <= 0:
                break
            count = self.guard.chunk(sequence.view, min(sequence.remaining, budget), view)
            if count:
                chosen.append((sequence, count))
                budget -= count
        return budget

    def _admit(
        self,
        chosen: list[tuple[SequenceState, int]],
        budget: int,
        now_seconds: float,
        *,
        forced: bool,
    ) -> bool:
        """Start waiting sequences in the policy's order while slots, budget and pages last.

        Returns whether nothing was started for want of room.
        """
        if not self._may_admit_one():
            return any(not s.paused for s in self._waiting)
        blocked = False
        view = self._view(now_seconds)
        waiting = [s.view for s in self._waiting if not s.paused]
        started: list[SequenceState] = []
        refused: list[SequenceState] = []
        reserved = self._reserve.total(s for s in self._running if not s.paused)
        order = iter(waiting) if forced else self.guard.order(waiting, view)
        for request in order:
            sequence = request._state
            need = pages_for(sequence.num_known, self.pool.page_size)
            ahead = self._reserve.pages_ahead(sequence)
            idle = not self._running and not started and not self.pool.num_fenced
            if need + (0 if idle else ahead + reserved) > self.pool.num_free:
                blocked = not started
                break
            verdict = Verdict.NOW if forced else self.guard.admit(request, view)
            if verdict is Verdict.NEVER:
                refused.append(sequence)
                continue
            if verdict is Verdict.LATER:
                continue
            count = min(sequence.remaining, budget)
            if not forced:
                count = self.guard.chunk(request, count, view)
            if count == 0:
                continue
            sequence.page_table.append(self.pool.acquire(need))
            sequence.slot = self._slots.acquire()
            sequence.phase = Phase.RUNNING
            started.append(sequence)
            chosen.append((sequence, count))
            reserved += ahead
            budget -= count
            full = len(self._running) + len(started) >= self.max_num_seqs
            if forced or full or budget <= 0 or not self._slots.num_free:
                break
        for sequence in started:
            insort(self._running, sequence, key=by_arrival)
        if started:
            self._waiting = [s for s in self._waiting if s.phase is Phase.WAITING]
        if refused:
            self._rejected += [
                Progress(s.sequence_id, None, FinishReason.ERROR, rejected=True) for s in refused
            ]
            self._end(refused)
        return blocked

    def _may_admit_one(self) -> bool:
        return (
            len(self._running) < self.max_num_seqs
            and self._slots.num_free > 0
            and self.pool.num_free > 0
        )

    def _force_progress(
        self, chosen: list[tuple[SequenceState, int]], now_seconds: float
    ) -> list[SequenceState]:
        """Nothing is in flight and nothing was chosen: go on with the oldest sequence, whatever the
        policy says, so that an engine with work never stands still. Returns the preempted."""
        for sequence in self._running:
            if not sequence.paused and sequence.remaining > 1:
                chosen.append((sequence, min(sequence.remaining, self.max_num_batched_tokens)))
                return []
        preempted: list[SequenceState] = []
        while self._admit(chosen, self.max_num_batched_tokens, now_seconds, forced=True):
            displaced = self._displace_a_paused_one()
            if not displaced:
                break
            preempted += displaced
        return preempted

    def _check_idle(self) -> None:
        """Raise unless there is a reason that nothing runs: no work, or readers that are behind."""
        ready = [s for s in (*self._running, *self._waiting) if not s.paused]
        if ready:
            raise InvariantError(
                f"nothing is planned, nothing is in flight, and sequence {ready[0].sequence_id} "
                f"is {ready[0].phase.value} with {ready[0].remaining} tokens to compute; "
                f"{self.pool.num_free} pages are free"
            )

    def _launch(self, sequence: SequenceState, count: int, step: int) -> WorkItem:
        """The work item for `count` tokens, with the sequence's books moved past it."""
        start = sequence.computed
        samples = count == sequence.remaining
        item = WorkItem(
            sequence.sequence_id,
            sequence.epoch,
            sequence.slot,
            start,
            count,
            PENDING_IDS if sequence.pending else sequence.ids(start, count),
            sequence.page_table.page_ids,
            sequence.params if samples else None,
            sequence.seed,
        )
        end = start + count
        sequence.computed = end
        sequence.last_step = step
        if samples:
            sequence.pending += 1
        prompt = sequence.prompt_tokens
        self.counters.tokens_prefilled += min(end, prompt) - min(start, prompt)
        self.counters.tokens_processed += count
        return item

    # -- ends

    def _complete(self, plan: StepPlan) -> None:
        self.pool.complete(plan.step)
        self._slots.complete(plan.step)
        self.counters.steps += 1

    def _announce_arrivals(self) -> None:
        if self._arrived:
            arrived, self._arrived = tuple(self._arrived), []
            self.guard.arrived(arrived)

    def _end(self, sequences: list[SequenceState]) -> None:
        self._announce_arrivals()
        for sequence in sequences:
            del self._sequences[sequence.sequence_id]
            if sequence.phase is Phase.RUNNING:
                self._running.remove(sequence)
            else:
                self._waiting.remove(sequence)
            self._give_back(sequence)
            sequence.phase = Phase.FINISHED
        if sequences:
            self.guard.finished(tuple(sequence.view for sequence in sequences))

    def _give_back(self, sequence: SequenceState) -> None:
        """Return the pages and the slot of a sequence, fenced by its last step."""
        if len(sequence.page_table):
            self.pool.release(sequence.page_table.page_ids, sequence.last_step)
        if sequence.slot != NO_SLOT:
            self._slots.release(sequence.slot, sequence.last_step)
            sequence.slot = NO_SLOT

    def _view(self, now_seconds: float) -> SchedulerView:
        return SchedulerView(
            self.launched + 1,
            now_seconds,
            self.counters.tokens_processed,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            self.pool.page_size,
            self.pool.num_pages,
            self.pool.num_free,
            self.pool.num_fenced,
            len(self._running),
            len(self._waiting),
        )
