"""What a policy may have done to running sequences, and how far: who is dropped, preempted or
unpinned, and who decodes.

Every run ends, whatever the policy says. A planned step computes a token at least, so there are
endlessly many steps only where tokens are computed again endlessly often, after preemptions. There
are two kinds of preemption. The policy may preempt a sequence `MAX_POLICY_PREEMPTIONS` times for
each token that it comes to know, and completions are finite. A sequence is preempted for the page
of another only if that one is ahead of it in the order of precedence and age, and that one gets the
page: its next token is reserved, whatever the policy chooses. So the first in this order, which
only the policy preempts, takes finitely many pages; the second is preempted finitely often for
these and takes finitely many; and so on to the last. Where nothing is chosen and nothing is in
flight, one sequence goes on without a question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from aioserve.scheduling.policy import Refusal
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.view import SchedulerView

__all__ = ["Granting", "chosen_decodes", "preempt_for_policy"]


class Granting(Protocol):
    """What is needed here of the planner of a step."""

    step: int
    working_on: SequenceState | None
    reject: Callable[[SequenceState, Refusal | None], None]

    def view(self) -> SchedulerView: ...


def preempt_for_policy(state: SchedulerState, planner: Granting) -> set[SequenceState]:
    """Drop, preempt and unpin before a step is planned; those preempted, who don't start in it."""
    policy_calls = state.policy_calls
    if policy_calls.pins and state.pins:
        state.pins.ask_to_unpin(planner.view())
    if policy_calls.drops and state.running:
        _drop(state, planner)
    if not policy_calls.preempts or not state.running:
        return set()
    candidates = [s.view for s in state.running if s.may_be_taken and not s.exhausted]
    taken: set[SequenceState] = set()
    for one in policy_calls.preempt(candidates, planner.view()) if candidates else ():
        sequence = state.sequence_of(one.request)
        planner.working_on = sequence
        sequence.count_taken()
        state.preempt(sequence, planner.step, one.how)
        taken.add(sequence)
    planner.working_on = None
    return taken


def _drop(state: SchedulerState, planner: Granting) -> None:
    view = planner.view()
    for sequence in list(state.running):
        if sequence.phase is not Phase.RUNNING or sequence.exhausted:
            continue
        refusal = state.policy_calls.drop(sequence.view, view)
        if refusal is not None:
            planner.working_on = sequence
            planner.reject(sequence, refusal)
            planner.working_on = None


def chosen_decodes(
    state: SchedulerState, ready: list[SequenceState], view: SchedulerView
) -> list[SequenceState]:
    """Sequences that may get a token, in the policy's order: first those that have one reserved."""
    state.reserved_next_page = {
        s: computed
        for s, computed in state.reserved_next_page.items()
        if s.phase is Phase.RUNNING and s.lease.computed <= computed
    }
    named = ready
    if state.policy_calls.chooses_decodes:
        answer = state.policy_calls.decode([s.view for s in ready], view)
        named = [state.sequence_of(request) for request in answer]
    first = [s for s in ready if s in state.reserved_next_page]
    return [*first, *(s for s in named if s not in state.reserved_next_page)]
