"""Score tokens of a prompt: report the log-probabilities of the tokens that stand there.

Each is reported once. If the sequence of the prompt was preempted meanwhile, another sample with a
row in the same item reports them, before its own token.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from aioserve.request import Logprobs
from aioserve.scheduling.parts.base import DoneStep, ItemTokens, RowPart
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.steps.plan import ScoredTokens, WorkItem

__all__ = ["Score"]


class Score(RowPart):
    def ask(self, asked: ItemTokens) -> dict[str, Any]:
        sequence = asked.sequence
        count = sequence.num_scored_by(asked.end)
        if not count:
            return {}
        first = sequence.score_at
        sequence.score_at = first + count
        offset = first - 1 - asked.start
        return {"scored": ScoredTokens(offset=offset, target_ids=sequence.ids(first, count))}

    def take(self, step: DoneStep) -> None:
        num_read = 0
        untold: tuple[WorkItem, SequenceState, tuple[Logprobs, ...]] | None = None
        for run, item, _ in step.entries:
            if item.scored is None:
                continue
            sequence = run.sequence
            # A family's entries have one item. The first entry is the prompt's own.
            if sequence.sequence_id == item.sequence_id:
                begin, num_read = num_read, num_read + len(item.scored)
                scored = step.outcome.scored[begin:num_read]
                if run.goes_on:
                    step.updates.append(_scored(sequence, scored))
                    sequence.scored += len(scored)
                elif sequence.phase is not Phase.FINISHED:
                    untold = item, sequence, scored
            elif untold is not None and untold[0] is item and run.goes_on:
                step.updates.append(_scored_by(*untold))
                untold = None

    def drop_launched(self, sequence: SequenceState) -> None:
        sequence.score_at = sequence.scored

    def distrust(self, sequence: SequenceState) -> None:
        """Score all tokens anew, unless a completion has begun."""
        first = sequence.request.score_from
        has_begun = sequence.num_known > sequence.prompt_tokens
        if first is not None and not has_begun and sequence.scored > first:
            sequence.scored = first

    def keep(self, item: WorkItem, slots: Set[int], sequence_ids: Set[int]) -> dict[str, Any]:
        return {"scored": item.scored if item.sequence_id in sequence_ids else None}

    def is_beyond_a_token(self, item: WorkItem) -> bool:
        return item.scored is not None


def _scored(sequence: SequenceState, scored: tuple[Logprobs, ...]) -> SequenceUpdate:
    before = sequence.scored - (sequence.request.score_from or 0)
    return SequenceUpdate(sequence.sequence_id, None, scored=scored, scored_before=before)


def _scored_by(
    item: WorkItem, sequence: SequenceState, scored: tuple[Logprobs, ...]
) -> SequenceUpdate:
    """Report scores of a preempted sequence through another sample of the same item. The sample
    takes its token next, and no token comes before the scores of its prompt."""
    first = item.start + (item.scored.offset if item.scored else 0) + 1
    if sequence.scored == sequence.score_at == first:
        sequence.scored = sequence.score_at = first + len(scored)
    before = first - (sequence.request.score_from or 0)
    return SequenceUpdate(sequence.sequence_id, None, scored=scored, scored_before=before)
