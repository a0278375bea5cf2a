"""Choose running sequences to preempt for the pages and slots of others.

When pages run out, cached ones are evicted first. Then sequences are preempted that are behind the
one in need: of lower precedence, or of the same and younger. The first sequence in this order is
never preempted for another and fits alone. It always reaches its end, and then the next one is
first. A sequence whose reader is behind or whose mask is late stands still. It may be preempted for
any other; it loses time but no token. To start a waiting sequence that has no room, running ones of
lower precedence may be preempted (`aioserve.scheduling.priority_preemption`).
"""

from __future__ import annotations

from aioserve.scheduling.priority_preemption import by_precedence, who_gives_way
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.step_builder import StepBuilder

__all__ = ["displace_one", "give_way", "make_room"]


def make_room(step: StepBuilder, growing: list[SequenceState]) -> None:
    """Preempt until every growing sequence can have its page, now or after the steps in flight.

    Fenced pages of a victim count: they come back when those steps are done.
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
    """Preempt for the waiting sequence at which the last admission stopped. Call it before anything
    else is planned, so that no victim is in this step. No victim starts again in this step."""
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
    """Preempt the youngest sequence that stands still, because others wait for room. A slow reader
    or grammar then delays only its own sequence. Return True if there was one."""
    if not step.may_stand_still:
        return False
    for sequence in reversed(step.state.running):
        in_this_step = sequence.lease.last_step == step.number  # forked off in this step
        if _stands_still(step, sequence) and not sequence.exhausted and not in_this_step:
            step.preempt(sequence)
            return True
    return False


def _stands_still(step: StepBuilder, sequence: SequenceState) -> bool:
    """True if a sequence holds room that it can't use: its reader is behind, or its mask is
    late."""
    return sequence.paused or (
        sequence.waits_for_mask and step.number - sequence.lease.last_step > step.patient_steps
    )
