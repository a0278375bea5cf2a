"""Pinned prefixes: pages that the prefix tree keeps because a policy asked for it.

A pin is a lock on a path of the tree, held by a lease without pages of its own. Pins are bounded
and never block progress. Running sequences may take the pages of the oldest pins, and so may the
next one to start when nothing runs.
"""

from __future__ import annotations

from collections.abc import Container

from aioserve.kv.lease import KVLease
from aioserve.kv.memory import KVMemory
from aioserve.paging.pages import capacity_tokens, full_pages
from aioserve.scheduling.policy_calls import PolicyCalls
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.view import Pin, SchedulerView

__all__ = ["PINNED_SHARE", "PinnedPrefixes"]

PINNED_SHARE = 0.25
"""Largest share of all pages that pins may hold together."""


class PinnedPrefixes:
    """All pins, oldest first."""

    def __init__(self, memory: KVMemory, policy_calls: PolicyCalls) -> None:
        self.memory = memory
        self.policy_calls = policy_calls
        self.max_pages: int = int(PINNED_SHARE * memory.pool.num_pages)
        self._leases: dict[Pin, KVLease] = {}
        self.num_pages: int = 0
        """Pages that are pinned. One that two pins share counts twice."""
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def leases(self) -> list[KVLease]:
        return list(self._leases.values())

    def ask_to_pin(self, sequence: SequenceState) -> None:
        """Ask the policy about an ending sequence. Its computed pages are published."""
        lease = sequence.lease
        tokens = self.policy_calls.pin(sequence.view, sequence.num_computed)
        most = self.memory.tokens_in(self.max_pages)
        pages = full_pages(min(tokens, most), self.memory.page_size)
        if not pages:
            return
        count = capacity_tokens(pages, self.memory.page_size)
        pinned = self.memory.claims.pin(lease.namespace, sequence.ids(0, count))
        if not pinned.published:
            self.memory.leave(pinned)
            return
        pages = pinned.num_locked
        while self._leases and self.num_pages + pages > self.max_pages:
            self._end_oldest()
        self._last_number += 1
        view = sequence.view
        pin = Pin(
            self._last_number,
            view.request_id,
            view.session_id,
            view.tenant,
            capacity_tokens(pinned.published, self.memory.page_size),
            pages,
        )
        self._leases[pin] = pinned
        self.num_pages += pages

    def ask_to_unpin(self, view: SchedulerView) -> None:
        for pin in self.policy_calls.unpin(tuple(self._leases), view) if self._leases else ():
            self._end(pin)

    def make_room(self, num_pages: int) -> None:
        """End the oldest pins until `num_pages` pages are free or evictable, or no pin is left."""
        while self._leases and self.memory.num_available < num_pages:
            self._end_oldest()

    def end_all(self) -> None:
        while self._leases:
            self._end_oldest()

    def end_cut(self, receipts: Container[int]) -> None:
        """End the pins whose receipts the prefix tree has cut."""
        for pin, lease in list(self._leases.items()):
            if lease.receipt in receipts:
                self._end(pin)

    def _end_oldest(self) -> None:
        self._end(next(iter(self._leases)))

    def _end(self, pin: Pin) -> None:
        self.memory.leave(self._leases.pop(pin))
        self.num_pages -= pin.pages
