"""Room in the step that is being planned: everything that limits it is checked here.

    tokens   of the step's budget and its shares, and tokens of prompts that it may score
    slots    one per sequence, and one for each sample that will fork off it
    pages    free or evictable, less those reserved for the output of running sequences
    pins     give way to running sequences, and to the next one when nothing runs

The planner, the choice of victims, and the reserves shown in views ask here. The pages that a
request needs to start come from `Claims.pages_needed`, as they do for views and for the simulator's
fast-forward. A new constraint, for example slots of adapters, adds one term to `claim` and to
`RoomWithout.suffices`. This module knows only one thing of policies: what they want to keep free.
"""

from __future__ import annotations

import numpy as np

from aioserve.kv.claims import Claim
from aioserve.kv.memory import KVMemory
from aioserve.paging.pages import capacity_tokens
from aioserve.scheduling.policy import StepBudget
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.state import SchedulerState
from aioserve.scheduling.token_budget import TokenBudget

__all__ = ["Room", "RoomWithout", "slots_of"]


def slots_of(sequence: SequenceState) -> int:
    """Slots that a sequence takes when it starts."""
    return 1 + len(sequence.pending_samples)


def _fits(pages_left: int, pages_to_leave: int, *, alone: bool) -> bool:
    """Return True if a sequence may start that leaves `pages_left` pages. One that runs alone may
    take all of them."""
    return pages_left >= 0 and (alone or pages_to_leave <= pages_left)


class Room:
    """Room left in one step. `budget` and `scored_tokens` shrink as the step is built."""

    def __init__(self, state: SchedulerState, step: int, budget: StepBudget | None = None) -> None:
        self._state = state
        self._memory: KVMemory = state.memory
        self._step = step
        self.budget: TokenBudget = TokenBudget(state, budget)
        """Tokens left in the step, and who may have them."""
        self.scored_tokens: int = state.max_scored_tokens
        self._reserved: int | None = None

    # -- tokens

    def tokens_from(self, sequence: SequenceState, start: int) -> int:
        """Tokens of a sequence from position `start` on that the step may still compute."""
        reach = sequence.num_known + sequence.pending
        if sequence.num_cacheable is not None:
            # Scoring the token at `score_at` takes the logits of the one before. Earlier tokens
            # cost no score, and neither does the last one of the prompt.
            last = sequence.score_at + self.scored_tokens
            reach = reach if last >= sequence.prompt_tokens else min(reach, last - 1)
        return max(0, min(reach - start, self.budget.left_for(sequence)))

    # -- slots

    @property
    def num_slots_free(self) -> int:
        """Number of sequences that may start now. Pending samples of running sequences have their
        slots already."""
        state = self._state
        return min(state.max_num_seqs - state.slots.num_taken, state.slots.num_free)

    # -- pages of sequences that run

    def make_free(self, num_pages: int) -> bool:
        """Evict cached pages, then end pins, until `num_pages` pages are free. Return False if
        fewer are."""
        memory = self._memory
        memory.make_free(num_pages, self._step)
        if num_pages > memory.pool.num_free:
            self._state.pins.make_room(num_pages)
            memory.make_free(num_pages, self._step)
        return num_pages <= memory.pool.num_free

    def pages_short(self, growing: list[SequenceState]) -> int:
        """Pages that one more token for each of `growing` needs beyond the available ones. Free,
        evictable and fenced pages are available, and those of sequences at their end."""
        memory = self._memory
        ending = [s for s in self._state.running if s.exhausted]
        coming = memory.num_available + memory.pool.num_fenced
        coming += sum([memory.num_reclaimable(s.lease) for s in ending])
        return memory.num_pages_to_reserve([s.lease for s in growing]) - coming

    def tokens_with_pages(self, sequence: SequenceState, count: int) -> int:
        """Reserve pages for the next `count` tokens of a running sequence. Return how many of these
        tokens have pages.

        A prompt already has all its pages, except in groups that grow with chunks. Forced tokens of
        structured output may lack some, too.
        """
        memory, lease = self._memory, sequence.lease
        if count and memory.grows_with_chunks:
            return memory.reserve_some(lease, count, self._step)
        if not count or not sequence.constrained or memory.reserve(lease, count, self._step):
            return count
        if memory.short_of_pages([lease]):
            return 0
        return min(count, capacity_tokens(lease.num_pages, memory.page_size) - lease.entries)

    def verified_with_pages(self, sequence: SequenceState, count: int) -> int:
        """Reserve pages for `count` tokens to verify after the next token, which has its page.
        Return how many of them have pages.

        Cached pages are evicted for them, since the sequence needs the pages for its next tokens
        anyway. No sequence is preempted for them.
        """
        memory, lease = self._memory, sequence.lease
        left = sequence.max_length - sequence.num_known - sequence.pending - 1
        count = min(count, left)
        if count <= 0:
            return 0
        there_are = memory.num_pages_to_reserve([lease], 1 + count) <= memory.num_available
        if there_are and memory.reserve(lease, 1 + count, self._step):
            return count
        return capacity_tokens(lease.covered, memory.page_size) - lease.entries - 1

    # -- pages of a sequence that waits

    def pages_to_leave(self, sequence: SequenceState, kept: int | None) -> int:
        """Pages that must be left when a sequence starts: `kept` if the policy gave a number, else
        the reserve."""
        if kept is not None:
            return kept
        if self._reserved is None:
            self._reserved = self._state.pages_reserved()
        return self._state.reserve.pages_ahead(sequence) + self._reserved

    def claim(self, sequence: SequenceState, pages_to_leave: int) -> Claim | None:
        """Lock the cached pages of a waiting sequence. Return None if the other pages that it needs
        don't fit."""
        memory, lease = self._memory, sequence.lease
        limit = sequence.num_cacheable
        alone = not self._state.running and not memory.pool.num_fenced
        claim = memory.claims.claim(lease, sequence.known_ids, limit)
        if not _fits(self._left(claim, alone=alone), pages_to_leave, alone=alone):
            claim = memory.claims.without_tail(lease, sequence.num_known, claim, limit)
        if _fits(self._left(claim, alone=alone), pages_to_leave, alone=alone):
            return claim
        memory.claims.drop(claim)
        return None

    def _left(self, claim: Claim, *, alone: bool) -> int:
        needed = claim.num_first_pages if alone else claim.num_new_pages
        return self._memory.num_available - needed

    def started(self, sequence: SequenceState) -> None:
        """Count the output of a sequence that is about to run in the reserve."""
        if self._reserved is None:
            self._reserved = self._state.pages_reserved()
        self._reserved += self._state.reserve.pages_ahead(sequence)


