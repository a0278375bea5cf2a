"""Which sequences of a step have guesses behind their next token, and how many.

Steps overlap, so where an item begins that follows guesses nobody knows but the runner. Here all is
counted at the most that it can be: tokens in flight, those computed, and the pages for them. When a
step is done, what was guessed in vain comes off again (`settle`).

    known 10, in flight: the last token and 3 guesses      pending 4, computed 13
    planned behind it:   the last of them and 3 guesses    pending 8, computed 17
    first step: 2 of 3 right, 3 tokens                     known 13, pending 4, computed 16

Tokens that a grammar forces, and that are drawn all the same, are verified in the same way. They
are no guesses: the plan brings their ids, no drafter is asked, and as all of them come, it is known
where the next item begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from aioserve.kv.memory import KVMemory
from aioserve.scheduling.draft_lengths import FIRST_STEPS, DraftRecord
from aioserve.scheduling.room import Room
from aioserve.scheduling.sequence import Phase, Run, SequenceState
from aioserve.scheduling.state import Entry, SchedulerState
from aioserve.scheduling.updates import SchedulerCounters
from aioserve.scheduling.view import SchedulerView
from aioserve.steps.outcome import LookedAhead, StepOutcome
from aioserve.steps.plan import DRAFT_TOKEN, PENDING_TOKEN, ItemKind, StepPlan, WorkItem

__all__ = [
    "Guessed",
    "Wishes",
    "asks_drafter",
    "launch_with_guesses",
    "num_not_drafted",
    "settle",
    "take_looks",
    "wished_guesses",
    "with_guesses",
]


class Planning(Protocol):
    """What is needed here of the planner of a step."""

    state: SchedulerState
    step: int
    room: Room
    entries: list[Entry]
    working_on: SequenceState | None

    def view(self) -> SchedulerView: ...


Wishes = dict[SequenceState, int]
"""The most guesses that are worth their time behind a sequence's next token, maybe none."""
Guessed = list[tuple[SequenceState, int]]
"""Sequences with the number of guesses behind the next token of each, maybe none."""


def wished_guesses(
    planner: Planning,
    ready: list[SequenceState],
    prefilling: Sequence[SequenceState],
) -> tuple[list[SequenceState], Wishes]:
    """Sequences of those `ready` for their next token that don't sit the step out, before any of
    them has a page for it; and for whom of them how many guesses are worth their time."""
    state = planner.state
    wishes: Wishes = _wished_forced(state) if state.forced else {}
    if not state.drafts or not ready:
        return ready, wishes
    alone = not wishes and not prefilling and not any(s.unsure for s in ready)
    if alone and state.draft_lengths.rests(len(ready)):
        return ready, wishes
    able = [s for s in ready if _may_have_guesses(s) and s not in wishes]
    if not able:
        return ready, wishes
    room, policy_calls = planner.room, state.policy_calls
    left = room.tokens - len(ready)
    lengths = state.draft_lengths.choose(
        [s.drafts for s in able if s.drafts is not None],
        len(ready) - len(able),
        max(0, min(left, sum([s.remaining for s in prefilling]))),
        # Prompts that have begun, or wait, are not to wait longer for what may be wrong.
        left // 2 if prefilling or len(state.queue) else left,
    )
    if policy_calls.limits_drafts:
        view = planner.view()
        asked = zip(able, lengths, strict=True)
        lengths = [policy_calls.draft(s.view, n, view) if n else 0 for s, n in asked]
    waiting: set[SequenceState] = set()
    for sequence, length in zip(able, lengths, strict=True):
        if sequence.constrained and (length or sequence.unsure) and not _is_told(sequence):
            if _sits_out(sequence):
                waiting.add(sequence)
        elif length or sequence.unsure:
            wishes[sequence] = length
    return [s for s in ready if s not in waiting] if waiting else ready, wishes


def with_guesses(
    room: Room, chosen: Sequence[SequenceState], wishes: Wishes
) -> tuple[Sequence[SequenceState], Guessed]:
    """Split `chosen`, each of which has a page for its next token, into those whose next token is
    computed alone, and those with guesses behind it or whose place nobody knows yet."""
    guessed: Guessed = []
    if not wishes:
        return chosen, guessed
    for sequence in chosen:
        if (wished := wishes.get(sequence)) is not None:
            count = room.guesses_with_pages(sequence, wished)
            if count or sequence.unsure:
                guessed.append((sequence, count))
    named = {sequence for sequence, _ in guessed}
    return [s for s in chosen if s not in named], guessed


def _wished_forced(state: SchedulerState) -> Wishes:
    """Sequences with forced tokens ahead that are to be drawn, and how many. Each is a row of
    logits, of which a step has as many as it may have sequences."""
    left = state.max_num_seqs - len(state.sequences)
    wishes: Wishes = {}
    for sequence in [*state.forced]:
        if sequence.masked_to <= sequence.num_known:
            del state.forced[sequence]
        elif sequence.phase is Phase.RUNNING and (ahead := len(sequence.forced_ahead)) and left > 0:
            count = min(left, ahead)
            wishes[sequence] = count
            left -= count
    return wishes


