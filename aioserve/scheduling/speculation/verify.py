"""Verify draft tokens: the part of a step that asks for them, and accepts those that were right."""

from __future__ import annotations

from typing import Any

from aioserve.errors import InvariantError
from aioserve.scheduling.parts.base import DoneStep, ItemTokens
from aioserve.scheduling.parts.verifying import VerifyingPart, ids_to_verify
from aioserve.scheduling.sequence import Run, SequenceState
from aioserve.scheduling.speculation.draft_lengths import FIRST_STEPS
from aioserve.steps.outcome import StepOutcome
from aioserve.steps.plan import ItemKind, StepPlan, WorkItem

__all__ = ["Verify", "num_not_drafted"]


class Verify(VerifyingPart):
    """Part of every step once a request has asked for draft tokens: it learns from each."""

    def ask(self, asked: ItemTokens) -> dict[str, Any]:
        sequence, start, count = asked.sequence, asked.start, asked.end - asked.start
        if (drafts := sequence.drafts) is None:
            raise InvariantError(f"{sequence} has no draft tokens")
        token_ids = ids_to_verify(sequence, start, count)
        least_start = start - drafts.unverified_tokens
        sequence.pending += count
        drafts.unverified_tokens += count - 1
        drafts.skipped_for_mask = False
        return {"token_ids": token_ids, "least_start": least_start}

    def take(self, step: DoneStep) -> None:
        if step.outcome.dry_runs:
            _take_dry_runs(step)
        for index, num_taken in step.num_taken.items():
            run, item, _ = step.rows[index]
            if not item.brings_ids:
                _resolve(step, index, run, item, num_taken)
        _learn_costs(step)

    def drop_launched(self, sequence: SequenceState) -> None:
        if sequence.drafts is not None:
            sequence.drafts.unverified_tokens = 0
            sequence.drafts.skipped_for_mask = False


def _resolve(step: DoneStep, index: int, run: Run, item: WorkItem, num_taken: int) -> None:
    """Settle an item that brought `num_taken` tokens: subtract what was counted for rejected draft
    tokens."""
    sequence, num_asked = run.sequence, item.count - 1
    sequence.pending -= num_asked  # the one after them is off already
    step.memory.retreat(run.lease, item.count - num_taken)
    drafted, branched = step.outcome.drafted.get(index, 0), step.outcome.branched.get(index, 0)
    accepted = min(num_taken - 1, drafted)
    if (drafts := sequence.drafts) is not None:
        drafts.unverified_tokens -= num_asked
        if drafts.record.steps < FIRST_STEPS:
            step.speculation.lengths.usual.verified(num_asked, drafted, accepted, branched)
        drafts.record.verified(num_asked, drafted, accepted, branched)
    sequence.account.drafted_tokens += drafted
    sequence.account.accepted_tokens += accepted
    counters = step.counters
    for totals, count in ((counters.drafted, drafted), (counters.accepted, accepted)):
        totals += [0] * (drafted - len(totals))
        for place in range(count):
            totals[place] += 1


def _take_dry_runs(step: DoneStep) -> None:
    """Record the acceptance that draft tokens would have had, of runs that no step verified."""
    for index, found in step.outcome.dry_runs.items():
        run = step.rows[index][0]
        drafts = run.sequence.drafts
        if not run.goes_on or drafts is None:
            continue
        most = drafts.record.limit
        drafted, accepted = min(found.drafted, most), min(found.accepted, most)
        for record in (drafts.record, step.speculation.lengths.usual):
            record.verified(min(found.asked, most), drafted, accepted, dry_steps=found.asked)


def _learn_costs(step: DoneStep) -> None:
    plan, outcome = step.plan, step.outcome
    step.speculation.lengths.record(
        plan.num_tokens - num_not_drafted(plan, outcome),
        step.seconds,
        verified=plan.num_verified > 0 and _asks_drafter(plan),
        longest=max(outcome.drafted.values(), default=0),
        drafting=min(outcome.drafting_seconds, step.seconds),
    )


def _asks_drafter(plan: StepPlan) -> bool:
    """True if an item of a plan follows draft tokens or asks for some."""
    return any(item.kind is ItemKind.VERIFY and not item.brings_ids for item in plan.items)


def num_not_drafted(plan: StepPlan, outcome: StepOutcome) -> int:
    """Draft tokens of a plan that the drafter didn't make, and that weren't computed."""
    if not plan.num_verified:
        return 0
    asked = sum([item.count - 1 for item in plan.items if item.kind is ItemKind.VERIFY])
    return asked - sum(outcome.drafted.values()) - sum(outcome.branched.values())
