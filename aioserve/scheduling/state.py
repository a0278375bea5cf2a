"""State of a scheduler: every live sequence, where it is, and what it holds.

    enter ──► waiting ──start──► running ──end──► gone
                 ▲                  │
                 └────begin_again───┘

Sequences move along these arrows only by the methods of `SchedulerState`. A request for several
samples of one prompt becomes one sequence per sample. The first one runs and the others are
pending: they fork off, sharing its pages, in the step that completes the prompt.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import msgspec

from aioserve.config import Preemption
from aioserve.errors import InvariantError
from aioserve.kv.memory import KVMemory
from aioserve.kv.page_pool import NO_STEP
from aioserve.kv.recovery import recover
from aioserve.request import FinishReason, Request
from aioserve.scheduling.account import RequestAccount
from aioserve.scheduling.parts.base import RowPart
from aioserve.scheduling.parts.table import PARTS
from aioserve.scheduling.pins import PinnedPrefixes
from aioserve.scheduling.policy import Refusal
from aioserve.scheduling.policy_calls import PolicyCalls
from aioserve.scheduling.reserve import OutputReserve
from aioserve.scheduling.sequence import NO_SLOT, Entry, Phase, SequenceState
from aioserve.scheduling.slots import SlotPool
from aioserve.scheduling.speculation.drafts import Speculation
from aioserve.scheduling.step_times import StepTimes
from aioserve.scheduling.updates import SchedulerCounters, SequenceUpdate
from aioserve.scheduling.view import RequestView, SchedulerView
from aioserve.scheduling.waiting_queue import WaitingQueue, place_of

__all__ = ["SLOTS_PER_SEQUENCE", "SchedulerState"]

SLOTS_PER_SEQUENCE = 2
"""Slots per sequence that may run. Slots of ended sequences stay fenced for a step; the spare ones
let successors start at once."""

_by_arrival = attrgetter("sequence_id")


class SchedulerState:
    """Owns every sequence and, through its memory, every page. Tells the policy about arrivals and
    ends."""

    def __init__(
        self,
        memory: KVMemory,
        policy_calls: PolicyCalls,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_tokens: int,
        output_reserve_tokens: int,
    ) -> None:
        self.memory = memory
        self.policy_calls = policy_calls
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored_tokens = max_scored_tokens
        self.reserve: OutputReserve = OutputReserve(
            memory.page_size, output_reserve_tokens, memory.groups
        )
        self.times: StepTimes = StepTimes()
        self.speculation: Speculation = Speculation()
        self.forced: dict[SequenceState, None] = {}
        """Sequences that may have forced tokens ahead which steps are to draw, in the order of
        `Scheduler.guide` calls."""
        self.counters: SchedulerCounters = SchedulerCounters()
        self.pins: PinnedPrefixes = PinnedPrefixes(memory, policy_calls)
        self.slots: SlotPool = SlotPool(SLOTS_PER_SEQUENCE * max_num_seqs)
        self.launched: int = NO_STEP
        """Number of the last step planned; `memory.pool.done_step` is the last one done."""
        self.in_flight: dict[int, list[Entry]] = {}
        """Entries of each step that is planned and not yet done."""
        self.parts_in_flight: dict[int, tuple[RowPart, ...]] = {}
        """Parts that each of these steps calls, in the order of `PARTS`."""
        self.sequences: dict[int, SequenceState] = {}
        """Live sequences by id."""
        self.running: list[SequenceState] = []
        self.ended_unplanned: list[SequenceUpdate] = []
        """Ends not yet reported that no commit reports: the policy refused or dropped the request,
        or planning it failed."""
        self.stopped_at: SequenceState | None = None
        """First waiting sequence that the last plan had no room for."""
        self.reserved_next_page: dict[SequenceState, int] = {}
        """Running sequences for whose next page others were preempted, with the tokens they had
        computed then. Kept only where the policy chooses who decodes."""
        self.has_precedences: bool = False
        """True once the policy has given a precedence other than 0."""
        self.queue: WaitingQueue = WaitingQueue()
        """Waiting sequences."""
        self.preempted: list[int] = []
        """Ids of the sequences preempted since the last plan. The next plan carries them and clears
        the list; empty steps make no plan."""
        self._most_waiting = -math.inf
        """Upper bound of the precedences of waiting sequences."""
        self.arrived: list[RequestView] = []
        """New requests, and samples that have just forked off. The policy is told about them before
        it is asked again."""
        self._last_id = 0

    @property
    def waiting(self) -> list[SequenceState]:
        """Waiting sequences in order of arrival."""
        return self.queue.sequences

    def waits_above(self, precedence: float) -> bool:
        """True if a waiting sequence has a precedence greater than `precedence`. Scans the queue
        only while `_most_waiting` says that there may be one."""
        if self._most_waiting > precedence:
            self._most_waiting = max([s.precedence for s in self.waiting], default=-math.inf)
        return self._most_waiting > precedence

    def sequence_of(self, view: RequestView) -> SequenceState:
        return self.sequences[view.arrival_index]

    def is_known(self, view: RequestView) -> bool:
        """True if the view belongs to a live sequence."""
        sequence = self.sequences.get(view.arrival_index)
        return sequence is not None and sequence.view is view

    # -- along the arrows

    def enter(self, request: Request) -> tuple[int, ...]:
        """Queue the request's sequences, one per sample, and return their ids."""
        account = RequestAccount()
        first, *others = family = [
            SequenceState(
                request,
                account,
                sequence_id=self._last_id + 1 + sample,
                sample=sample,
                arrival_processed_tokens=self.counters.tokens_processed,
            )
            for sample in range(request.num_samples)
        ]
        self._last_id += len(family)
        if request.max_draft_tokens:
            for sequence in family:
                sequence.drafts = self.speculation.drafts_of(request.max_draft_tokens)
        hints = msgspec.structs.asdict(request.hints)
        first.pending_samples = others
        for sequence in family:
            self.sequences[sequence.sequence_id] = sequence
            sequence.view = RequestView(_sequence=sequence, _memory=self.memory, **hints)
        self.queue.add(first)
        self.arrived.append(first.view)
        return tuple([s.sequence_id for s in family])

    def start(self, sequence: SequenceState) -> None:
        """Start a waiting sequence whose pages are reserved: it and its pending samples take
        slots."""
        for one in sequence.family:
            one.take_slot(self.slots.acquire(one.request, one.seed, one.known_ids))
        sequence.phase = Phase.RUNNING
        sequence.num_displaced = 0
        self.queue.remove(sequence)
        insort(self.running, sequence, key=_by_arrival)

    def fork_samples(
        self, parent: SequenceState, step: int, written_step: int
    ) -> list[SequenceState]:
        """Let the pending samples of a prompt run: `step` completes the prompt. Steps up to
        `written_step` computed the tokens before. Each sample waits for a token of its own."""
        children, parent.pending_samples = parent.pending_samples, []
        for child in children:
            self.memory.fork(parent.lease, child.lease, written_step, step)
            self.arrived.append(child.view)
            child.phase = Phase.RUNNING
            child.pending = 1
            insort(self.running, child, key=_by_arrival)
        return children

    def preempt(self, victim: SequenceState, step: int, how: Preemption | None = None) -> None:
        """Preempt a sequence for others while step `step` is planned. `how` replaces the memory's
        own choice between swapping and recomputing."""
        if not victim.forced_in_flight:
            self.memory.publish(victim.lease, victim.known_ids, leaving=True)
            self.memory.swap_out(victim.lease, victim.num_known, step, how)
        self.begin_again(victim)
        self.counters.preemptions += 1
        victim.account.preemptions += 1
        self.preempted.append(victim.sequence_id)

    def begin_again(self, sequence: SequenceState) -> None:
        del self.running[place_of(self.running, sequence)]
        self._give_back(sequence)
        sequence.restart()
        self.drop_launched(sequence)
        self._most_waiting = max(self._most_waiting, sequence.precedence)
        self.queue.add(sequence)

    def drop_launched(self, sequence: SequenceState) -> None:
        """Discard the results of steps already launched for a sequence."""
        for part in PARTS:
            part.drop_launched(sequence)

    def refuse(self, request: SequenceState, refusal: Refusal | None) -> None:
        """End a request that the policy refused, with all its samples."""
        for sequence in request.family:
            update = SequenceUpdate(
                sequence.sequence_id,
                None,
                FinishReason.ERROR,
                None if refusal is None else refusal.reason,
                rejected=True,
                retry_after_seconds=None if refusal is None else refusal.retry_after_seconds,
            )
            self.ended_unplanned.append(update)
        self.end([request])

    def pause(self, sequence: SequenceState) -> None:
        """Plan no work for a sequence while its reader is behind."""
        sequence.paused = True
        if sequence.phase is Phase.WAITING:
            self.queue.hold(sequence)

    def end(self, sequences: Iterable[SequenceState], *, publish: bool = True) -> None:
        """Forget sequences, and the pending samples that depend on them. With `publish`, the prefix
        tree keeps what they computed."""
        sequences = list(sequences)
        self.tell_arrivals()
        known = tuple([s.view for s in sequences if s.phase is not Phase.PENDING_SAMPLE])
        for sequence in sequences:
            if sequence.phase is Phase.RUNNING:
                del self.running[place_of(self.running, sequence)]
                if publish and not sequence.forced_in_flight and not sequence.is_alone:
                    self.memory.publish(sequence.lease, sequence.known_ids, leaving=True)
                    if self.policy_calls.pins:
                        self.pins.ask_to_pin(sequence)
            elif sequence.phase is Phase.PENDING_SAMPLE:
                self._parent_of(sequence).pending_samples.remove(sequence)
            self._give_back(sequence)
            self.memory.forget_swapped(sequence.lease)
            self._strike_out(sequence)
        if known:
            self.policy_calls.finished(known)

    def lose(self, sequences: Iterable[SequenceState], last_step: int) -> None:
        """Strike out sequences whose state may be wrong, because an exception interrupted a change.
        Take back pages and slots that no remaining sequence holds. Step `last_step` may be the last
        to touch them."""
        sequences = list(sequences)
        views = [s.view for s in sequences if s.phase is not Phase.PENDING_SAMPLE]
        known = tuple(view for view in views if view not in self.arrived)
        # The policy never hears about sequences that it has not been told about.
        unheard = [s.view for s in sequences]
        self.arrived = [view for view in self.arrived if view not in unheard]
        for sequence in sequences:
            self._strike_out(sequence)
        left = self.sequences.values()  # in order of arrival
        self.queue.become(s for s in left if s.phase is Phase.WAITING)
        self.running = [s for s in left if s.phase is Phase.RUNNING]
        self.slots.recover([s.slot for s in left if s.slot != NO_SLOT], last_step)
        recover(self.memory, [*(s.lease for s in left), *self.pins.leases], last_step)
        if known:
            self.policy_calls.finished(known)

    def _strike_out(self, sequence: SequenceState) -> None:
        if sequence.phase is Phase.WAITING:
            self.queue.end(sequence)
        for one in sequence.family:
            self.sequences.pop(one.sequence_id, None)
            self.forced.pop(one, None)
            one.phase = Phase.FINISHED
            one.slot = NO_SLOT
        sequence.pending_samples = []

    def _parent_of(self, child: SequenceState) -> SequenceState:
        for parent in (*self.running, *self.waiting):
            if child in parent.pending_samples:
                return parent
        raise InvariantError(f"{child} has no parent among those that run and wait")

    def _give_back(self, sequence: SequenceState) -> None:
        """Return pages and slots. They stay fenced until the sequence's last step is done."""
        self.memory.leave(sequence.lease)
        for one in sequence.family:
            if one.slot != NO_SLOT:
                self.slots.release(one.slot, one.lease.last_step)
                one.slot = NO_SLOT

    # -- steps

    def complete(self, step: int) -> None:
        """Record that step number `step` is done or has failed."""
        self.memory.complete(step)
        self.slots.complete(step)
        self.counters.steps += 1

    def shorten(self, cut: Mapping[int, int]) -> list[SequenceState]:
        """Shorten leases to what is left of their prefix-tree receipts. `cut` maps each receipt
        that was cut to the pages it still covers.

        Return the running sequences that had taken over more than that. Pins of receipts in `cut`
        end.
        """
        self.pins.end_cut(cut)
        return [s for s in self.running if self.memory.shorten(s.lease, cut)] if cut else []

    # -- what the policy hears and sees

    def tell_arrivals(self) -> None:
        if self.arrived:
            arrived, self.arrived = tuple(self.arrived), []
            self.policy_calls.arrived(arrived)
            for view in arrived:
                precedence = self.policy_calls.precedence(view)
                self.sequence_of(view).precedence = precedence
                self._most_waiting = max(self._most_waiting, precedence)
                self.has_precedences |= precedence != 0

    def view(self, step: int, now_seconds: float, num_processed: int) -> SchedulerView:
        """View for the policy while step `step` is planned. `num_processed` counts the tokens
        computed by all steps.

        Fields are fixed now. Properties that look further show the state at the time of the look.
        """
        pool = self.memory.pool
        return SchedulerView(
            step,
            now_seconds,
            num_processed,
            self.max_num_batched_tokens,
            self.max_num_seqs,
            pool.page_size,
            pool.num_pages,
            pool.num_free,
            self.memory.num_cached,
            pool.num_fenced,
            len(self.running),
            len(self.queue),
            self.pins.num_pages,
            self,
        )

    def views_of_running(self) -> Sequence[RequestView]:
        return tuple([s.view for s in self.running])

    def views_of_waiting(self) -> Sequence[RequestView]:
        return self.queue.views()

    def pages_reserved(self) -> int:
        """Pages that the reserve keeps for all running sequences. Recounted on each call."""
        ahead = self.reserve.pages_ahead
        return sum([ahead(s) for s in self.running if not s.paused])

    def pages_reserved_for(self, request: RequestView) -> int:
        sequence = self.sequences.get(request.arrival_index)
        return 0 if sequence is None else self.reserve.pages_ahead(sequence)
