"""Recovery of sequences after a failed step, broken logits, a late mask, or a planning error.

A failure ends the sequences that it hit. No sequence goes on from KV that may be wrong, and all
others go on undisturbed. A late mask takes its sequence back by a token.

A worked example. Pages hold 4 tokens; step 7 computes the 8 tokens of A's prompt, and B begins with
the same 4:

    plan 7     A: tokens 0..7 into pages 10, 11. Both are published: the prefix tree names them.
    plan 8     A: the token that step 7 samples, into page 14.
               C, which shares nothing with them: one token into page 13.
               B finds page 10 in the tree and borrows it: B: tokens 4..6 into page 12.
    step 7     fails: what pages 10 and 11 hold is unknown.

    fail(7)    1. The tree withdraws what step 7 was to write: pages 10 and 11 can't be found.
               2. A was in step 7: it ends with an error, its pages come back behind step 8.
               3. B borrowed 4 tokens, and the tree's path of B now covers 0 pages: what B computed
                  over page 10 is worthless. It begins again, from the waiting list.
               4. C goes on.
    commit(8)  brings tokens for A, B and C. A has no slot any more, and B none or another than the
               row names: their tokens are dropped. C's counts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from itertools import chain

import msgspec
import numpy as np

from aioserve.paging.pages import capacity_tokens, full_pages
from aioserve.request import FinishReason
from aioserve.scheduling.parts.base import BrokenRow, LateRow
from aioserve.scheduling.parts.table import PARTS
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.step_builder import StepBuilder
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.steps.plan import ItemKind

__all__ = [
    "after_bad_rows",
    "after_failed_planning",
    "after_failed_step",
    "after_late_rows",
    "draw_again",
]

logger: logging.Logger = logging.getLogger(__name__)


def after_failed_step(state: SchedulerState, step: int, error: str) -> list[SequenceUpdate]:
    """End the sequences in step number `step`, which failed as a whole. Sequences planned since
    that took over what it should have written begin again."""
    memory, page_size = state.memory, state.memory.page_size
    failed, parts = state.in_flight.pop(step), state.parts_in_flight.pop(step)
    cut = memory.withdraw(step)
    for run, item, _ in failed:
        # A later step may have completed and published a page that this one wrote in part.
        known_ids = run.sequence.known_ids
        begin = min([part.first_written(item, len(known_ids)) for part in parts])
        first = full_pages(begin, page_size)
        cut |= memory.forget(run.lease.namespace, known_ids, first)
    for run, *_ in chain.from_iterable(state.in_flight.values()):
        # A later step may have copied back a page that this one should have copied to the host.
        lease = run.lease
        if lease.inherited_step >= step:
            first = full_pages(lease.cached, page_size)
            cut |= memory.forget(lease.namespace, run.sequence.known_ids, first)
    state.complete(step)
    ended = [one for run, *_ in failed if run.goes_on for one in run.sequence.family]
    state.end(ended, publish=False)
    lost = state.shorten(cut)
    for sequence in state.sequences.values():
        swapped = sequence.lease.swapped
        if swapped is not None and swapped.step >= step:
            memory.forget_swapped(sequence.lease, state.launched)
    for sequence in list(state.running):
        if sequence in lost or sequence.lease.inherited_step >= step:
            sequence.lose_found()
            state.begin_again(sequence)
    return [SequenceUpdate(s.sequence_id, None, FinishReason.ERROR, error) for s in ended]


def after_late_rows(state: SchedulerState, late: Iterable[LateRow]) -> None:
    """Take sequences back to a token whose mask came late, or after which a forced token went
    wrong. Results of later steps for them are dropped. Other sequences don't wait for the mask."""
    memory = state.memory
    for run, item, num_taken in late:
        sequence = run.sequence
        if not run.goes_on:
            continue
        end = item.end
        if item.kind is ItemKind.VERIFY:
            end = item.start + max(1, num_taken)
        if end == sequence.prompt_tokens:
            # Samples share these pages, and others may have found them, so nothing may be
            # rewritten.
            memory.publish(sequence.lease, sequence.known_ids, leaving=True)
            state.begin_again(sequence)
            continue
        sequence.go_back()
        state.drop_launched(sequence)
        memory.truncate(sequence.lease, end)
        if sequence.masked_to >= sequence.num_known:
            draw_again(state, sequence)


def draw_again(state: SchedulerState, sequence: SequenceState) -> None:
    """Compute the last token once more if the mask for what comes next was late: the logits after
    it are gone. Its page isn't published before the next token is known
    (`SequenceState.final_ids`), so no other sequence reads what is rewritten."""
    if sequence.waits_for_mask:
        state.memory.truncate(sequence.lease, sequence.num_known - 1)


