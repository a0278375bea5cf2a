"""Fill one step: choose who decodes, whose prefill goes on, and who starts.

Running sequences come before new ones, and decodes before prefills. A decoding sequence takes one
page at a time. A prompt takes all its pages when it is admitted (`aioserve.scheduling.admission`),
except in groups that grow with chunks. There a chunk is as long as its pages allow, and a prefill
that finds no page is served like a decode that lacks one. When pages run out, others make room
(`aioserve.scheduling.making_room`).

The planner decides about one sequence at a time and then applies the decision
(`aioserve.scheduling.step_builder`).
"""

from __future__ import annotations

from collections.abc import Sequence

from aioserve.kv.lease import KVLease
from aioserve.scheduling.admission import admit
from aioserve.scheduling.making_room import displace_one, give_way, make_room
from aioserve.scheduling.parts.forced import forced_budget
from aioserve.scheduling.parts.table import FORCED, VERIFY
from aioserve.scheduling.policy_preemptions import chosen_decodes, preempt_for_policy
from aioserve.scheduling.priority_preemption import by_precedence
from aioserve.scheduling.room import Room
from aioserve.scheduling.sanity import check_idle
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.speculation.budget import draft_budget
from aioserve.scheduling.step_builder import StepBuilder, Verified

__all__ = ["fill"]

Budget = dict[SequenceState, Verified]
"""Most tokens to verify after the next token of each sequence, with the part that asks for them."""


def fill(step: StepBuilder) -> None:
    """Choose the work of a step, and advance the state of its sequences."""
    state, policy_calls = step.state, step.policy_calls
    if policy_calls.sets_budgets:
        most = state.max_num_batched_tokens
        budget = policy_calls.step_budget(step.view(), most, state.is_known)
        step.room = Room(state, step.number, budget)
    if policy_calls.acts_on_running:
        preempt_for_policy(step)
    if state.stopped_at is not None:
        give_way(step, state.stopped_at)
    decoding, prefilling = _split_running(step)
    if decoding and policy_calls.limits_decodes:
        decoding = chosen_decodes(step, decoding)
    if decoding or (prefilling and step.memory.grows_with_chunks):
        _decode(step, decoding, prefilling)
    if prefilling:
        _continue_prefills(step, prefilling)
    may_admit = not step.has_preempted and step.room.budget.tokens > 0 and len(state.queue)
    if may_admit and admit(step, forced=False):
        displace_one(step)
    if not step.entries and state.launched == step.memory.pool.done_step:
        _force_progress(step)
        if not step.entries:
            step.working_on = None
            check_idle(state)
    step.working_on = None


def _split_running(step: StepBuilder) -> tuple[list[SequenceState], list[SequenceState]]:
    """Split running sequences into those with one token to compute and those with more, first come
    first.

    Higher precedence comes before age, so that no sequence is preempted for a later one. Forced
    tokens that lack pages put a sequence into the first list. Pages that a sequence no longer needs
    are given back first.
    """
    decoding: list[SequenceState] = []
    prefilling: list[SequenceState] = []
    memory, running = step.memory, step.state.running
    if step.state.has_precedences:
        running = sorted(running, key=by_precedence)
    decode = decoding.append
    trims, may_lack = not memory.keeps_all, memory.grows_with_chunks
    for sequence in running:
        if trims and not sequence.forced_in_flight:
            # A late mask makes the last known token be computed again.
            least = min(sequence.lease.computed, sequence.num_known - 1)
            memory.trim(sequence.lease, least)
        if sequence.paused:
            step.may_stand_still = True
            continue
        reach = sequence.num_known + sequence.pending
        remaining = reach - sequence.lease.computed
        if remaining == 1:
            if reach < sequence.max_length:
                decode(sequence)
        elif remaining > 1:
            # Prefills of a prompt have their pages; forced tokens may have none.
            may_grow = sequence.constrained and not may_lack
            grows = may_grow and memory.short_of_pages([sequence.lease])
            (decoding if grows else prefilling).append(sequence)
        else:
            step.may_stand_still = True
    return decoding, prefilling


