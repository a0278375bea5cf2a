"""Builder of one step: its items so far, the room that is left, and its plan in the end.

A step is built one sequence at a time, because a request may find in the prefix tree what another
computes in the same step. The sequence whose state is being changed is `working_on`. An exception
spoils only this sequence, and `entries` is then a step without it.

Other modules decide what the step computes (`aioserve.scheduling.planner`, `making_room`,
`admission`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from aioserve.kv.memory import KVMemory
from aioserve.scheduling.parts.base import ItemTokens, RowPart
from aioserve.scheduling.parts.table import DRAW, MASK, OF_PROMPTS, PARTS, PLAIN, VERIFY
from aioserve.scheduling.policy_calls import PolicyCalls
from aioserve.scheduling.room import Room
from aioserve.scheduling.sequence import NO_SLOT, Entry, SequenceState
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.view import SchedulerView
from aioserve.steps.plan import PENDING_IDS, ItemKind, StepPlan, WorkItem

__all__ = ["PATIENT_STEPS", "StepBuilder", "Verified"]

PREFILL, DECODE = ItemKind.PREFILL, ItemKind.DECODE

PATIENT_STEPS = 16
"""Steps for which a sequence whose mask is late keeps the room that others want. Most masks are
late by one step."""

Verified = tuple[RowPart, SequenceState, int]
"""Part that asks, a sequence, and the number of tokens to verify after its next one. The number may
be 0."""


class StepBuilder:
    """Builds the step after the last one launched. Used once."""

    def __init__(self, state: SchedulerState, now_seconds: float) -> None:
        self.state = state
        self.number: int = state.launched + 1
        self.memory: KVMemory = state.memory
        self.policy_calls: PolicyCalls = state.policy_calls
        self.room: Room = Room(state, self.number)
        self.now_seconds = now_seconds
        self.num_processed_before: int = state.counters.tokens_processed
        """Tokens that all steps before this one have computed."""
        self.entries: list[Entry] = []
        self.working_on: SequenceState | None = None
        self.gave_way: set[SequenceState] = set()
        """Sequences that were preempted for a waiting one, or by the policy. They don't start again
        in this step."""
        self.has_preempted: bool = False
        """True once a running sequence was preempted for others that run. No waiting sequence
        starts in this step."""
        self.may_stand_still: bool = False
        """True if a running sequence had nothing to compute when the step was begun."""
        self.patient_steps: int = PATIENT_STEPS
        self.started: list[tuple[SequenceState, int]] = []
        """Sequences started in this step, with the prompt tokens that each found in the prefix
        tree."""
        self._parts: set[RowPart] = {DRAW}
        self._has_families = False
        self._plan: StepPlan | None = None

    def view(self) -> SchedulerView:
        """View of the scheduler for the policy, as it is now."""
        processed = self.num_processed_before + self.room.budget.taken
        return self.state.view(self.number, self.now_seconds, processed)

    def one_by_one(self, sequences: Iterable[SequenceState]) -> Iterator[SequenceState]:
        """Yield sequences; each is `working_on` until the next one is taken."""
        for sequence in sequences:
            self.working_on = sequence
            yield sequence
            self.working_on = None

    def preempt(self, victim: SequenceState) -> None:
        """Preempt a sequence for others that run, or start in a later step."""
        self.working_on = victim
        self.state.preempt(victim, self.number)
        self.working_on = None
        self.has_preempted = True

    # -- items

    def launch(self, sequences: Sequence[SequenceState], count: int) -> None:
        """Add `count` tokens of each sequence to the step, and advance its state past them.

        Most sequences of most steps decode one token. The loop does nothing beyond what these need,
        and sets only the fields of their items.
        """
        memory, number = self.memory, self.number
        page_size, publishes = memory.page_size, memory.tree is not None
        add, carry = self.entries.append, self.state.slots.carry
        for sequence in sequences:
            self.working_on = sequence
            lease, pending, known = sequence.lease, sequence.pending, sequence.num_known
            start, index, written_step = lease.computed, lease.entries, lease.last_step
            page_ids = lease.page_table.page_ids
            token_ids = PENDING_IDS if pending else sequence.ids(start, count)
            if lease.carried != lease.covered:
                carry(sequence.slot, lease)
            memory.advance(lease, count, number)
            is_full = publishes and known >= (lease.published + 1) * page_size <= start + count
            if is_full and not sequence.forced_in_flight:
                memory.publish(lease, sequence.final_ids)
            if sequence.constrained:
                self._parts.add(MASK)
            # The last token of a sequence, after its prompt, so that no sample forks off it.
            if start + 1 == known + pending and start >= sequence.prompt_tokens:
                sequence.pending, rows = pending + 1, sequence.decode_rows
                item = WorkItem(
                    DECODE, sequence.sequence_id, sequence.slot, start, index, 1, token_ids, rows
                )
                add((sequence.run, item, page_ids))
                continue
            family: Sequence[SequenceState] = ()
            if start + count == known + pending:
                forked = self.state.fork_samples(sequence, number, written_step)
                family = (sequence, *forked)
            fields = self._asked_for(ItemTokens(sequence, start, start + count, family))
            places = sequence.slot, start, index, count
            item = WorkItem(PREFILL, sequence.sequence_id, *places, token_ids, **fields)
            # All at once: an exception in between would tear the samples apart.
            self.entries += [(one.run, item, page_ids) for one in family or (sequence,)]
        self.room.budget.take(sequences, count)
        self.working_on = None

    def _asked_for(self, asked: ItemTokens) -> dict[str, Any]:
        """Fields that parts add to an item of known tokens."""
        fields: dict[str, Any] = {}
        for part in OF_PROMPTS:
            if more := part.ask(asked):
                self._parts.add(part)
                fields |= more
        if (scored := fields.get("scored")) is not None:
            self.room.scored_tokens -= len(scored)
        self._has_families |= len(asked.family) > 1
        num_prefilled = min(asked.end, asked.sequence.prompt_tokens) - asked.start
        self.state.counters.tokens_prefilled += max(0, num_prefilled)
        return fields

    def launch_verified(self, verified: Sequence[Verified]) -> None:
        """Add the next token of each sequence, and those to verify after it, to the step."""
        memory, budget = self.memory, self.room.budget
        budget.take([sequence for _, sequence, _ in verified], 1)
        for part, sequence, wanted in verified:
            self.working_on = sequence
            count = 1 + min(wanted, budget.left_for(sequence))
            lease, page_ids = sequence.lease, sequence.lease.page_table.page_ids
            start, index = lease.computed, lease.entries
            if lease.carried != lease.covered:
                self.state.slots.carry(sequence.slot, lease)
            fields = part.ask(ItemTokens(sequence, start, start + count))
            item = WorkItem(
                kind=ItemKind.VERIFY,
                sequence_id=sequence.sequence_id,
                slot=sequence.slot,
                start=start,
                index=index,
                count=count,
                rows=sequence.decode_rows,
                **fields,
            )
            memory.advance(lease, count, self.number)
            if memory.tree is not None and not sequence.forced_in_flight:
                memory.publish(lease, sequence.final_ids)
            if sequence.constrained:
                self._parts.add(MASK)
            self._parts.add(part)
            self.entries.append((sequence.run, item, page_ids))
            budget.take([sequence], count - 1)
        self.working_on = None

    # -- the plan

    def plan(self) -> StepPlan | None:
        """Build the plan of the step; None for an empty step.

        After an exception it may be called again: it reads everything before it changes anything,
        and reuses the plan.
        """
        if not self.entries:
            return None
        state = self.state
        slots, copies = state.slots, self.memory.copies
        if self._plan is None:
            items = [item for _, item, _ in self.entries]
            if self._has_families:  # one entry for each row
                items = {id(item): item for item in items}.values()
            self._plan = StepPlan(
                step=self.number,
                ended_slots=tuple(slots.ended),
                started_slots=tuple(slots.started.values()),
                pages=tuple(slots.pages),
                copies=tuple(copies),
                items=tuple(items),
                preempted=tuple(state.preempted),
            )
        parts, asked = PLAIN, self._parts
        if state.speculation.is_on:
            asked.add(VERIFY)
        if len(asked) > 1:
            parts = tuple([part for part in PARTS if part in asked])
        for sequence, found in self.started:
            if sequence.slot != NO_SLOT:  # otherwise what it found is lost
                sequence.account.start(sequence.sequence_id, found, self.now_seconds)
        state.counters.tokens_processed = self.num_processed_before + self._plan.num_tokens
        state.in_flight[self.number] = self.entries
        state.parts_in_flight[self.number] = parts
        state.launched = self.number
        if slots.ended or slots.started or slots.pages:
            slots.clear_changes()
        copies.clear()
        state.preempted.clear()
        return self._plan
