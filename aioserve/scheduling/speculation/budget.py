"""The draft budget of a step: which sequences have draft tokens behind their next token, and how
many.

Steps overlap, so where an item begins that follows draft tokens nobody knows but the runner. Here
all is counted at the most that it can be: tokens in flight, those computed, and the pages for them.
When a step is done, rejected draft tokens come off again
(`aioserve.scheduling.speculation.verify`).

    known 10, in flight: the last token and 3 drafts       pending 4, computed 13
    planned behind it:   the last of them and 3 drafts     pending 8, computed 17
    first step: 2 of 3 accepted, 3 tokens                  known 13, pending 4, computed 16
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from aioserve.scheduling.parts.forced import forced_ahead
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.speculation.drafts import SequenceDrafts
from aioserve.scheduling.step_builder import StepBuilder

__all__ = ["draft_budget"]


def draft_budget(
    step: StepBuilder,
    ready: list[SequenceState],
    prefilling: Sequence[SequenceState],
    forced: Collection[SequenceState],
) -> tuple[list[SequenceState], dict[SequenceState, int]]:
    """Sequences of those `ready` for their next token that don't sit the step out, before any of
    them has a page for it; and of those with draft tokens the most that are worth their time, maybe
    none. Sequences in `forced` have forced tokens to verify instead."""
    state, lengths = step.state, step.state.speculation.lengths
    left = step.room.budget.tokens - len(ready)
    num_prefilled = max(0, min(left, sum([s.remaining for s in prefilling])))
    drafts = [(s, s.drafts) for s in ready if s.drafts is not None]
    are_verified = not any(one.unverified_tokens for _, one in drafts)
    if not drafts:
        return ready, {}
    if are_verified and lengths.rest(len(ready) + num_prefilled, drafts[-1][1].record):
        return ready, {}
    able = [(s, d) for s, d in drafts if s not in forced and _may_have_drafts(s)]
    if not able:
        return ready, {}
    counts = lengths.choose(
        [one.record for _, one in able],
        len(ready) - len(able),
        num_prefilled,
        # Prompts that have begun, or wait, are not to wait longer for what may be wrong.
        left // 2 if prefilling or len(state.queue) else left,
    )
    if state.policy_calls.limits_drafts:
        view = step.view()
        asked = zip(able, counts, strict=True)
        counts = [state.policy_calls.draft(s.view, n, view) if n else 0 for (s, _), n in asked]
    skipped: set[SequenceState] = set()
    budget: dict[SequenceState, int] = {}
    for (sequence, one), count in zip(able, counts, strict=True):
        if not count and not one.unverified_tokens:
            continue
        if not sequence.constrained or _is_known_ahead(sequence):
            budget[sequence] = count
        elif _skips_for_mask(sequence, one):
            skipped.add(sequence)
    return [s for s in ready if s not in skipped] if skipped else ready, budget


def _may_have_drafts(sequence: SequenceState) -> bool:
    """True if its next token is one of the answer, so that no sample is to fork off it, and the
    last one there is: some that are forced may be known behind it. None stand before tokens that
    are forced and are yet to be drawn."""
    return (
        sequence.lease.computed >= sequence.prompt_tokens
        and sequence.remaining == 1
        and not (sequence.constrained and forced_ahead(sequence))
    )


def _is_known_ahead(sequence: SequenceState) -> bool:
    """True if all tokens of a constrained sequence are known, and what may come next: draft tokens
    need masks as well, which are made from that. None of its tokens is forced and yet to be
    drawn."""
    return not sequence.pending and sequence.is_masked


def _skips_for_mask(sequence: SequenceState, drafts: SequenceDrafts) -> bool:
    """True if a sequence waits for what may come next: until its steps in flight are done, and then
    for a step. Where a grammar takes longer, it has no draft tokens."""
    waits = bool(sequence.pending) or not drafts.skipped_for_mask
    drafts.skipped_for_mask = not sequence.pending and waits
    return waits
