"""Many scheduler steps at once, in each of which every running sequence gets one token and nothing
else happens.

A pass leaves the scheduler as `plan` and `commit` would leave it, step by step. Completions may
begin with the step in flight before it, and end with its last step. The policy isn't asked in these
steps, so it can't tell the difference. There is no pass if the policy might be asked, or told
something before the end of the last step. The scheduler's parts say what rules out a pass. This
module changes public fields of its objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from aioserve.errors import InvariantError
from aioserve.kv.memory import KVMemory
from aioserve.paging.pages import full_pages, pages_for, pages_for_each, tokens_in_part
from aioserve.scheduling.parts.table import PARTS, PLAIN
from aioserve.scheduling.priority_preemption import by_precedence
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.step_times import NUM_KEPT, StepSummary, summary_of
from aioserve.simulation.queue_head import QueueHead, head_of_queue
from aioserve.steps.plan import PENDING_IDS, ItemKind, StepPlan, WorkItem

__all__ = ["DecodePass", "decode_pass", "frees_at_once"]


def decode_pass(scheduler: Scheduler) -> DecodePass | None:
    """Make a pass from the scheduler's state, with at most one step in flight.

    Returns None if the next step may differ from one token for each running sequence.
    """
    state, policy_calls, memory = scheduler.state, scheduler.policy_calls, scheduler.memory
    if (
        not state.running
        or state.speculation.is_on  # steps may bring several tokens, or fewer than they computed
        or len(state.in_flight) > 1
        or policy_calls.acts_on_running
        or policy_calls.limits_decodes
        or policy_calls.hears_of_steps
        or (state.has_precedences and (state.stopped_at is not None or len(state.queue)))
        or (state.arrived and policy_calls.hears_of_arrivals)
        or len(state.running) > state.max_num_batched_tokens
        or memory.copies
        or len(memory.groups) > 1  # a pass counts pages of group 0 alone
        or not memory.keeps_all  # pages come back during these steps
        # A strategy of its own is told of ticks, and a pass has fewer.
        or (memory.tree is not None and memory.tree.asks_strategy)
    ):
        return None
    sequences = state.running
    if state.has_precedences:
        sequences = sorted(sequences, key=by_precedence)
    num_flying = len(state.in_flight)
    late: Set[SequenceState] = frozenset()
    if num_flying:
        # Results of sequences that have ended or were preempted meanwhile are dropped.
        kept = [
            (run.sequence, item) for run, item, _ in state.in_flight[state.launched] if run.goes_on
        ]
        flying = [sequence for sequence, _ in kept]
        if flying != sequences:
            late = set(sequences).difference(flying)
        if [sequence for sequence in sequences if sequence not in late] != flying or any(
            item.rows is not sequence.decode_rows
            and any(part.is_beyond_a_token(item) for part in PARTS)
            for sequence, item in kept
        ):
            return None
    elif memory.pool.num_fenced:
        return None
    if not _all_go_on(sequences, memory.page_size):
        return None
    head = None
    if (
        len(state.queue)
        and len(sequences) < state.max_num_batched_tokens
        and len(sequences) < state.max_num_seqs
    ):
        head = head_of_queue(state)
        if head is None:
            return None
    return DecodePass(scheduler, list(sequences), late, num_flying, head)


def _all_go_on(sequences: list[SequenceState], page_size: int) -> bool:
    """True if each of these running sequences can only get one token next."""
    for sequence in sequences:
        lease = sequence.lease
        if (
            (sequence.first_token_seconds is None and not _is_about_to_answer(sequence))
            or lease.computed != sequence.num_known + sequence.pending - 1
            or sequence.paused
            or sequence.pending_samples
            or lease.shares_partial_page
            or len(lease.page_table.page_ids) > pages_for_each(lease.entries, page_size)
        ):
            return False
    return all(part.go_on_by_one(sequences) for part in PARTS)


def _is_about_to_answer(sequence: SequenceState) -> bool:
    """True if the step in flight has the first token of the sequence's completion."""
    return sequence.pending > 0 and sequence.request.answers


def frees_at_once(memory: KVMemory, count: int) -> bool:
    """True if `memory.make_free` would leave `count` pages free: it may evict fenced ones."""
    short = count - memory.pool.num_free
    return short <= 0 or (memory.tree is not None and memory.tree.frees_at_once(short))


