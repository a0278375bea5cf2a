"""Draw several tokens that a grammar forces in one step: there are masks for all.

Forced tokens aren't draft tokens: the plan carries their ids, and no drafter is asked. All of them
come, so the start of the next item is known.
"""

from __future__ import annotations

from typing import Any

from aioserve.scheduling.parts.base import DoneStep, ItemTokens, LateRow
from aioserve.scheduling.parts.verifying import VerifyingPart, ids_to_verify
from aioserve.scheduling.sequence import Phase, SequenceState

__all__ = ["Forced", "forced_ahead", "forced_budget"]


class Forced(VerifyingPart):
    def ask(self, asked: ItemTokens) -> dict[str, Any]:
        sequence, count = asked.sequence, asked.end - asked.start
        token_ids = ids_to_verify(sequence, asked.start, count)
        token_ids[1:] = forced_ahead(sequence)[: count - 1]
        sequence.pending += count
        if sequence.drafts is not None:
            sequence.drafts.skipped_for_mask = False
        return {"token_ids": token_ids, "least_start": asked.start}

    def take(self, step: DoneStep) -> None:
        for index, num_taken in step.num_taken.items():
            run, item, _ = step.rows[index]
            if item.brings_ids:
                run.sequence.pending -= item.count - 1
                if num_taken < item.count:
                    step.late.append(LateRow(run, item, num_taken))


def forced_ahead(sequence: SequenceState) -> tuple[int, ...]:
    """Forced tokens after those known or being drawn. Empty while the number of the latter is
    uncertain."""
    if sequence.unverified_tokens:
        return ()
    ahead = sequence.masked_to - sequence.num_known - sequence.pending
    return sequence.forced_ids[-ahead:] if ahead > 0 else ()


def forced_budget(forced: dict[SequenceState, None], num_rows: int) -> dict[SequenceState, int]:
    """Number of forced tokens to draw for each running sequence that has some ahead. Each takes a
    row of logits, and there are `num_rows`. Sequences without any leave `forced`."""
    budget: dict[SequenceState, int] = {}
    for sequence in [*forced]:
        if sequence.masked_to <= sequence.num_known:
            del forced[sequence]
        elif sequence.phase is Phase.RUNNING and num_rows > 0 and (ids := forced_ahead(sequence)):
            budget[sequence] = min(num_rows, len(ids))
            num_rows -= budget[sequence]
    return budget
