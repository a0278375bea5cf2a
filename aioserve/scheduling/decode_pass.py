"""Passes steps of a scheduler at once in which each running sequence goes on by one token, and
nothing else happens: what is left behind is what `plan` and `commit` would leave, step by step.

For drivers that know what steps will bring, as a simulator does. In such steps the policy is asked
nothing, so it can't tell the difference; where it might be asked, or told, there is no pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from aioserve.errors import InvariantError
from aioserve.execution.plan import PENDING_TOKEN, StepPlan, WorkItem
from aioserve.kv.pages import pages_for
from aioserve.scheduling.displacement import by_precedence
from aioserve.scheduling.queue_head import QueueHead, head_of_queue
from aioserve.scheduling.scheduler import Scheduler
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.step_times import NUM_KEPT, StepSummary

__all__ = ["DecodePass", "decode_pass"]


def decode_pass(scheduler: Scheduler) -> DecodePass | None:
    """A pass from where the scheduler is now, with one step in flight or none; None where the next
    step may be another than one token of each sequence that is running."""
    books, guard, memory = scheduler.books, scheduler.guard, scheduler.memory
    if (
        not books.running
        or len(books.in_flight) > 1
        or guard.has_wishes
        or guard.chooses_decodes
        or guard.hears_of_steps
        or (books.has_precedences and (books.stopped_at is not None or books.num_waiting))
        or (books.has_news and guard.hears_of_arrivals)
        or len(books.running) > scheduler.max_num_batched_tokens
        # Pages that come back in the course of it would have to be counted step by step.
        or memory.pool.num_fenced
        or memory.copies
    ):
        return None
    sequences = books.running
    if books.has_precedences:
        sequences = sorted(sequences, key=by_precedence)
    flying = books.in_flight.get(books.launched, ())
    if flying and (
        [entry[0] for entry in flying] != sequences
        or any(slot != s.slot or item.count != 1 for s, slot, _, item in flying)
    ):
        return None
    num_flying = len(books.in_flight)
    if any(_may_stop(sequence, num_flying) for sequence in sequences):
        return None
    head = None
    if (
        books.num_waiting
        and len(sequences) < scheduler.max_num_batched_tokens
        and len(sequences) < books.max_num_seqs
    ):
        head = head_of_queue(books, scheduler.reserve)
        if head is None:
            return None
    return DecodePass(scheduler, list(sequences), num_flying, head)


def _may_stop(sequence: SequenceState, num_flying: int) -> bool:
    """Whether a sequence that runs may do something else next than go on by a token."""
    return (
        sequence.first_token_seconds is None
        or sequence.pending != num_flying
        or sequence.lease.computed != sequence.num_known + num_flying - 1
        or sequence.paused
        or sequence.guided
        or bool(sequence.unborn)
        or sequence.lease.shares_partial_page
    )


class _Change(msgspec.Struct, order=True, gc=False):
    """Of one lease in one step: it gets a page, or pages of it are published."""

    step: int
    """In the pass, from 1."""
    place: int
    """Of the sequence in the batch."""
    publishes: bool


class DecodePass:
    """Some steps in a row, not yet taken. It is worth nothing once the scheduler has changed."""

    def __init__(
        self,
        scheduler: Scheduler,
        sequences: list[SequenceState],
        num_flying: int,
        head: QueueHead | None,
    ) -> None:
        self.scheduler = scheduler
        self.sequences: list[SequenceState] = sequences
        """In the order of each step's items."""
        self.num_flying = num_flying
        self._head = head
        """Who could start if there were pages; None where nobody could."""
        self.first_step: int = scheduler.books.launched + 1
        """Number of the first step that it launches."""
        self._computed = [sequence.lease.computed for sequence in sequences]

    @property
    def context_tokens(self) -> int:
        """That the first step attends to; each further one attends to one more of each sequence."""
        return sum(self._computed) + len(self.sequences)

    def pages_taken(self, count: int) -> list[int]:
        """How many pages each of `count` steps takes."""
        size = self.scheduler.memory.page_size
        taken = [0] * count
        for sequence, computed in zip(self.sequences, self._computed, strict=True):
            for step in range(sequence.lease.num_pages * size - computed, count, size):
                taken[step] += 1
        return taken

    def num_before_next_start(self, pages_taken: Sequence[int]) -> int:
        """How many steps, of as many as each takes such pages, come before one in which somebody
        starts: at most these."""
        head = self._head
        return len(pages_taken) if head is None else head.num_steps_without(pages_taken)

    def take(
        self, count: int, token_ids: Sequence[int], seconds: Sequence[float], now_seconds: float
    ) -> StepPlan | None:
        """Launch `count` steps and finish as many, the last of them now; what is in flight then.

        Each finished step gives each sequence its id of `token_ids`, which ends none of them.
        `seconds` are those of the finished steps. There must be as many pages as the steps take, or
        as many that can be evicted.
        """
        scheduler, books, memory = self.scheduler, self.scheduler.books, self.scheduler.memory
        scheduler.guard.begin_step()
        books.tell_arrivals()
        books.stopped_at = None if self._head is None else self._head.sequence
        changes = self._changes(count)
        for sequence, token_id in zip(self.sequences, token_ids, strict=True):
            sequence.extend(token_id, count)
            sequence.last_token_seconds = now_seconds
        before = self.first_step - 1
        taken = self.pages_taken(count)
        for change in changes:
            if taken[change.step - 1]:
                # As when a step is planned, for all that it takes at once.
                memory.make_free(taken[change.step - 1], before + change.step)
                taken[change.step - 1] = 0
            sequence = self.sequences[change.place]
            lease, step = sequence.lease, before + change.step
            computed = self._computed[change.place] + change.step
            if change.publishes:
                memory.advance(lease, computed - lease.computed, step)
                # As many as are known when that step is planned.
                known = sequence.num_known - count + change.step - 1
                memory.publish(lease, sequence.ids(0, known))
            else:
                memory.advance(lease, computed - 1 - lease.computed, step)
                if not memory.reserve(lease, 1, step):
                    raise InvariantError(f"no page is left for {sequence} in step {step}")
        last = before + count
        for sequence, computed in zip(self.sequences, self._computed, strict=True):
            lease = sequence.lease
            memory.advance(lease, computed + count - lease.computed, last)
            pages = pages_for(sequence.num_known - 1, memory.page_size)
            sequence.proven_pages = lease.page_ids[:pages]
        num_tokens = count * len(self.sequences)
        books.counters.tokens_processed += num_tokens
        books.counters.tokens_generated += num_tokens
        books.pass_steps(count)
        self._remember(count, seconds)
        return self._in_flight(last)

    def _changes(self, count: int) -> list[_Change]:
        """In the order in which planning makes them."""
        memory = self.scheduler.memory
        size = memory.page_size
        changes: list[_Change] = []
        for place, sequence in enumerate(self.sequences):
            lease = sequence.lease
            first = lease.num_pages * size - lease.computed + 1
            changes += [_Change(step, place, False) for step in range(first, count + 1, size)]
            if memory.tree is None:
                continue
            # Published is what is full of tokens both known and computed.
            reach = min(lease.computed, sequence.num_known - 1)
            first = max(1, (lease.published + 1) * size - reach)
            changes += [_Change(step, place, True) for step in range(first, count + 1, size)]
        changes.sort()
        return changes

    def _remember(self, count: int, seconds: Sequence[float]) -> None:
        """The steps that are finished, of which the first may have been in flight before."""
        num_sequences = len(self.sequences)
        first = self.first_step - self.num_flying
        context = self.context_tokens - self.num_flying * num_sequences
        kept = range(max(0, count - NUM_KEPT), count)
        self.scheduler.times.took_several(
            count,
            [
                StepSummary(first + i, 0, num_sequences, context + i * num_sequences, seconds[i])
                for i in kept
            ],
        )

    def _in_flight(self, last: int) -> StepPlan | None:
        if not self.num_flying:
            return None
        books = self.scheduler.books
        entries = [
            (
                sequence,
                sequence.slot,
                sequence.lease,
                WorkItem(
                    sequence_id=sequence.sequence_id,
                    slot=sequence.slot,
                    start=sequence.lease.computed - 1,
                    count=1,
                    token_ids=(PENDING_TOKEN,),
                    page_ids=sequence.lease.page_ids,
                    rows=sequence.decode_rows,
                ),
            )
            for sequence in self.sequences
        ]
        books.in_flight = {last: entries}
        return StepPlan(step=last, items=tuple([entry[3] for entry in entries]))
