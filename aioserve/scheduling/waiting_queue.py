"""The queue of waiting requests, in order of arrival, and what a policy sees of them.

Thousands may wait of which a step starts a few, so what a step looks at is kept from one to the
next: a request that only goes on waiting costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator
from itertools import compress
from operator import attrgetter

from aioserve.errors import InvariantError
from aioserve.scheduling.sequence import Phase, SequenceState
from aioserve.scheduling.view import RequestView

__all__ = ["WaitingQueue", "place_of"]

MOST_ONE_BY_ONE = 32
"""Most requests that are taken out one by one when they have ended; more leave in one pass."""

_by_arrival = attrgetter("sequence_id")


class WaitingQueue:
    """Sequences whose phase is `WAITING`; that of one that ends changes before it is told here."""

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []
        self._views: list[RequestView] = []
        """A view of each of these."""
        self._ended: list[SequenceState] = []
        """Still in the queue: they are taken out when it is looked at, all at once, since thousands
        may leave between two steps."""
        self._may_be_held: set[SequenceState] = set()
        """All that wait and are held now are among these."""
        self._shown: tuple[RequestView, ...] | None = None
        """Views of all, unless the queue has changed since."""

    def __len__(self) -> int:
        return len(self._sequences) - len(self._ended)

    @property
    def sequences(self) -> list[SequenceState]:
        """All, to be read only."""
        if self._ended:
            self._take_out_ended()
        return self._sequences

    def in_turn(self, without: Container[SequenceState] = ()) -> Iterator[SequenceState]:
        """All that can go on, but for some. Each may start before the next one is looked at."""
        sequences, place = self.sequences, 0
        while place < len(sequences):
            sequence = sequences[place]
            if not sequence.is_held and sequence not in without:
                yield sequence
            if place < len(sequences) and sequences[place] is sequence:
                place += 1

    def views(self, without: Iterable[SequenceState] = ()) -> tuple[RequestView, ...]:
        """Views of all that can go on, but for some."""
        sequences = self.sequences
        out = {s for s in self._may_be_held if s.is_held}.union(without)
        if out:
            return tuple(compress(self._views, [s not in out for s in sequences]))
        if self._shown is None:
            self._shown = tuple(self._views)
        return self._shown

    # -- those who come and go

    def add(self, sequence: SequenceState) -> None:
        self._shown = None
        if sequence.paused or sequence.constrained:
            self._may_be_held.add(sequence)
        place = bisect_left(self._sequences, sequence.sequence_id, key=_by_arrival)
        self._sequences.insert(place, sequence)
        self._views.insert(place, sequence.view)

    def remove(self, sequence: SequenceState) -> None:
        """It starts."""
        self._shown = None
        place = place_of(self._sequences, sequence)
        del self._sequences[place], self._views[place]
        self._may_be_held.discard(sequence)

    def end(self, sequence: SequenceState) -> None:
        self._shown = None
        self._ended.append(sequence)

    def hold(self, sequence: SequenceState) -> None:
        """It is paused."""
        self._may_be_held.add(sequence)

    def become(self, sequences: Iterable[SequenceState]) -> None:
        """All that wait, in order of arrival, whatever was here before."""
        self._shown, self._ended = None, []
        self._sequences = list(sequences)
        self._views = [s.view for s in self._sequences]
        self._may_be_held = {s for s in self._sequences if s.paused or s.constrained}

    def _take_out_ended(self) -> None:
        if len(self._ended) > MOST_ONE_BY_ONE:
            self.become([s for s in self._sequences if s.phase is Phase.WAITING])
            return
        while self._ended:
            self.remove(self._ended[-1])
            self._ended.pop()


def place_of(queue: list[SequenceState], sequence: SequenceState) -> int:
    """In a queue in order of arrival."""
    place = bisect_left(queue, sequence.sequence_id, key=_by_arrival)
    if place == len(queue) or queue[place] is not sequence:
        raise InvariantError(f"{sequence} is not in its queue")
    return place