def _decode(
    step: StepBuilder, ready: list[SequenceState], prefilling: Sequence[SequenceState] = ()
) -> None:
    """Launch one token of each sequence that has a page for it. A sequence without a page sits this
    step out: pages that are fenced now are free in the next.

    Prefills that lack the pages of one token get them here, so that no preemption for them is in
    vain.
    """
    memory, room, state = step.memory, step.room, step.state
    budget: Budget | None = None
    if state.forced or state.speculation.is_on:
        ready, budget = _budget(step, ready, prefilling)
    chosen = room.budget.one_each(ready)
    growing = memory.short_of_pages([s.lease for s in chosen])
    begun: list[SequenceState] = []
    if prefilling and memory.grows_with_chunks:
        begun = [s for s in prefilling if memory.short_of_pages([s.lease])]
        growing += [s.lease for s in begun]
    if growing and not room.make_free(memory.num_pages_to_reserve(growing)):
        short = set(growing)
        make_room(step, [s for s in (*ready, *begun) if s.lease in short])
        ready = [s for s in ready if s.phase is Phase.RUNNING]
        # Some beyond the budget may be within it now.
        growing, chosen = [s.lease for s in ready], room.budget.one_each(ready)
    if begun := sorted([s for s in begun if s.phase is Phase.RUNNING], key=by_precedence):
        _with_pages(step, begun, {s.lease for s in begun})
    if growing:
        chosen = _with_pages(step, chosen, set(growing))
    if not budget:
        step.launch(chosen, 1)
        return
    verified = _with_pages_to_verify(step, chosen, budget)
    named = {sequence for _, sequence, _ in verified}
    step.launch([s for s in chosen if s not in named], 1)
    step.launch_verified(verified)


def _with_pages(
    step: StepBuilder, ready: Sequence[SequenceState], growing: set[KVLease]
) -> Sequence[SequenceState]:
    """Reserve a page for the next token of each sequence in `growing`. Return the sequences of
    `ready` that have one; only those in `growing` may lack it."""
    memory, refused = step.memory, set[SequenceState]()
    for sequence in [s for s in ready if s.lease in growing]:
        step.working_on = sequence
        if not memory.reserve(sequence.lease, 1, step.number):
            refused.add(sequence)
    step.working_on = None
    return [s for s in ready if s not in refused] if refused else ready


def _budget(
    step: StepBuilder, ready: list[SequenceState], prefilling: Sequence[SequenceState]
) -> tuple[list[SequenceState], Budget]:
    """Sequences of `ready` that don't sit the step out, and the tokens worth verifying for each."""
    state, forced = step.state, dict[SequenceState, int]()
    if state.forced:
        forced = forced_budget(state.forced, state.max_num_seqs - len(state.sequences))
    budget: Budget = {s: (FORCED, s, count) for s, count in forced.items()}
    if state.speculation.is_on and ready:
        ready, drafts = draft_budget(step, ready, prefilling, forced)
        budget |= {s: (VERIFY, s, count) for s, count in drafts.items()}
    return ready, budget


def _with_pages_to_verify(
    step: StepBuilder, chosen: Sequence[SequenceState], budget: Budget
) -> list[Verified]:
    """Reserve pages for tokens to verify after the next token of each sequence, which has its
    page."""
    verified: list[Verified] = []
    for sequence in chosen:
        if sequence in budget:
            part, _, wanted = budget[sequence]
            count = step.room.verified_with_pages(sequence, wanted)
            if count or sequence.unverified_tokens:
                verified.append((part, sequence, count))
    return verified


def _continue_prefills(step: StepBuilder, prefilling: list[SequenceState]) -> None:
    """Launch the next chunks of prompts that have begun, except those just preempted."""
    prefilling = [s for s in prefilling if s.phase is Phase.RUNNING]
    if not prefilling or step.room.budget.tokens <= 0:
        return
    view, policy_calls = step.view(), step.policy_calls
    if policy_calls.orders_prefills:
        named = policy_calls.order_prefills([s.view for s in prefilling], view)
        prefilling = [step.state.sequence_of(request) for request in named]
    for sequence in step.one_by_one(prefilling):
        if step.room.budget.tokens <= 0:
            break
        if not (wanted := step.room.tokens_from(sequence, sequence.lease.computed)):
            continue
        count = policy_calls.chunk(sequence.view, wanted, view)
        if count := step.room.tokens_with_pages(sequence, count):
            step.launch([sequence], count)


def _force_progress(step: StepBuilder) -> None:
    """Let the oldest sequence go on, because nothing is in flight and nothing was chosen. Ignores
    the policy and late masks, so that an engine with work never stands still."""
    state = step.state
    step.patient_steps = 0
    step.room = Room(state, step.number)
    for sequence in state.running:
        if sequence.is_held or sequence.remaining <= 1:
            continue
        step.working_on = sequence
        wanted = step.room.tokens_from(sequence, sequence.lease.computed)
        if count := step.room.tokens_with_pages(sequence, wanted):
            step.launch([sequence], count)
            return
    if step.policy_calls.limits_decodes or any(s.waits_for_mask for s in state.running):
        decoding, _ = _split_running(step)
        _decode(step, decoding[:1])
        if step.entries:
            return
    while len(state.queue) and admit(step, forced=True):
        if not displace_one(step):
            break
