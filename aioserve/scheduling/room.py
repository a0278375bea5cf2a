"""Whether something fits in the step that is being planned: the one place that answers it.

    tokens   of the step's budget and its shares, and tokens of prompts that it may score
    slots    one per sequence, and one for each sample that is to fork off it
    pages    free or evictable, less those reserved for the output of sequences that run
    pins     give way to sequences that run, and to the next one when nothing runs

The planner, the choice of who gives way and what views say of reserves ask here. How many pages a
request needs to start, which views and the simulator's fast-forward tell of, is
`Claims.pages_needed`, as it is here. A new constraint, such as slots of adapters, is one more
term of `claim` and of `RoomWithout.suffices`. Knows nothing of
policies beyond what they want to keep free.
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
    """Whether a sequence may start that leaves so many pages; alone, it may have all of them."""
    return pages_left >= 0 and (alone or pages_to_leave <= pages_left)


class Room:
    """What is left for one step. `budget` and `scored_tokens` shrink as the step is built."""

    def __init__(self, state: SchedulerState, step: int, budget: StepBudget | None = None) -> None:
        self._state = state
        self._memory: KVMemory = state.memory
        self._step = step
        self.budget: TokenBudget = TokenBudget(state, budget)
        """Tokens that are left of the step, and who may have them."""
        self.scored_tokens: int = state.max_scored_tokens
        self._reserved: int | None = None

    # -- tokens

    def tokens_from(self, sequence: SequenceState, start: int) -> int:
        """Tokens of a sequence from position `start` on that the step may still compute."""
        reach = sequence.num_known + sequence.pending
        if sequence.num_cacheable is not None:
            # The tokens before `score_at` need no score; the last token of a prompt gives none.
            last = sequence.score_at + self.scored_tokens
            reach = reach if last >= sequence.prompt_tokens else min(reach, last - 1)
        return max(0, min(reach - start, self.budget.left_for(sequence)))

    # -- slots

    @property
    def num_slots_free(self) -> int:
        """Sequences that may start now. Pending samples of running sequences have their slots."""
        state = self._state
        return min(state.max_num_seqs - state.slots.num_taken, state.slots.num_free)

    # -- pages of sequences that run

    def make_free(self, num_pages: int) -> bool:
        """Evict, and end pins, until `num_pages` pages are free; False where fewer are."""
        memory = self._memory
        memory.make_free(num_pages, self._step)
        if num_pages > memory.pool.num_free:
            self._state.pins.make_room(num_pages)
            memory.make_free(num_pages, self._step)
        return num_pages <= memory.pool.num_free

    def pages_short(self, growing: list[SequenceState]) -> int:
        """Pages that a token more of each of `growing` needs beyond those that are free, evictable,
        or on their way back: of steps in flight, and of sequences at their end."""
        memory = self._memory
        ending = [s for s in self._state.running if s.exhausted]
        coming = memory.num_available + memory.pool.num_fenced
        coming += sum([memory.num_reclaimable(s.lease) for s in ending])
        return memory.num_pages_to_reserve([s.lease for s in growing]) - coming

    def tokens_with_pages(self, sequence: SequenceState, count: int) -> int:
        """How many of the next `count` tokens of a running sequence have pages. A prompt has all of
        its own but for groups that grow with chunks; these, and all of forced tokens of structured
        output, come here, as far as there are any."""
        memory, lease = self._memory, sequence.lease
        if count and memory.grows_with_chunks:
            return memory.reserve_some(lease, count, self._step)
        if not count or not sequence.constrained or memory.reserve(lease, count, self._step):
            return count
        if memory.short_of_pages([lease]):
            return 0
        return min(count, capacity_tokens(lease.num_pages, memory.page_size) - lease.entries)

    def verified_with_pages(self, sequence: SequenceState, count: int) -> int:
        """How many of `count` tokens to verify behind the next one of a sequence, which has its
        page, have pages. Nobody is preempted for them. Cached pages are evicted, since the pages
        stay with the sequence for its next tokens."""
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
        """Pages that must be left when a sequence starts: `kept`, where the policy says so."""
        if kept is not None:
            return kept
        if self._reserved is None:
            self._reserved = self._state.pages_reserved()
        return self._state.reserve.pages_ahead(sequence) + self._reserved

    def claim(self, sequence: SequenceState, pages_to_leave: int) -> Claim | None:
        """What is cached of a waiting sequence, locked; None where the rest doesn't fit."""
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
        """A sequence is about to run: the reserve has pages for its output, too."""
        if self._reserved is None:
            self._reserved = self._state.pages_reserved()
        self._reserved += self._state.reserve.pages_ahead(sequence)


class RoomWithout:
    """Slots and pages that there will be for a waiting sequence when the steps in flight are done,
    if no other sequence comes and those leave that are told to.

    A page is counted by the sequences that name it, since one that two share comes back when both
    have left. A page that none names is free, fenced or evictable.
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
        """Leave so many pages for output in place of the reserve's, unless None."""
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
        """Whether the sequence could start."""
        alone = not self._others
        left = len(self._names) - int(np.count_nonzero(self._names))
        left -= self._needed.num_first if alone else self._needed.num_new
        return self._slots >= 0 and _fits(left, self._pages_to_leave, alone=alone)
