"""Acts of a policy on running sequences, and their limits: drop, preempt, unpin, choose decodes.

Every run ends, whatever the policy answers. A planned step computes at least one token, so a run
without end would need preemptions without end. There are two kinds of preemption.

The policy may preempt a sequence `MAX_POLICY_PREEMPTIONS` times for each token that becomes known,
and completions are finite. A sequence is preempted for another's page only if the other one is
ahead of it in the order of precedence and age. The other one then gets the page: its next token is
reserved, whatever the policy chooses.

So only the policy preempts the first sequence in this order, which takes finitely many pages. The
second is preempted finitely often for these and takes finitely many itself, and so on to the last.
If nothing is chosen and nothing is in flight, one sequence goes on without asking the policy.
"""

from __future__ import annotations

from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.step_builder import StepBuilder

__all__ = ["chosen_decodes", "preempt_for_policy"]


def preempt_for_policy(step: StepBuilder) -> None:
    """Drop, preempt and unpin before a step is planned. Preempted sequences don't start in it."""
    state, policy_calls = step.state, step.policy_calls
    if policy_calls.pins and state.pins:
        state.pins.ask_to_unpin(step.view())
    if policy_calls.drops and state.running:
        _drop(step)
    if not policy_calls.preempts or not state.running:
        return
    candidates = [s.view for s in state.running if s.may_be_taken and not s.exhausted]
    for one in policy_calls.preempt(candidates, step.view()) if candidates else ():
        sequence = state.sequence_of(one.request)
        step.working_on = sequence
        sequence.count_taken()
        state.preempt(sequence, step.number, one.how)
        step.gave_way.add(sequence)
    step.working_on = None


def _drop(step: StepBuilder) -> None:
    state, view = step.state, step.view()
    for sequence in list(state.running):
        if sequence.phase is not Phase.RUNNING or sequence.exhausted:
            continue
        refusal = state.policy_calls.drop(sequence.view, view)
        if refusal is not None:
            step.working_on = sequence
            state.refuse(sequence, refusal)
            step.working_on = None


def chosen_decodes(step: StepBuilder, ready: list[SequenceState]) -> list[SequenceState]:
    """Sequences that may get a token, in the policy's order. Sequences with a reserved
    token come first."""
    state = step.state
    state.reserved_next_page = {
        s: computed
        for s, computed in state.reserved_next_page.items()
        if s.phase is Phase.RUNNING and s.lease.computed <= computed
    }
    named = ready
    if state.policy_calls.chooses_decodes:
        answer = state.policy_calls.decode([s.view for s in ready], step.view())
        named = [state.sequence_of(request) for request in answer]
    first = [s for s in ready if s in state.reserved_next_page]
    return [*first, *(s for s in named if s not in state.reserved_next_page)]
