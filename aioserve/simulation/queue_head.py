"""Steps for which the head of the queue finds too few pages, while running requests get a token
each.

This is for first come, first served. If the policy decides which request starts, it has to be
asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from aioserve.paging.pages import pages_for_each
from aioserve.scheduling.reserve import OutputReserve
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.state import SchedulerState

__all__ = ["QueueHead", "head_of_queue"]

STEPS_AT_ONCE = 64


def head_of_queue(state: SchedulerState) -> QueueHead | None:
    """Return the head of the queue if only pages may keep it from starting, and the policy isn't
    asked.

    The caller checks that fewer sequences run than may. None of the running ones may have pending
    samples.
    """
    policy_calls, memory = state.policy_calls, state.memory
    head = state.waiting[0]
    if (
        policy_calls.chooses_who_starts
        or policy_calls.reserves
        or state.has_precedences
        or head.is_held
        or head.pending_samples
        or head.num_cacheable is not None
        # Pages in another tier would be copied back, into pages that must be found for it.
        or memory.copies_evicted
    ):
        return None
    needed = memory.claims.pages_needed(head.lease, head.known_ids)
    size, pages = memory.page_size, needed.page_ids.tolist()
    near = [s for s in state.running if s.lease.published <= len(pages)]
    if any(_may_write_for(head, pages, sequence, size) for sequence in near):
        return None
    return QueueHead(head, memory.num_available - needed.total, state.running, state.reserve)


def _may_write_for(
    head: SequenceState, found: Sequence[int], sequence: SequenceState, page_size: int
) -> bool:
    """True if the next page that a running sequence publishes may be one that the head could use.

    That page would be after the pages `found`. The sequence must have published at most
    `len(found)` pages.
    """
    lease, published = sequence.lease, sequence.lease.published
    if lease.namespace != head.lease.namespace:
        return False
    if published and lease.page_ids.item(published - 1) != found[published - 1]:
        return False
    end = (published + 1) * page_size
    return end < head.num_known and sequence.begins_like(head, min(end, sequence.num_known))


class QueueHead:
    """Head of the queue with the running requests. Invalid once the scheduler has changed."""

    def __init__(
        self,
        sequence: SequenceState,
        num_pages: int,
        running: Sequence[SequenceState],
        reserve: OutputReserve,
    ) -> None:
        self.sequence = sequence
        self._num_pages = num_pages
        """Pages that would be left if it started now; below 0 if there aren't enough."""
        self._reserve = reserve
        self._running = running

    def num_steps_without(self, pages_taken: Sequence[int]) -> int:
        """Return the number of steps after which it can't start, given the pages that each step
        takes.

        Evictions for these pages make no difference. A page that the head would have found is one
        less to evict for it, and one more to acquire.
        """
        ahead = self._reserve.pages_ahead(self.sequence)
        left = [self._num_pages - pages for pages in accumulate(pages_taken)]
        if max(left, default=0) < ahead:
            return len(left)
        known = np.array([s.num_known + s.pending for s in self._running], np.int64)
        longest = np.array([s.max_length for s in self._running], np.int64)
        for first in range(0, len(left), STEPS_AT_ONCE):
            some = left[first : first + STEPS_AT_ONCE]
            steps = np.arange(first + 1, first + 1 + len(some))[:, None]
            reserved = _pages_ahead(self._reserve, known + steps, longest).sum(axis=1)
            fits = np.array(some) >= ahead + reserved
            if fits.any():
                return first + int(fits.argmax())
        return len(left)


def _pages_ahead(
    reserve: OutputReserve, known: npt.NDArray[np.int64], longest: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return pages as `reserve.pages_ahead` does, for sequences without pending samples or shared
    partial pages.

    `known` are their known tokens, pending ones included; `longest` the most that they may have.
    """
    ahead = np.minimum(known + reserve.horizon_tokens, longest)
    size = reserve.page_size
    return pages_for_each(ahead, size) - pages_for_each(known, size)