def _grow(memory: KVMemory, sequences: Sequence[SequenceState], count: int, first: int) -> None:
    """Reserve and advance `count` tokens of each sequence, as steps from number `first` on would.

    No sequence may share a page in part. Raises `InvariantError` if there are too few pages.
    """
    last = first + count - 1
    ends = [pages_for(sequence.lease.entries + count, memory.page_size) for sequence in sequences]
    wanted = [end - s.lease.num_pages for end, s in zip(ends, sequences, strict=True)]
    memory.make_free(sum([pages for pages in wanted if pages > 0]), first)
    for sequence, pages in zip(sequences, wanted, strict=True):
        if pages > 0 and not memory.reserve(sequence.lease, count, first):
            raise InvariantError(f"{sequence} finds no page for steps up to {last}")
        memory.advance(sequence.lease, count, last)


def _extend(sequence: SequenceState, token_id: int, count: int) -> None:
    """Append one id `count` times, which doesn't end the sequence."""
    known, after = sequence.num_known, sequence.num_known + count
    if after > len(sequence.id_buffer):
        sequence.grow_ids(after)
    sequence.id_buffer[known:after] = token_id
    sequence.num_known = after


def _pass_steps(state: SchedulerState, count: int) -> None:
    """Launch `count` further steps and complete as many. Nothing is left for the next plan to
    carry.

    The caller writes the entries in flight afterwards.
    """
    state.launched += count
    state.slots.clear_changes()
    state.preempted.clear()
    state.complete(state.launched - len(state.in_flight))
    state.counters.steps += count - 1


