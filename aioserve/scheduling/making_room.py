"""Making room: which running sequences are preempted for the pages and slots of others.

When pages run out, cached ones are evicted, then sequences give theirs back that are younger than
the one in need, or to which the policy gave a lower precedence. The first in the order of
precedence and age is never preempted for another and fits alone, so it always gets to its end, and
so does everyone in turn. One whose reader is behind, or whose mask is long in coming, doesn't run:
it may be preempted for anyone, and loses time but no token. Where the next one to start has no
room, those of lower precedence may have to give way to it
(`aioserve.scheduling.priority_preemption`).
"""

from __future__ import annotations

from aioserve.scheduling.priority_preemption import by_precedence, who_gives_way
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.step_builder import StepBuilder

__all__ = ["displace_one", "give_way", "make_room"]


def make_room(step: StepBuilder, growing: list[SequenceState]) -> None:
    """Preempt until every growing sequence can have its page, now or after the step in flight.

    Counts what comes back, not what is held: fenced pages of a victim are on their way.
    """
    state, policy_calls = step.state, step.policy_calls
    growing.sort(key=by_precedence)
    while True:
        growing = [s for s in growing if s.phase is Phase.RUNNING]
        short = step.room.pages_short(growing)
        if short <= 0:
            return
        first = by_precedence(growing[0])
        behind = {s for s in state.running if by_precedence(s) > first or _stands_still(step, s)}
        of_any_age = policy_calls.victim_of_any_age
        candidates = [
            s.view
            for s in state.running
            if (s in behind or (of_any_age and s.may_be_taken)) and not s.exhausted
        ]
        if not candidates:
            return
        victim = state.sequence_of(policy_calls.victim(candidates, short, step.view()))
        if victim not in behind:
            victim.count_taken()
        step.preempt(victim)
        if policy_calls.limits_decodes:
            state.reserved_next_page.update({s: s.lease.computed for s in growing})


def give_way(step: StepBuilder, sequence: SequenceState) -> None:
    """Preempt for the one at which the last admission stopped. Before anything else is planned:
    none gives way that is in this step, or starts again in it."""
    step.state.stopped_at = None
    if sequence.phase is not Phase.WAITING or sequence.is_held:
        return
    step.working_on = sequence
    for victim in who_gives_way(step.state, sequence, step.view()):
        step.gave_way.add(victim)
        step.working_on = victim
        step.state.preempt(victim, step.number)
        sequence.num_displaced += 1
    step.working_on = None


def displace_one(step: StepBuilder) -> bool:
    """Others wait for room: the youngest sequence that stands still makes some, so that a slow
    reader or grammar holds up nobody but itself."""
    if not step.may_stand_still:
        return False
    for sequence in reversed(step.state.running):
        in_this_step = sequence.lease.last_step == step.number  # a sample that has just begun
        if _stands_still(step, sequence) and not sequence.exhausted and not in_this_step:
            step.preempt(sequence)
            return True
    return False


def _stands_still(step: StepBuilder, sequence: SequenceState) -> bool:
    """True if it has room that it can't use: its reader is behind, or its mask doesn't come."""
    return sequence.paused or (
        sequence.waits_for_mask and step.number - sequence.lease.last_step > step.patient_steps
    )
