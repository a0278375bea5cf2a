"""The mechanism: turns waiting and running sequences into step plans, and outcomes into progress.

    submit ──► waiting ──admit──► running ──commit──► finished
                  ▲                  │
                  └─────preempt──────┘

`plan`, `commit` and `fail` are the only places where a sequence moves along these arrows (`finish`
ends it from anywhere). Steps may overlap: a step can be planned while the one before runs. A
sequence that is being sampled then has one *pending* token, whose id only the device knows.

A request for several samples of one prompt is as many sequences. The first runs, the others are
unborn: they fork off, with its pages, in the step that has computed the prompt.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from itertools import chain

import numpy as np
import numpy.typing as npt

from aioserve.errors import InvariantError
from aioserve.execution.plan import StepOutcome, StepPlan, WorkItem
from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.pages import capacity_tokens
from aioserve.request import MAX_SEED, FinishReason, SamplingParams
from aioserve.scheduling.guard import PolicyGuard
from aioserve.scheduling.memory import KVMemory
from aioserve.scheduling.planner import StepPlanner, by_arrival
from aioserve.scheduling.policy import RequestView, SchedulingPolicy
from aioserve.scheduling.progress import Progress, SchedulerCounters
from aioserve.scheduling.reserve import OutputReserve
from aioserve.scheduling.sanity import check_books
from aioserve.scheduling.sequence import NO_SLOT, Phase, SequenceState
from aioserve.scheduling.slots import SlotPool

__all__ = ["Scheduler"]

SLOTS_PER_SEQUENCE = 2
"""Slots of ended sequences stay fenced for a step; with spare ones, successors need not wait."""


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
    ) -> None:
        """`clock` gives seconds; with one, a policy whose methods take long is named in the log.
        `policy_name` stands in logs and errors, that of its class unless given."""
        self.memory = memory
        self.guard = PolicyGuard(policy, clock, name=policy_name)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.reserve = OutputReserve(memory.page_size, output_reserve_tokens)
        self.counters = SchedulerCounters()
        self.launched = NO_STEP
        """Number of the last step planned; `memory.pool.done_step` is the last one done."""
        self.in_flight: dict[int, list[SequenceState]] = {}
        """The sequences of each launched step's items."""
        self.slots = SlotPool(SLOTS_PER_SEQUENCE * max_num_seqs)
        self.sequences: dict[int, SequenceState] = {}
        """Those that haven't ended, by id."""
        self.waiting: list[SequenceState] = []
        self.running: list[SequenceState] = []
        self._arrived: list[RequestView] = []
        self._rejected: list[Progress] = []
        self._preempted: list[int] = []
        self._next_id = 0

    @property
    def num_slots(self) -> int:
        return SLOTS_PER_SEQUENCE * self.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_seats_free(self) -> int:
        """Sequences that may start now; unborn samples of those that run have their seats."""
        taken = sum([1 + len(s.unborn) for s in self.running])
        return min(self.max_num_seqs - taken, self.slots.num_free)

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
        namespace: bytes = b"",
        tenant: str | None = None,
        ttft_target_seconds: float | None = None,
        tpot_target_seconds: float | None = None,
    ) -> tuple[int, ...]:
        """Queue `params.n` sequences and return their ids; sample i draws with `seed + i`.

        `max_length`, prompt and answer together, must fit the pool when it runs alone: that every
        run ends rests on it. Raises `InvariantError` otherwise; the edge refuses such requests.
        Pages are shared with requests of the same `namespace` alone. `tenant` and targets are for
        the policy to see; the edge checks them.
        """
        pool = self.memory.pool
        fits = capacity_tokens(pool.num_pages, pool.page_size)
        if not 0 < len(prompt_ids) < max_length <= fits:
            raise InvariantError(
                f"prompt of {len(prompt_ids)} tokens, max_length {max_length}: need "
                f"0 < prompt < max_length <= {fits} tokens of KV cache"
            )
        if params.n > self.max_num_seqs:
            raise InvariantError(f"n={params.n} of at most {self.max_num_seqs} sequences")
        first, *others = [
            SequenceState(
                self._next_id + 1 + sample,
                request_id,
                prompt_ids,
                params,
                seed=(seed + sample) & MAX_SEED,
                end_ids=end_ids,
                max_length=max_length,
                namespace=namespace,
                arrival_seconds=now_seconds,
                arrival_processed_tokens=self.counters.tokens_processed,
                tenant=tenant,
                ttft_target_seconds=ttft_target_seconds,
                tpot_target_seconds=tpot_target_seconds,
                memory=self.memory,
            )
            for sample in range(params.n)
        ]
        self._next_id += params.n
        for sequence in others:
            sequence.phase = Phase.UNBORN
        first.unborn = others
        self.sequences.update({s.sequence_id: s for s in (first, *others)})
        self.waiting.append(first)
        self.announce([first])
        return tuple(s.sequence_id for s in (first, *others))

    def finish(self, sequence_id: int) -> None:
        """End a sequence from outside (cancelled, stop string found), and the unborn samples that
        depend on it. Unknown ids are ignored, so that a cancel may cross the natural end. Tokens
        still in flight are dropped at commit."""
        sequence = self.sequences.get(sequence_id)
        if sequence is not None:
            self._end([sequence])

    def pause(self, sequence_id: int) -> None:
        """Plan no more work for a sequence whose reader is behind."""
        if sequence_id in self.sequences:
            self.sequences[sequence_id].paused = True

    def resume(self, sequence_id: int) -> None:
        if sequence_id in self.sequences:
            self.sequences[sequence_id].paused = False

    # -- one step

    def plan(self, now_seconds: float) -> StepPlan | None:
        """What to compute next; None when nothing can be computed now."""
        self.guard.begin_step()
        self._announce_arrivals()
        return StepPlanner(self, now_seconds).plan()

    def take_rejected(self) -> list[Progress]:
        """Requests that the policy refused since the last call; they have ended."""
        rejected, self._rejected = self._rejected, []
        return rejected

    def commit(self, plan: StepPlan, outcome: StepOutcome, now_seconds: float) -> list[Progress]:
        """Take in what a step produced, in the order in which steps were planned."""
        self._complete(plan)
        progress: list[Progress] = []
        ended: list[SequenceState] = []
        broken: list[tuple[SequenceState, WorkItem]] = []
        planned = self.in_flight.pop(plan.step)
        token_ids, errors = outcome.token_ids, outcome.row_errors
        for index, (item, sequence) in enumerate(zip(plan.items, planned, strict=True)):
            if item.sampling is None:
                continue
            error = errors.get(index) if errors else None
            if error is not None:
                broken.append((sequence, item))
            # The one place where results in flight are dropped: the sequence has ended, or was
            # preempted (and samples the same token again, since its noise depends on the position).
            if sequence.phase is Phase.FINISHED or sequence.epoch != item.epoch:
                continue
            sequence.pending -= 1
            if error is not None:
                progress.append(Progress(item.sequence_id, None, FinishReason.ERROR, error))
                continue
            token_id = token_ids[index]
            reason = sequence.append(token_id)
            if sequence.first_token_seconds is None:
                sequence.first_token_seconds = now_seconds
            sequence.proven_pages = item.page_ids
            self.counters.tokens_generated += 1
            progress.append(Progress(item.sequence_id, token_id, reason))
            if reason is not None:
                ended.append(sequence)
        self._end(ended)
        if broken:
            self._end_broken(broken)
        self.guard.step_finished(plan.step, plan.num_tokens)
        return progress

    def fail(self, plan: StepPlan, error: str) -> list[Progress]:
        """A step failed as a whole: end the sequences in it. Those planned since that took over
        what it should have written begin again; all others go on."""
        planned = list(zip(plan.items, self.in_flight.pop(plan.step), strict=True))
        cut = self.memory.withdraw(plan.step)
        for item, sequence in planned:
            # A page that it wrote in part may have been completed, and published, by a later step.
            cut.update(self.memory.forget(sequence, item.start // self.memory.page_size))
        for sequence in chain.from_iterable(self.in_flight.values()):
            # So may a page that it should have copied to the host, and a later step copied back.
            if sequence.inherited_step >= plan.step:
                first = sequence.cached // self.memory.page_size
                cut.update(self.memory.forget(sequence, first))
        self._complete(plan)
        ended = [
            one
            for item, sequence in planned
            if sequence.phase is not Phase.FINISHED and sequence.epoch == item.epoch
            for one in (sequence, *sequence.unborn)
        ]
        self._end(ended, publish=False)
        lost = self._shorten(cut)
        for sequence in self.sequences.values():
            if sequence.swapped is not None and sequence.swapped.step >= plan.step:
                self.memory.forget_swapped(sequence, self.launched)
        for sequence in list(self.running):
            if sequence in lost or sequence.inherited_step >= plan.step:
                self._begin_again(sequence)
        self.guard.step_finished(plan.step, plan.num_tokens)
        return [Progress(s.sequence_id, None, FinishReason.ERROR, error) for s in ended]

    def sanity_check(self) -> None:
        """Raise `InvariantError` unless pools, prefix tree, page tables and queues agree."""
        check_books(self)

    # -- for the planner

    def announce(self, sequences: list[SequenceState]) -> None:
        """Tell the policy of new requests, and of samples that are on their own from now on,
        before it is asked again."""
        self._arrived += [sequence.view for sequence in sequences]

    def start(self, sequence: SequenceState) -> None:
        """A waiting sequence has its pages; the planner takes it off the waiting list."""
        for one in (sequence, *sequence.unborn):
            one.slot = self.slots.acquire()
        sequence.phase = Phase.RUNNING
        insort(self.running, sequence, key=by_arrival)

    def preempt(self, victim: SequenceState, step: int) -> None:
        """Take a sequence's pages for others while step `step` is planned."""
        self.memory.publish(victim, leaving=True)
        self.memory.swap_out(victim, step)
        self._begin_again(victim)
        self.counters.preemptions += 1
        self._preempted.append(victim.sequence_id)

    def take_preempted(self) -> tuple[int, ...]:
        """Ids of the sequences preempted since the last plan that had work, which names them: one
        without work is none."""
        preempted, self._preempted = tuple(self._preempted), []
        return preempted

    def reject(self, refused: list[tuple[SequenceState, str | None]]) -> None:
        """End requests that the policy won't have, each with its reason if there is one."""
        for request, reason in refused:
            self._rejected += [
                Progress(s.sequence_id, None, FinishReason.ERROR, reason, rejected=True)
                for s in (request, *request.unborn)
            ]
        self._end([request for request, _ in refused])

    # -- parts

    def _complete(self, plan: StepPlan) -> None:
        self.memory.complete(plan.step)
        self.slots.complete(plan.step)
        self.counters.steps += 1

    def _announce_arrivals(self) -> None:
        if self._arrived:
            arrived, self._arrived = tuple(self._arrived), []
            self.guard.arrived(arrived)

    def _begin_again(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.restart()
        insort(self.waiting, sequence, key=by_arrival)

    def _shorten(self, cut: dict[int, int]) -> list[SequenceState]:
        """Receipts were cut in the prefix tree: those that had taken over more than is left."""
        lost: list[SequenceState] = []
        for sequence in self.running:
            left = cut.get(sequence.receipt)
            if left is not None:
                sequence.published = left
                if sequence.borrowed > capacity_tokens(left, self.memory.page_size):
                    lost.append(sequence)
        return lost

    def _end_broken(self, broken: list[tuple[SequenceState, WorkItem]]) -> None:
        """End sequences whose logits were not numbers, and let nobody go on from the KV that may be
        to blame: all of theirs, but for leading pages over which another has sampled a token."""
        suspects = [(sequence, self._num_proven_pages(item)) for sequence, item in broken]
        current = [s for s, item in broken if s.epoch == item.epoch]
        self._end([s for s in current if s.phase is not Phase.FINISHED], publish=False)
        while suspects:
            suspect, num_pages = suspects.pop()
            self._shorten(self.memory.forget(suspect, num_pages))
            proven = capacity_tokens(num_pages, self.memory.page_size)
            for sequence in list(self.running):
                if sequence.borrowed > proven and sequence.begins_like(suspect, proven + 1):
                    self._begin_again(sequence)
                    suspects.append((sequence, num_pages))

    def _num_proven_pages(self, item: WorkItem) -> int:
        """Leading pages of a broken item that are good: another sequence has sampled over them."""
        most = 0
        for sequence in self.running:
            pages = sequence.proven_pages
            shared = min(len(pages), len(item.page_ids))
            if sequence.sequence_id != item.sequence_id and shared > most:
                differing = np.flatnonzero(pages[:shared] != item.page_ids[:shared])
                most = max(most, int(differing[0]) if len(differing) else shared)
        return most

    def _end(self, sequences: list[SequenceState], *, publish: bool = True) -> None:
        self._announce_arrivals()
        known = tuple(s.view for s in sequences if s.phase is not Phase.UNBORN)
        for sequence in sequences:
            if sequence.phase is Phase.RUNNING:
                self.running.remove(sequence)
                if publish:
                    self.memory.publish(sequence, leaving=True)
            elif sequence.phase is Phase.WAITING:
                self.waiting.remove(sequence)
            elif sequence.phase is Phase.UNBORN:
                self._forget_unborn(sequence)
            self._give_back(sequence)
            self.memory.forget_swapped(sequence)
            for one in (sequence, *sequence.unborn):
                self.sequences.pop(one.sequence_id, None)
                one.phase = Phase.FINISHED
            sequence.unborn = []
        if known:
            self.guard.finished(known)

    def _forget_unborn(self, child: SequenceState) -> None:
        for parent in (*self.running, *self.waiting):
            if child in parent.unborn:
                parent.unborn.remove(child)

    def _give_back(self, sequence: SequenceState) -> None:
        """Return pages and slots, fenced by the last step of the sequence."""
        self.memory.leave(sequence)
        for one in (sequence, *sequence.unborn):
            if one.slot != NO_SLOT:
                self.slots.release(one.slot, one.last_step)
                one.slot = NO_SLOT
