"""Tells for how many steps the head of the queue finds no pages, while running requests go on token
by token and first come, first served decides.

Where the policy is asked which request starts, only asking it tells.
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
    """Head of the queue, if the policy isn't asked which request starts, and pages are all that it
    may lack: fewer run than may, and none of them has pending samples."""
    policy_calls, memory = state.policy_calls, state.memory
    head = state.waiting[0]
    if (
        policy_calls.chooses_who_starts
        or policy_calls.reserves
        or state.has_precedences
        or head.is_held
        or head.pending_samples
        or head.num_cacheable is not None
        # What is in another tier would be copied back, into pages to be found for it.
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
    """Whether the next page that a running sequence publishes may be one that the head of the queue
    finds then behind the pages `found`: at most so many are published of it."""
    lease, published = sequence.lease, sequence.lease.published
    if lease.namespace != head.lease.namespace:
        return False
    if published and lease.page_ids.item(published - 1) != found[published - 1]:
        return False
    end = (published + 1) * page_size
    return end < head.num_known and sequence.begins_like(head, min(end, sequence.num_known))


class QueueHead:
    """Head of the queue as it is now, with the running requests. Invalid once the scheduler has
    changed."""

    def __init__(
        self,
        sequence: SequenceState,
        num_pages: int,
        running: Sequence[SequenceState],
        reserve: OutputReserve,
    ) -> None:
        self.sequence = sequence
        self._num_pages = num_pages
        """Pages that would be left if it had started now; below 0 if there aren't enough."""
        self._reserve = reserve
        self._running = running

    def num_steps_without(self, pages_taken: Sequence[int]) -> int:
        """Number of steps, each of which takes such pages for running requests, after which it
        can't start. What is evicted for these makes no difference: a page that the head would have
        found is one less to evict for it, and one more to acquire."""
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
    """Pages as `reserve.pages_ahead` has them for sequences without pending samples that share no
    page in part, by the tokens that they know, pending ones included, and may have."""
    ahead = np.minimum(known + reserve.horizon_tokens, longest)
    size = reserve.page_size
    return pages_for_each(ahead, size) - pages_for_each(known, size)
