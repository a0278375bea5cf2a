"""Draft budget of a step: which sequences have draft tokens after their next token, and how many.

Steps overlap, so only the runner knows where an item begins that follows draft tokens. Here all
counts are upper bounds: tokens in flight, computed tokens, and the pages for them. When a step is
done, rejected draft tokens are subtracted again (`aioserve.scheduling.speculation.verify`).

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
    """Return the sequences of `ready` that take part in the step, and the most draft tokens worth
    verifying for some of them, maybe 0.

    Called before the sequences have pages for their next token. Sequences in `forced` have forced
    tokens to verify instead.
    """
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
        # Prompts in progress or waiting must not wait longer for tokens that may be wrong.
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
    """True if the next token belongs to the completion, so that no sample forks off it, and is the
    last known or pending one. False if forced tokens are yet to be drawn, since no draft tokens
    come before them."""
    return (
        sequence.lease.computed >= sequence.prompt_tokens
        and sequence.remaining == 1
        and not (sequence.constrained and forced_ahead(sequence))
    )


def _is_known_ahead(sequence: SequenceState) -> bool:
    """True if all tokens of a constrained sequence are known and there is a mask for the next one.
    The masks for draft tokens are made from this."""
    return not sequence.pending and sequence.is_masked


def _skips_for_mask(sequence: SequenceState, drafts: SequenceDrafts) -> bool:
    """True if a sequence sits out to wait for its next mask: until its steps in flight are done,
    and then one step. If a grammar takes longer, the sequence goes on without draft tokens."""
    waits = bool(sequence.pending) or not drafts.skipped_for_mask
    drafts.skipped_for_mask = not sequence.pending and waits
    return waits