def after_bad_rows(state: SchedulerState, broken: list[BrokenRow]) -> list[SequenceUpdate]:
    """Handle rows whose logits were not numbers: no sequence may go on from KV that may be to
    blame. All KV of these sequences may be, except leading pages over which another has sampled a
    token.

    Sequences that took over suspect KV begin again, alone. KV of others can't break them any more,
    so no sequence begins again for this twice. A sequence that took over none is to blame itself,
    and ends.
    """
    suspects = [
        (row.run.lease.namespace, row.run.sequence, _num_proven_pages(state, row)) for row in broken
    ]
    to_blame = _to_blame(state, broken, [num_pages for _, _, num_pages in suspects])
    state.end([row.run.sequence for row in to_blame], publish=False)
    while suspects:
        namespace, suspect, num_pages = suspects.pop()
        state.shorten(state.memory.forget(namespace, suspect.known_ids, num_pages))
        proven = capacity_tokens(num_pages, state.memory.page_size)
        for sequence in list(state.running):
            lease = sequence.lease
            if lease.namespace != namespace or lease.borrowed <= proven or sequence.is_alone:
                continue
            if sequence.begins_like(suspect, proven + 1):
                _begin_again_alone(state, sequence)
                suspects.append((namespace, sequence, num_pages))
    for row in broken:
        if row.run.goes_on:  # a sample that shares the fate of another
            _begin_again_alone(state, row.run.sequence)
    return [
        SequenceUpdate(row.run.sequence.sequence_id, None, FinishReason.ERROR, row.error)
        for row in to_blame
    ]


def _to_blame(
    state: SchedulerState, broken: list[BrokenRow], proven_pages: list[int]
) -> list[BrokenRow]:
    """Rows whose own tokens are to blame: any KV that they took over is proven. Samples that fork
    off a prompt in this very step share the fate of the first."""
    found: list[BrokenRow] = []
    of_items: dict[int, bool] = {}
    for row, num_pages in zip(broken, proven_pages, strict=True):
        sequence, item = row.run.sequence, row.item
        if not row.run.goes_on:
            continue
        proven = capacity_tokens(num_pages, state.memory.page_size)
        own = sequence.is_alone or row.run.lease.borrowed <= proven
        if sequence.sequence_id == item.sequence_id:
            of_items[id(item)] = own
        if of_items.get(id(item), own):
            found.append(row)
    return found


def _begin_again_alone(state: SchedulerState, sequence: SequenceState) -> None:
    sequence.lose_found()
    for part in PARTS:
        part.distrust(sequence)
    state.begin_again(sequence)
    sequence.share_nothing()


def _num_proven_pages(state: SchedulerState, broken: BrokenRow) -> int:
    """Count the row's first pages over which another sequence has sampled. The count is 0 if groups
    give pages back: the other may have read none of these, so it proves nothing."""
    page_ids = broken.page_ids
    if not state.memory.keeps_all:
        return 0
    most = 0
    for sequence in state.running:
        proven = sequence.proven_pages
        shared = min(len(proven), len(page_ids))
        if sequence is not broken.run.sequence and shared > most:
            differing = np.flatnonzero(proven[:shared] != page_ids[:shared])
            most = max(most, int(differing[0]) if len(differing) else shared)
    return most


def after_failed_planning(
    state: SchedulerState, planned: StepBuilder, error: Exception
) -> list[SequenceUpdate]:
    """End the sequence that was being planned when an exception was raised, and no other. The part
    planned before remains a step."""
    culprits = _in_the_middle(state, planned)
    logger.error(
        "planning step %d failed; what ends: %s",
        planned.number,
        ", ".join(map(repr, culprits)) or "nothing, since no sequence was being planned",
        exc_info=error,
    )
    updates = [
        SequenceUpdate(s.sequence_id, None, FinishReason.ERROR, repr(error), cause=error)
        for s in culprits
    ]
    state.lose(culprits, planned.number if planned.entries else state.launched)
    # Nothing tells apart pages that culprits published, and won't write, from those of others.
    lost = state.shorten(state.memory.withdraw(planned.number))
    _leave_out(planned, lost)
    for sequence in lost:
        if not planned.entries:
            state.memory.retract(sequence.lease, state.launched)
        state.begin_again(sequence)
    return updates


def _leave_out(planned: StepBuilder, lost: Iterable[SequenceState]) -> None:
    """Take sequences out of the step, and their rows out of its items."""
    out = set(lost)
    kept = [(run, item, ids) for run, item, ids in planned.entries if run.sequence not in out]
    slots = {run.slot for run, _, _ in kept}
    left = {run.sequence.sequence_id for run, _, _ in kept}
    items = {id(item): item for _, item, _ in kept}
    for key, item in items.items():
        if any(row.slot not in slots for row in item.rows):
            for part in PARTS:
                item = msgspec.structs.replace(item, **part.keep(item, slots, left))
            items[key] = item
    planned.entries = [(run, items[id(item)], ids) for run, item, ids in kept]


def _in_the_middle(state: SchedulerState, planned: StepBuilder) -> list[SequenceState]:
    """The sequence that was being worked on, and its samples that were about to fork off."""
    culprit = planned.working_on
    in_the_step = {run.sequence for run, *_ in planned.entries}
    if culprit is None or culprit in in_the_step:
        return []
    return [
        sequence
        for sequence in state.sequences.values()
        if sequence is culprit
        or (
            sequence.request is culprit.request
            and sequence not in in_the_step
            and (
                sequence.phase is Phase.PENDING_SAMPLE or sequence.lease.last_step == planned.number
            )
        )
    ]