def _may_have_guesses(sequence: SequenceState) -> bool:
    """Whether its next token is one of the answer, so that no sample is to fork off it, and the
    last one there is: some that are forced may be known behind it. Nothing is guessed of those that
    are forced and are yet to be drawn."""
    return (
        sequence.drafts is not None
        and sequence.lease.computed >= sequence.prompt_tokens
        and sequence.remaining == 1
        and not (sequence.constrained and sequence.forced_ahead)
    )


def _is_told(sequence: SequenceState) -> bool:
    """Whether all tokens of a constrained sequence are known, and what may come next: guesses need
    masks as well, which are made from that. None of its tokens is forced and yet to be drawn."""
    return not sequence.pending and sequence.is_masked


def _sits_out(sequence: SequenceState) -> bool:
    """Whether one that isn't told waits for it: until its steps in flight are done, and then for
    a step. Where a grammar takes longer, its next token is computed as if there were no guesses."""
    waits = bool(sequence.pending) or not sequence.sat_out
    sequence.sat_out = not sequence.pending and waits
    return waits


def launch_with_guesses(planner: Planning, guessed: Guessed) -> None:
    """Add the next token of each sequence, and the guesses behind it, to the step."""
    room = planner.room
    room.take_tokens([sequence for sequence, _ in guessed], 1)
    for sequence, wanted in guessed:
        planner.working_on = sequence
        count = min(wanted, room.tokens_left_for(sequence))
        lease, page_ids = sequence.lease, sequence.lease.page_table.page_ids
        if lease.carried != lease.covered:
            planner.state.slots.carry(sequence.slot, lease)
        item = _item(sequence, count)
        _advance(planner.state.memory, sequence, count, planner.step)
        planner.entries.append((sequence.run, item, page_ids))
        room.take_tokens([sequence], count)
    planner.working_on = None


def _item(sequence: SequenceState, count: int) -> WorkItem:
    start = sequence.lease.computed
    token_ids = np.full(1 + count, DRAFT_TOKEN, np.int32)
    token_ids[0] = PENDING_TOKEN if sequence.pending else sequence.ids(start, 1)[0]
    if forced := sequence.forced_ahead:
        token_ids[1:] = forced[:count]
    return WorkItem(
        ItemKind.VERIFY,
        sequence.sequence_id,
        sequence.slot,
        start,
        1 + count,
        token_ids,
        sequence.decode_rows,
        least_start=start - sequence.unsure,
    )


def _advance(memory: KVMemory, sequence: SequenceState, count: int, step: int) -> None:
    lease, certain = sequence.lease, bool(sequence.forced_ahead)
    memory.advance(lease, 1 + count, step)
    if memory.tree is not None and not sequence.foretold:
        memory.publish(lease, sequence.final_ids)
    sequence.pending += 1 + count
    sequence.unsure += 0 if certain else count
    sequence.sat_out = False


def settle(
    memory: KVMemory,
    counters: SchedulerCounters,
    usual: DraftRecord,
    run: Run,
    item: WorkItem,
    taken: int,
    drafted: int,
    branched: int,
) -> None:
    """An item of a run that goes on has brought `taken` tokens, which are known now; the drafter
    had made `drafted` guesses, and `branched` tokens were computed beside them."""
    sequence, guessed = run.sequence, item.count - 1
    sequence.pending -= guessed  # the one behind them is off already
    sequence.unsure -= guessed
    memory.retreat(run.lease, item.count - taken)
    accepted = min(taken - 1, drafted)
    if (record := sequence.drafts) is not None:
        if record.steps < FIRST_STEPS:
            usual.verified(guessed, drafted, accepted, branched)
        record.verified(guessed, drafted, accepted, branched)
    sequence.account.drafted_tokens += drafted
    sequence.account.accepted_tokens += accepted
    for totals, count in ((counters.drafted, drafted), (counters.accepted, accepted)):
        totals += [0] * (drafted - len(totals))
        for place in range(count):
            totals[place] += 1


def take_looks(
    usual: DraftRecord, entries: Sequence[Entry], looks: Mapping[int, LookedAhead]
) -> None:
    """It is known what guesses came to that no step verified, by the rows of a step's entries."""
    runs = [run for run, item, _ in entries if item.rows]
    for index, found in looks.items():
        sequence = runs[index].sequence
        if sequence.slot != runs[index].slot or sequence.drafts is None:
            continue
        most = sequence.drafts.limit
        drafted, accepted = min(found.drafted, most), min(found.accepted, most)
        for record in (sequence.drafts, usual):
            record.looked_ahead(found.asked, min(found.asked, most), drafted, accepted)


def asks_drafter(plan: StepPlan) -> bool:
    """Whether something of a plan follows guesses or asks for some."""
    return any(item.kind is ItemKind.VERIFY and not item.brings_ids for item in plan.items)


def num_not_drafted(plan: StepPlan, outcome: StepOutcome) -> int:
    """Tokens of a plan for guesses that the drafter didn't make: they weren't computed."""
    if not plan.num_verified:
        return 0
    guessed = sum([item.count - 1 for item in plan.items if item.kind is ItemKind.VERIFY])
    return guessed - sum(outcome.drafted.values()) - sum(outcome.branched.values())