class RoomWithout:
    """Slots and pages available to a waiting sequence once the steps in flight are done. Supposes
    that no other sequence starts, and that those told to `leave` have left.

    A page that two sequences share comes back when both have left, so the sequences that name each
    page are counted. A page that no sequence names is free, fenced or evictable.
    """

    def __init__(self, state: SchedulerState, sequence: SequenceState) -> None:
        memory, reserve = state.memory, state.reserve
        limit = sequence.num_cacheable
        needed = memory.claims.pages_needed(sequence.lease, sequence.known_ids, limit)
        self._needed = needed
        self._reserve = reserve
        self._names = np.zeros(memory.pool.num_pages, np.int32)
        self._names[needed.page_ids] += 1
        self._slots = state.max_num_seqs - slots_of(sequence)
        self._pages_ahead = reserve.pages_ahead(sequence)
        self._others = 0
        self._kept: int | None = None
        for other in state.running:
            if not other.exhausted:
                self.stay(other)

    def keep(self, num_pages: int | None) -> None:
        """Leave `num_pages` pages for output. None: leave what the reserve says."""
        self._kept = num_pages

    @property
    def _pages_to_leave(self) -> int:
        return self._pages_ahead if self._kept is None else self._kept

    @property
    def num_pages_wanted(self) -> int:
        """Pages that must be free or evictable now for the sequence to start."""
        return self._needed.total + self._pages_to_leave

    def stay(self, other: SequenceState) -> None:
        self._count(other, 1)

    def leave(self, other: SequenceState) -> None:
        self._count(other, -1)

    def _count(self, other: SequenceState, sign: int) -> None:
        self._others += sign
        for table in other.lease.tables:
            self._names[table.held] += sign
        self._slots -= sign * slots_of(other)
        if not other.paused:
            self._pages_ahead += sign * self._reserve.pages_ahead(other)

    @property
    def suffices(self) -> bool:
        """True if the sequence could start."""
        alone = not self._others
        left = len(self._names) - int(np.count_nonzero(self._names))
        left -= self._needed.num_first if alone else self._needed.num_new
        return self._slots >= 0 and _fits(left, self._pages_to_leave, alone=alone)
