"""Builds one step: who decodes, whose prompt goes on, who may begin, and who must make room.

Sequences that run are served before new ones are admitted, decodes first. All pages of a prompt
are taken when it is admitted, so that a prefill never waits half-done for pages; decoding sequences
take one page at a time. Window pages alone are taken with each chunk, which is as long as there are
some, and a prefill that finds none is served like a decode that lacks a page.
When those run out, cached pages are evicted, then sequences give theirs back that are younger than
the one in need, or to which the policy gave a lower precedence. The first in the order of
precedence and age is never preempted for another and fits alone, so it always gets to its end, and
so does everyone in turn. One whose reader is behind, or whose mask is long in coming, doesn't run:
it may be preempted for anyone, and loses time but no token. Where the next one to start has no
room, those of lower precedence may have to give way to it
(`aioserve.scheduling.priority_preemption`).

The planner decides one sequence at a time and then applies what it decided, because a request may
find in the prefix tree what another was given in the same step. `working_on` names the sequence
whose entries in the state are being changed; an exception spoils these and no others, and
`entries` is then a step without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from aioserve.kv.claims import Claim
from aioserve.kv.lease import KVLease
from aioserve.kv.memory import KVMemory
from aioserve.scheduling.guesses import launch_with_guesses, wished_guesses, with_guesses
from aioserve.scheduling.policy import Refusal, Verdict
from aioserve.scheduling.policy_calls import PolicyCalls
from aioserve.scheduling.policy_preemptions import chosen_decodes, preempt_for_policy
from aioserve.scheduling.priority_preemption import by_precedence, lowest_precedence, who_gives_way
from aioserve.scheduling.room import Room, slots_of
from aioserve.scheduling.sanity import check_idle
from aioserve.scheduling.sequence import NO_SLOT, Phase, SequenceState
from aioserve.scheduling.state import Entry, SchedulerState
from aioserve.scheduling.view import SchedulerView
from aioserve.steps.plan import (
    PENDING_IDS,
    ItemKind,
    PooledTokens,
    SampleRow,
    ScoredTokens,
    StepPlan,
    WorkItem,
)

__all__ = ["StepPlanner"]

PREFILL, DECODE = ItemKind.PREFILL, ItemKind.DECODE
NO_ROWS: tuple[SampleRow, ...] = ()
PATIENT_STEPS = 16
"""For so many steps one whose mask came late keeps what others want. Most masks are late by one."""


class StepPlanner:
    """Plans the step after the last one launched, and then is done with."""

    def __init__(
        self,
        state: SchedulerState,
        *,
        reject: Callable[[SequenceState, Refusal | None], None],
        now_seconds: float,
    ) -> None:
        self.state = state
        self.step: int = state.launched + 1
        self.memory: KVMemory = state.memory
        self.policy_calls: PolicyCalls = state.policy_calls
        self.room: Room = Room(state, self.step)
        self.num_processed_before: int = state.counters.tokens_processed
        """Tokens that all steps before this one have computed."""
        self.reject = reject
        self.now_seconds = now_seconds
        self.entries: list[Entry] = []
        self.working_on: SequenceState | None = None
        self._plan: StepPlan | None = None
        self._has_preempted = False
        self._patient_steps = PATIENT_STEPS
        self._may_stand_still = False
        """Some that run had nothing to compute when the step was begun."""
        self._gave_way: set[SequenceState] = set()
        self._has_families = False
        self._started: list[tuple[SequenceState, int]] = []
        """With the prompt tokens that each found in the prefix tree."""

    def fill(self) -> None:
        """Choose the work of the step, and move the state of its sequences past it."""
        state = self.state
        if self.policy_calls.sets_budgets:
            most, view = state.max_num_batched_tokens, self.view()
            budget = self.policy_calls.step_budget(view, most, state.is_known)
            self.room = Room(state, self.step, budget)
        if self.policy_calls.acts_on_running:
            self._gave_way |= preempt_for_policy(state, self)
        if state.stopped_at is not None:
            self._give_way(state.stopped_at)
        decoding, prefilling = self._split_running()
        if decoding and self.policy_calls.limits_decodes:
            decoding = chosen_decodes(state, decoding, self.view())
        if decoding or (prefilling and self.memory.windows.num_groups):
            self._decode(decoding, prefilling)
        if prefilling:
            self._continue_prefills(prefilling)
        may_admit = not self._has_preempted and self.room.tokens > 0 and len(state.queue)
        if may_admit and self._admit(forced=False):
            self._displace_one()
        if not self.entries and state.launched == self.memory.pool.done_step:
            self._force_progress()
            if not self.entries:
                self.working_on = None
                check_idle(state)
        self.working_on = None

    def view(self) -> SchedulerView:
        """What the policy sees now."""
        processed = self.num_processed_before + self.room.tokens_taken
        return self.state.view(self.step, self.now_seconds, processed)

    def plan(self) -> StepPlan | None:
        """The step as it was filled; None for an empty one. What raises here may be asked again:
        all is read before anything changes, and no change is made of the one before."""
        if not self.entries:
            return None
        state = self.state
        slots, copies = state.slots, self.memory.copies
        if self._plan is None:
            items = [item for _, item, _ in self.entries]
            if self._has_families:  # with an entry for each row
                items = {id(item): item for item in items}.values()
            self._plan = StepPlan(
                step=self.step,
                ended_slots=tuple(slots.ended),
                started_slots=tuple(slots.started.values()),
                pages=tuple(slots.pages),
                copies=tuple(copies),
                items=tuple(items),
                preempted=tuple(state.preempted),
            )
        for sequence, found in self._started:
            if sequence.slot != NO_SLOT:  # else what it found was lost again before the step was
                sequence.account.start(sequence.sequence_id, found, self.now_seconds)
        state.counters.tokens_processed = self.num_processed_before + self._plan.num_tokens
        state.in_flight[self.step] = self.entries
        state.launched = self.step
        slots.clear_changes()
        copies.clear()
        state.preempted.clear()
        return self._plan

    # -- those that run

    def _split_running(self) -> tuple[list[SequenceState], list[SequenceState]]:
        """Running sequences of which one token is to be computed, and those with more, when the
        window pages that none of them needs any longer have gone. Oldest first, and before them
        those of higher precedence: nobody is preempted for one that comes later."""
        decoding: list[SequenceState] = []
        prefilling: list[SequenceState] = []
        running = self.state.running
        if self.state.has_precedences:
            running = sorted(running, key=by_precedence)
        short_of_pages, decode = self.memory.short_of_pages, decoding.append
        has_windows = self.memory.windows.num_groups > 0
        for sequence in running:
            if has_windows and not sequence.foretold:
                # The last known token is computed again where a mask comes late.
                least = min(sequence.lease.computed, sequence.num_known - 1)
                self.memory.windows.trim(sequence.lease, least)
            if sequence.paused:
                self._may_stand_still = True
                continue
            reach = sequence.num_known + sequence.pending
            remaining = reach - sequence.lease.computed
            if remaining == 1:
                if reach < sequence.max_length:
                    decode(sequence)
            elif remaining > 1:
                # Those of a prompt have their pages; those that a grammar forced may have none.
                may_grow = sequence.constrained and not has_windows
                grows = may_grow and short_of_pages([sequence.lease])
                (decoding if grows else prefilling).append(sequence)
            else:
                self._may_stand_still = True
        return decoding, prefilling

    def _decode(self, ready: list[SequenceState], prefilling: Sequence[SequenceState] = ()) -> None:
        """Launch a token of each sequence that has a page for it. One for which no page is left
        sits this step out: pages that are fenced now are free in the next. Prefills that lack the
        window pages of a token get these, so that nobody is preempted for them in vain."""
        memory, room = self.memory, self.room
        ready, wishes = wished_guesses(self, ready, prefilling)
        growing = memory.short_of_pages([s.lease for s in room.one_token_each(ready)])
        begun: list[SequenceState] = []
        if prefilling and memory.windows.num_groups:
            begun = [s for s in prefilling if memory.short_of_pages([s.lease])]
            growing += [s.lease for s in begun]
        if growing and not room.make_free(memory.num_pages_to_reserve(growing)):
            short = set(growing)
            self._make_room([s for s in (*ready, *begun) if s.lease in short])
            ready = [s for s in ready if s.phase is Phase.RUNNING]
            # Some that were beyond the budget may be within it now.
            growing = [s.lease for s in ready]
        if begun := sorted([s for s in begun if s.phase is Phase.RUNNING], key=by_precedence):
            self._with_pages(begun, {s.lease for s in begun})
        chosen = room.one_token_each(ready)
        if growing:
            chosen = self._with_pages(chosen, set(growing))
        alone, guessed = with_guesses(room, chosen, wishes)
        self._launch(alone, 1)
        launch_with_guesses(self, guessed)

    def _with_pages(
        self, ready: Sequence[SequenceState], growing: set[KVLease]
    ) -> Sequence[SequenceState]:
        """The sequences that have a page for their next token, or get it now. No lease but those
        that are `growing` may lack one."""
        memory, refused = self.memory, set[SequenceState]()
        for sequence in [s for s in ready if s.lease in growing]:
            self.working_on = sequence
            if not memory.reserve(sequence.lease, 1, self.step):
                refused.add(sequence)
        self.working_on = None
        return [s for s in ready if s not in refused] if refused else ready

    def _make_room(self, growing: list[SequenceState]) -> None:
        """Preempt until every growing sequence can have its page, now or after the step in flight.

        Counts what comes back, not what is held: fenced pages of a victim are on their way.
        """
        state = self.state
        growing.sort(key=by_precedence)
        while True:
            growing = [s for s in growing if s.phase is Phase.RUNNING]
            short = self.room.pages_short(growing)
            if short <= 0:
                return
            first = by_precedence(growing[0])
            behind = {s for s in state.running if by_precedence(s) > first or self._stands_still(s)}
            of_any_age = self.policy_calls.victim_of_any_age
            candidates = [
                s.view
                for s in state.running
                if (s in behind or (of_any_age and s.may_be_taken)) and not s.exhausted
            ]
            if not candidates:
                return
            victim = state.sequence_of(self.policy_calls.victim(candidates, short, self.view()))
            if victim not in behind:
                victim.count_taken()
            self._preempt(victim)
            if self.policy_calls.limits_decodes:
                state.reserved_next_page.update({s: s.lease.computed for s in growing})

    def _give_way(self, sequence: SequenceState) -> None:
        """Preempt for the one at which the last admission stopped. Before anything else is planned:
        none gives way that is in this step, or starts again in it."""
        self.state.stopped_at = None
        if sequence.phase is not Phase.WAITING or sequence.is_held:
            return
        self.working_on = sequence
        for victim in who_gives_way(self.state, sequence, self.view()):
            self._gave_way.add(victim)
            self.working_on = victim
            self.state.preempt(victim, self.step)
            sequence.num_displaced += 1
        self.working_on = None

    def _preempt(self, victim: SequenceState) -> None:
        self.working_on = victim
        self.state.preempt(victim, self.step)
        self.working_on = None
        self._has_preempted = True

    def _stands_still(self, sequence: SequenceState) -> bool:
        """Whether it has room that it can't use: its reader is behind, or its mask doesn't come."""
        return sequence.paused or (
            sequence.waits_for_mask and self.step - sequence.lease.last_step > self._patient_steps
        )

    def _displace_one(self) -> bool:
        """Others wait for room: the youngest sequence that stands still makes some, so that a slow
        reader or grammar holds up nobody but itself."""
        if not self._may_stand_still:
            return False
        for sequence in reversed(self.state.running):
            in_this_step = sequence.lease.last_step == self.step  # a sample that has just begun
            if self._stands_still(sequence) and not sequence.exhausted and not in_this_step:
                self._preempt(sequence)
                return True
        return False

    def _continue_prefills(self, prefilling: list[SequenceState]) -> None:
        """Next chunks of prompts that have begun, and were not just preempted."""
        prefilling = [s for s in prefilling if s.phase is Phase.RUNNING]
        if not prefilling or self.room.tokens <= 0:
            return
        view = self.view()
        if self.policy_calls.orders_prefills:
            named = self.policy_calls.order_prefills([s.view for s in prefilling], view)
            prefilling = [self.state.sequence_of(request) for request in named]
        for sequence in self._one_by_one(prefilling):
            if self.room.tokens <= 0:
                break
            if not (wanted := self.room.tokens_from(sequence, sequence.lease.computed)):
                continue
            count = self.policy_calls.chunk(sequence.view, wanted, view)
            if count := self.room.tokens_with_pages(sequence, count):
                self._launch([sequence], count)

    # -- those that wait

    def _admit(self, *, forced: bool) -> bool:
        """Start waiting sequences in the policy's order while there is room for them.

        Returns whether nothing was started for want of room.
        """
        state, room = self.state, self.room
        num_slots = room.num_slots_free
        lowest = lowest_precedence(state)
        if num_slots <= 0 and (forced or not state.waits_above(lowest)):
            return any(not s.is_held for s in state.waiting)
        view, gave_way = self.view(), () if forced else self._gave_way
        if forced or not self.policy_calls.orders:  # of thousands only those that start are seen
            candidates = state.queue.in_turn(gave_way)
        else:
            order = self.policy_calls.order(state.queue.views(gave_way), view)
            candidates = map(state.sequence_of, order)
        refused: list[tuple[SequenceState, Refusal | None]] = []
        started = 0
        blocked = False
        for sequence in self._one_by_one(candidates):
            if not room.has_tokens(sequence):
                continue
            request = sequence.view
            has_slots = slots_of(sequence) <= num_slots
            if not has_slots and sequence.precedence <= lowest:
                blocked = not started
                break
            verdict = Verdict.NOW if forced else self.policy_calls.admit(request, view)
            if isinstance(verdict, Refusal):
                refused.append((sequence, verdict))
            elif verdict is Verdict.NEVER:
                refused.append((sequence, None))
            if verdict is not Verdict.NOW:
                continue
            claim = None
            if has_slots:
                kept = None
                if self.policy_calls.reserves:
                    kept = self.policy_calls.reserve(request, self.memory.pool.num_pages, view)
                to_leave = room.pages_to_leave(sequence, kept)
                claim = room.claim(sequence, to_leave)
                if claim is None and forced and state.pins:
                    state.pins.end_all()
                    claim = room.claim(sequence, to_leave)
            if claim is None:
                blocked = not started
                state.stopped_at = sequence
                break
            count = room.tokens_from(sequence, claim.num_cached)
            if count:  # asked even where it must start: policies count starts by it
                chosen = self.policy_calls.chunk(request, count, view)
                count = chosen or (count if forced else 0)
            if count == 0:
                self.memory.claims.drop(claim)
                continue
            if not self._start(sequence, claim, count):
                blocked = not started
                break
            started += 1
            num_slots = room.num_slots_free
            if forced or room.tokens <= 0 or num_slots <= 0:
                break
        for sequence, refusal in refused:
            self.working_on = sequence
            self.reject(sequence, refusal)
        self.working_on = None
        return blocked

    def _one_by_one(self, sequences: Iterable[SequenceState]) -> Iterator[SequenceState]:
        for sequence in sequences:
            self.working_on = sequence
            yield sequence
            self.working_on = None

    def _start(self, sequence: SequenceState, claim: Claim, count: int) -> bool:
        """Let a waiting sequence run; False where pages that it needs are still fenced."""
        if not self.memory.begin(sequence.lease, claim, self.step):
            return False
        if self.memory.windows.num_groups:
            count = self.room.tokens_with_pages(sequence, count)
        found = min(claim.num_found, sequence.prompt_tokens)
        self.state.counters.tokens_cached += found
        self.room.started(sequence)
        self.state.start(sequence)
        self._started.append((sequence, found))
        self._launch([sequence], count)
        return True

    def _force_progress(self) -> None:
        """Nothing is in flight and nothing was chosen: go on with the oldest sequence, whatever the
        policy says and whoever's mask is late, so that an engine with work never stands still."""
        self._patient_steps = 0
        self.room = Room(self.state, self.step)
        for sequence in self.state.running:
            if sequence.is_held or sequence.remaining <= 1:
                continue
            self.working_on = sequence
            wanted = self.room.tokens_from(sequence, sequence.lease.computed)
            if count := self.room.tokens_with_pages(sequence, wanted):
                self._launch([sequence], count)
                return
        if self.policy_calls.limits_decodes or any(s.waits_for_mask for s in self.state.running):
            decoding, _ = self._split_running()
            self._decode(decoding[:1])
            if self.entries:
                return
        while len(self.state.queue) and self._admit(forced=True):
            if not self._displace_one():
                break

    # -- both

    def _launch(self, sequences: Sequence[SequenceState], count: int) -> None:
        """Add `count` tokens of each sequence to the step, and move its state past them.

        Most sequences of most steps decode one token, so the loop does nothing that these don't
        need, and gives an item no more fields than they have.
        """
        memory, step = self.memory, self.step
        page_size, publishes = memory.page_size, memory.tree is not None
        add, carry = self.entries.append, self.state.slots.carry
        for sequence in sequences:
            self.working_on = sequence
            lease, pending, known = sequence.lease, sequence.pending, sequence.num_known
            start, written_step = lease.computed, lease.last_step
            page_ids = lease.page_table.page_ids
            token_ids = PENDING_IDS if pending else sequence.ids(start, count)
            if lease.carried != lease.covered:
                carry(sequence.slot, lease)
            memory.advance(lease, count, step)
            is_full = publishes and known >= (lease.published + 1) * page_size <= start + count
            if is_full and not sequence.foretold:
                memory.publish(lease, sequence.final_ids)
            # The last token of a sequence, behind its prompt, so that no sample is to fork off it.
            if start + 1 == known + pending and start >= sequence.prompt_tokens:
                sequence.pending, rows = pending + 1, sequence.decode_rows
                item = WorkItem(
                    DECODE, sequence.sequence_id, sequence.slot, start, 1, token_ids, rows
                )
                add((sequence.run, item, page_ids))
                continue
            rows, family = self._rows(sequence, start, count, written_step)
            scored, pooled = self._wanted_of_prompt(sequence, start, start + count)
            item = WorkItem(
                kind=PREFILL,
                sequence_id=sequence.sequence_id,
                slot=sequence.slot,
                start=start,
                count=count,
                token_ids=token_ids,
                rows=rows,
                scored=scored,
                pooled=pooled,
            )
            self._has_families |= len(family) > 1
            # All at once: what raises in between would tear the samples apart.
            self.entries += [(one.run, item, page_ids) for one in family]
        self.room.take_tokens(sequences, count)
        self.working_on = None

    def _rows(
        self, sequence: SequenceState, start: int, count: int, written_step: int
    ) -> tuple[tuple[SampleRow, ...], list[SequenceState]]:
        """What an item samples that is no decode, and all sequences that get a token of it: further
        samples of a prompt fork off its first one here."""
        family = [sequence]
        if start + count != sequence.num_known + sequence.pending:
            return NO_ROWS, family
        sequence.pending += 1
        family += self.state.fork_samples(sequence, self.step, written_step)
        rows = [SampleRow(offset=count - 1, slot=one.slot) for one in family]
        return tuple(rows), family

    def _wanted_of_prompt(
        self, sequence: SequenceState, start: int, end: int
    ) -> tuple[ScoredTokens | None, PooledTokens | None]:
        """What a step gives beside tokens that computes the positions `[start, end)`."""
        scored = pooled = None
        if num_scored := sequence.num_scored_by(end):
            first = sequence.score_at
            targets = sequence.ids(first, num_scored)
            scored = ScoredTokens(offset=first - 1 - start, target_ids=targets)
            sequence.score_at = first + num_scored
            self.room.scored_tokens -= num_scored
        if sequence.pooling is not None:
            pooled = sequence.pooling.launch(start, end)
        if (num_prefilled := min(end, sequence.prompt_tokens) - start) > 0:
            self.state.counters.tokens_prefilled += num_prefilled
        return scored, pooled
