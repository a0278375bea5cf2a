"""Who gives way: running sequences that are preempted so that a waiting one can start.

A policy gives each request a precedence, once. Of two sequences only the one of the greater may
displace the other, so those of equal precedence never take turns. That every run ends rests on
this: precedence and age put all sequences in one order that never changes, and nobody is preempted
for one behind it, be that one waiting or in need of a page. Of those that run again and again the
first in this order is preempted by nobody, so it gets to its end; then the next one is first.

Nobody is preempted in vain: all who give way do so together, where that is enough, and none of them
is spared whom the others do not make up for. And nobody displaces without end: while it waits, a
sequence displaces no more others than can run at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from aioserve.scheduling.books import Books
from aioserve.scheduling.reserve import OutputReserve
from aioserve.scheduling.sequence import SequenceState
from aioserve.scheduling.view import SchedulerView

__all__ = ["by_precedence", "lowest_precedence", "who_gives_way"]


def by_precedence(sequence: SequenceState) -> tuple[int, int]:
    """Sorts sequences: nobody is preempted for one behind it, unless its reader is behind."""
    return -sequence.precedence, sequence.sequence_id


def lowest_precedence(books: Books) -> float:
    """Of those that run: one that waits with a greater may displace somebody."""
    if not books.has_precedences:  # all are equal
        return math.inf
    return min([s.precedence for s in books.running], default=math.inf)


def who_gives_way(
    books: Books, sequence: SequenceState, reserve: OutputReserve, view: SchedulerView
) -> Sequence[SequenceState]:
    """Running sequences, in the policy's order, without which a waiting one has its seats and its
    pages, now or after the steps in flight. Nobody, if it has them anyway or not even so."""
    candidates = _candidates(books, sequence)
    if not candidates:
        return ()
    room = _Room(books, sequence, reserve)
    if books.guard.reserves:
        room.keep(books.guard.reserve(sequence.view, books.memory.pool.num_pages, view))
    books.pins.make_room(room.num_pages_needed + room.num_pages_found)
    if room.suffices:
        return ()
    named = books.guard.displaces(sequence.view, [s.view for s in candidates], view)
    leaving: list[SequenceState] = []
    for chosen in map(books.sequence_of, named):
        leaving.append(chosen)
        room.leave(chosen)
        if room.suffices:
            break
    else:
        return ()
    for spared in reversed(leaving[:-1]):
        room.stay(spared)
        if room.suffices:
            leaving.remove(spared)
        else:
            room.leave(spared)
    within = len(leaving) <= books.max_num_seqs - sequence.num_displaced
    return leaving if within else ()


def _candidates(books: Books, sequence: SequenceState) -> list[SequenceState]:
    lower = [s for s in books.running if s.precedence < sequence.precedence]
    return [s for s in lower if not s.exhausted]  # the others end by themselves


class _Room:
    """Seats and pages that there will be when the steps in flight are done, if nobody else comes
    and those who are told to leave do.

    A page is counted by who names it, since one that two share comes back when both have left. What
    nobody names is free, fenced or can be evicted.
    """

    def __init__(self, books: Books, sequence: SequenceState, reserve: OutputReserve) -> None:
        memory = books.memory
        available = memory.num_available
        claim = memory.claim(sequence.lease, sequence.known_ids, sequence.num_cacheable)
        self.num_pages_found: int = available - memory.num_available
        """In the cache, which nobody else uses: no room for its new ones."""
        memory.drop(claim)
        self._reserve = reserve
        self._num_new_pages = claim.num_new_pages
        self._names = np.zeros(memory.pool.num_pages, np.int32)
        self._names[claim.match.page_ids] += 1
        self._seats = books.max_num_seqs - _seats_of(sequence)
        self._pages_ahead = reserve.pages_ahead(sequence)
        self._others = 0
        self._kept: int | None = None
        for other in books.running:
            if not other.exhausted:
                self.stay(other)

    def keep(self, num_pages: int | None) -> None:
        """Pages to leave for answers, in place of the reserve's, unless None."""
        self._kept = num_pages

    @property
    def num_pages_needed(self) -> int:
        return self._num_new_pages + (self._pages_ahead if self._kept is None else self._kept)

    def stay(self, other: SequenceState) -> None:
        self._count(other, 1)

    def leave(self, other: SequenceState) -> None:
        self._count(other, -1)

    def _count(self, other: SequenceState, sign: int) -> None:
        self._others += sign
        self._names[other.lease.page_ids] += sign
        self._seats -= sign * _seats_of(other)
        if not other.paused:
            self._pages_ahead += sign * self._reserve.pages_ahead(other)

    @property
    def suffices(self) -> bool:
        """One that is alone may have all pages, as when it is admitted."""
        left = len(self._names) - int(np.count_nonzero(self._names))
        needed = self.num_pages_needed if self._others else self._num_new_pages
        return self._seats >= 0 and left >= needed


def _seats_of(sequence: SequenceState) -> int:
    return 1 + len(sequence.unborn)
