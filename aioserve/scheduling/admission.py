"""Admission: start waiting sequences in the policy's order while there is room.

A prompt takes all its pages when it is admitted, so that no prefill waits half-done for pages.
Groups that grow with chunks take theirs with each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from aioserve.kv.claims import Claim
from aioserve.scheduling.policy import Refusal, Verdict
from aioserve.scheduling.priority_preemption import lowest_precedence
from aioserve.scheduling.room import slots_of
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.step_builder import StepBuilder
from aioserve.scheduling.view import SchedulerView

__all__ = ["admit"]


class _Start(NamedTuple):
    """Claim on cached and new pages, and the first chunk, of a sequence that may start."""

    claim: Claim
    count: int
    """Tokens of its first chunk; 0 if the policy grants none now."""


def admit(step: StepBuilder, *, forced: bool) -> bool:
    """Start waiting sequences in the policy's order while there is room for them. `forced` starts
    the first one that can, whatever the policy says.

    Return True if nothing was started for want of room.
    """
    state, room = step.state, step.room
    num_slots, lowest = room.num_slots_free, lowest_precedence(state)
    if num_slots <= 0 and (forced or not state.waits_above(lowest)):
        return any(not s.is_held for s in state.waiting)
    view = step.view()
    refused: list[tuple[SequenceState, Refusal | None]] = []
    started, blocked = 0, False
    for sequence in step.one_by_one(_candidates(step, view, forced=forced)):
        if room.budget.left_for(sequence) <= 0:
            continue
        has_slots = slots_of(sequence) <= num_slots
        if not has_slots and sequence.precedence <= lowest:
            blocked = not started
            break
        verdict = Verdict.NOW if forced else step.policy_calls.admit(sequence.view, view)
        if verdict is not Verdict.NOW:
            if verdict is not Verdict.LATER:
                refused.append((sequence, verdict if isinstance(verdict, Refusal) else None))
            continue
        start = _room_to_start(step, sequence, view, forced=forced) if has_slots else None
        if start is None:
            blocked = not started
            state.stopped_at = sequence
            break
        if start.count == 0:
            step.memory.claims.drop(start.claim)
            continue
        if not _start(step, sequence, start):
            blocked = not started
            break
        started += 1
        num_slots = room.num_slots_free
        if forced or room.budget.tokens <= 0 or num_slots <= 0:
            break
    for sequence, refusal in refused:
        step.working_on = sequence
        state.refuse(sequence, refusal)
    step.working_on = None
    return blocked


def _candidates(step: StepBuilder, view: SchedulerView, *, forced: bool) -> Iterable[SequenceState]:
    state, gave_way = step.state, () if forced else step.gave_way
    if forced or not step.policy_calls.orders:  # few of thousands start: look at no more
        return state.queue.in_turn(gave_way)
    order = step.policy_calls.order(state.queue.views(gave_way), view)
    return map(state.sequence_of, order)


def _room_to_start(
    step: StepBuilder, sequence: SequenceState, view: SchedulerView, *, forced: bool
) -> _Start | None:
    """Lock the pages that a sequence may begin with; None if there is no room for it."""
    state, room, kept = step.state, step.room, None
    if step.policy_calls.reserves:
        kept = step.policy_calls.reserve(sequence.view, step.memory.pool.num_pages, view)
    to_leave = room.pages_to_leave(sequence, kept)
    claim = room.claim(sequence, to_leave)
    if claim is None and forced and state.pins:
        state.pins.end_all()
        claim = room.claim(sequence, to_leave)
    if claim is None:
        return None
    count = room.tokens_from(sequence, claim.num_cached)
    if count:  # asked even if it must start: policies count starts by it
        chosen = step.policy_calls.chunk(sequence.view, count, view)
        count = chosen or (count if forced else 0)
    return _Start(claim, count)


def _start(step: StepBuilder, sequence: SequenceState, start: _Start) -> bool:
    """Let a waiting sequence run. Return False if pages that it needs are still fenced."""
    claim, count = start
    if not step.memory.begin(sequence.lease, claim, step.number):
        return False
    if step.memory.grows_with_chunks:
        count = step.room.tokens_with_pages(sequence, count)
    found = min(claim.num_found, sequence.prompt_tokens)
    step.state.counters.tokens_cached += found
    step.room.started(sequence)
    step.state.start(sequence)
    step.started.append((sequence, found))
    step.launch([sequence], count)
    return True
