"""Draw a token after the last one of an item, for its sequence and for samples that fork off."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from aioserve.request import FinishReason
from aioserve.scheduling.parts.base import BrokenRow, DoneStep, ItemTokens, LateRow, RowPart
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.updates import SequenceUpdate
from aioserve.steps.plan import ItemKind, SampleRow, WorkItem

__all__ = ["Draw"]

VERIFY = ItemKind.VERIFY


class Draw(RowPart):
    """Draws every row. All tokens are taken here, also those of rows that verify, which may be
    several."""

    def ask(self, asked: ItemTokens) -> dict[str, Any]:
        if not asked.family:
            return {}
        asked.sequence.pending += 1
        offset = asked.end - asked.start - 1
        return {"rows": tuple([SampleRow(offset=offset, slot=one.slot) for one in asked.family])}

    def take(self, step: DoneStep) -> None:
        outcome, now_seconds, known_rows = step.outcome, step.now_seconds, step.known_rows
        token_ids, counts, logprobs = outcome.token_ids, outcome.token_counts, outcome.logprobs
        errors, failures = outcome.row_errors, outcome.row_failures
        verifies, add, num_tokens, end = step.plan.num_verified > 0, step.updates.append, 0, 0
        for index, (run, item, page_ids) in enumerate(step.rows):
            at, end = end, end + (counts.get(index, 1) if counts else 1)
            if errors and index in errors:
                step.broken.append(BrokenRow(run, item, page_ids, errors[index]))
                continue
            sequence, slot = run.sequence, run.slot
            # Results in flight are dropped only here: the sequence has ended, was preempted or
            # lacked a mask. It will sample the same token again, because noise depends on the
            # position.
            if sequence.slot != slot or (known_rows and index in known_rows):
                continue
            if at == end:
                step.late.append(LateRow(run, item, 0))
                continue
            sequence.pending -= 1
            if failures and index in failures:
                add(_failed(sequence, failures[index]))
                step.ended.append(sequence)
                continue
            if not sequence.wants_output:
                add(_ended_without_output(sequence))
                step.ended.append(sequence)
                continue
            while True:
                token_id = token_ids[at]
                reason = sequence.append(token_id)
                told = logprobs.get(at) if logprobs else None
                add(SequenceUpdate(sequence.sequence_id, token_id, reason, logprobs=told))
                num_tokens += 1
                at += 1
                if at == end or reason is not None:  # drop what is sampled after the end
                    break
            if sequence.first_token_seconds is None:
                sequence.first_token_seconds = now_seconds
            sequence.last_token_seconds = now_seconds
            sequence.proven_pages = page_ids
            if reason is not None:
                step.ended.append(sequence)
            if verifies and item.kind is VERIFY:
                step.num_taken[index] = at - end + counts.get(index, 1)
        step.counters.tokens_generated += num_tokens

    def drop_launched(self, sequence: SequenceState) -> None:
        sequence.pending = 0

    def keep(self, item: WorkItem, slots: Set[int], sequence_ids: Set[int]) -> dict[str, Any]:
        return {"rows": tuple([row for row in item.rows if row.slot in slots])}

    def is_beyond_a_token(self, item: WorkItem) -> bool:
        return len(item.rows) != 1


def _failed(sequence: SequenceState, error: str) -> SequenceUpdate:
    return SequenceUpdate(sequence.sequence_id, None, FinishReason.ERROR, error)


def _ended_without_output(sequence: SequenceState) -> SequenceUpdate:
    """End a sequence that wants only results for its prompt. The token after it was drawn to check
    that the logits are numbers, and is dropped."""
    pooled = None if sequence.pooling is None else sequence.pooling.total
    return SequenceUpdate(sequence.sequence_id, None, FinishReason.LENGTH, pooled=pooled)