class DecodePass:
    """Consecutive steps that aren't taken yet. Invalid once the scheduler has changed."""

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: list[SequenceState],
        late: Set[SequenceState],
        num_flying: int,
        head: QueueHead | None,
    ) -> None:
        self.scheduler = scheduler
        self.sequences: list[SequenceState] = sequences
        """Sequences in the order of each step's items."""
        self.late: Set[SequenceState] = late
        """Sequences that had no page for the step in flight, and get no token from it."""
        self.num_flying = num_flying
        self._head = head
        """Request that could start if there were pages; None if no request could."""
        self.first_step: int = scheduler.state.launched + 1
        """Number of the first step that it launches."""
        entries = [sequence.lease.entries for sequence in sequences]
        self.context_tokens: int = sum(entries) + len(entries)
        """Tokens that the first step attends to. Each further step attends to one more per
        sequence.
        """
        # A lease without room for a token takes a page in the first step, and then every `size`
        # steps.
        size = scheduler.memory.page_size
        self._pages_in_turn = [0] * size
        for num_entries in entries:
            self._pages_in_turn[tokens_in_part(-num_entries, size)] += 1

    def pages_less(self, count: int) -> list[int]:
        """Return by how many pages each of `count` steps reduces the free ones.

        That is the pages that it takes, less those that come back before it. These are of sequences
        in the step in flight that are gone.
        """
        in_turn = self._pages_in_turn
        less = (in_turn * -(-count // len(in_turn)))[:count]
        if count > 1:
            less[1] -= self.scheduler.memory.pool.num_fenced
        return less

    def num_before_next_start(self, pages_less: Sequence[int]) -> int:
        """Return the number of steps before one in which a request starts.

        Each step leaves `pages_less` pages fewer than there were before; at most all these steps
        are counted.
        """
        head = self._head
        return len(pages_less) if head is None else head.num_steps_without(pages_less)

    def take(
        self,
        count: int,
        token_ids: Sequence[int],
        seconds: Sequence[float],
        ends: Sequence[float],
        last_ids: Mapping[int, int],
    ) -> StepPlan | None:
        """Launch `count` steps, finish as many, and return the plan that is then in flight.

        Each finished step gives each sequence its id of `token_ids`, which ends none of them. The
        last step gives the sequences in `last_ids`, by sequence id, the id there instead. The
        finished steps took `seconds` and ended at `ends`. There must be as many pages as each step
        takes, free or evictable.
        """
        scheduler, state, memory = self.scheduler, self.scheduler.state, self.scheduler.memory
        scheduler.policy_calls.begin_step()
        state.tell_arrivals()
        state.stopped_at = None if self._head is None else self._head.sequence
        last = self.first_step + count - 1
        # The first step can't use pages that come back when the step in flight is done.
        memory.make_free(self._pages_in_turn[0], self.first_step)
        if self.num_flying:
            memory.complete(self.first_step - 1)
        _grow(memory, self.sequences, count, self.first_step)
        ended: list[SequenceState] = []
        for sequence, token_id in zip(self.sequences, token_ids, strict=True):
            gained = count
            if sequence in self.late:
                gained, sequence.pending = count - 1, self.num_flying
            if sequence.sequence_id not in last_ids:
                _extend(sequence, token_id, gained)
            else:
                _extend(sequence, token_id, gained - 1)
                if sequence.append(last_ids[sequence.sequence_id]) is not None:
                    ended.append(sequence)
            if sequence.first_token_seconds is None:
                sequence.first_token_seconds = ends[0]
            if gained:
                sequence.last_token_seconds = ends[-1]
        if memory.tree is not None:
            self._publish(count)
        for sequence in self.sequences:
            pages, known = sequence.lease.page_table.page_ids, sequence.num_known - 1
            size = memory.page_size
            # A page that begins after the known tokens belongs to the step in flight.
            sequence.proven_pages = (
                pages if tokens_in_part(known, size) else pages[: full_pages(known, size)]
            )
        num_tokens = count * len(self.sequences)
        state.counters.tokens_processed += num_tokens
        state.counters.tokens_generated += num_tokens - len(self.late)
        _pass_steps(state, count)
        self._remember(count, seconds)
        in_flight = self._in_flight(last)
        state.end(ended)
        return in_flight

    def _publish(self, count: int) -> None:
        """Publish what each of `count` steps would, for sequences that already know the last step's
        token.

        Runs begin in the order of the steps and, in a step, of the sequences. All but the last step
        are done, or will be by the time that other code looks.
        """
        memory = self.scheduler.memory
        size, last = memory.page_size, self.first_step + count - 1
        begun: list[tuple[int, int, int, bool]] = []
        for place, sequence in enumerate(self.sequences):
            # Pages are published once they are full of known and computed tokens.
            behind = sequence in self.late
            before = sequence.num_known - count + behind
            missing = (sequence.lease.published + 1) * size - before
            first = 1 if missing <= 0 else 1 + missing + behind
            if first <= count:
                begun.append((first, place, before, behind))
        for first, place, before, behind in sorted(begun):
            sequence = self.sequences[place]
            lease, known = sequence.lease, before + max(0, count - 1 - behind)
            if first < count:
                lease.last_step = last - 1
                memory.publish(lease, sequence.ids(0, before + max(0, count - 2 - behind)))
                lease.last_step = last
            if full_pages(known, size) > lease.published:
                memory.publish(lease, sequence.ids(0, known))

    def _remember(self, count: int, seconds: Sequence[float]) -> None:
        """Record the finished steps, of which the first may have been in flight."""
        num_sequences = len(self.sequences)
        first = self.first_step - self.num_flying
        context = self.context_tokens - self.num_flying * num_sequences
        kept = range(max(0, count - NUM_KEPT), count)
        summaries = [
            StepSummary(first + i, 0, num_sequences, context + i * num_sequences, seconds[i])
            for i in kept
        ]
        if self.num_flying and not kept.start:  # other sequences may be in it
            flying = self.scheduler.state.in_flight[first]
            items = {id(item): item for _, item, _ in flying}.values()
            summaries[0] = summary_of(first, items, seconds[0])
        self.scheduler.state.times.kept.extend(summaries)
        self.scheduler.state.times.num_steps += count

    def _in_flight(self, last: int) -> StepPlan | None:
        if not self.num_flying:
            return None
        state = self.scheduler.state
        entries = [
            (
                sequence.run,
                WorkItem(
                    kind=ItemKind.DECODE,
                    sequence_id=sequence.sequence_id,
                    slot=sequence.slot,
                    start=sequence.lease.computed - 1,
                    index=sequence.lease.entries - 1,
                    count=1,
                    token_ids=PENDING_IDS,
                    rows=sequence.decode_rows,
                ),
                sequence.lease.page_ids,
            )
            for sequence in self.sequences
        ]
        state.in_flight, state.parts_in_flight = {last: entries}, {last: PLAIN}
        return StepPlan(step=last, items=tuple([item for _, item, _ in entries]))
