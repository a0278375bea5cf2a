"""Queue of waiting requests in order of arrival, and the views of them that a policy sees.

Thousands may wait, and a step starts a few of them. What a step looks at is kept for the next one,
so a request that only goes on waiting costs nothing.
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
"""Most ended requests that are taken out one by one. More leave in one pass."""

_by_arrival = attrgetter("sequence_id")


class WaitingQueue:
    """Sequences whose phase is `WAITING`. The phase of an ended one changes before `end` is
    called."""

    def __init__(self) -> None:
        self._sequences: list[SequenceState] = []
        self._views: list[RequestView] = []
        """View of each sequence, in the same order."""
        self._ended: list[SequenceState] = []
        """Ended sequences still in the queue. They are all taken out when it is next read, since
        thousands may leave between two steps."""
        self._may_be_held: set[SequenceState] = set()
        """Superset of the waiting sequences that are held now."""
        self._shown: tuple[RequestView, ...] | None = None
        """Views of all, until the queue changes."""

    def __len__(self) -> int:
        return len(self._sequences) - len(self._ended)

    @property
    def sequences(self) -> list[SequenceState]:
        """All waiting sequences. Read-only."""
        if self._ended:
            self._take_out_ended()
        return self._sequences

    def in_turn(self, without: Container[SequenceState] = ()) -> Iterator[SequenceState]:
        """Yield the sequences that can go on, except `without`. The caller may start each before
        taking the next one."""
        sequences, place = self.sequences, 0
        while place < len(sequences):
            sequence = sequences[place]
            if not sequence.is_held and sequence not in without:
                yield sequence
            if place < len(sequences) and sequences[place] is sequence:
                place += 1

    def views(self, without: Iterable[SequenceState] = ()) -> tuple[RequestView, ...]:
        """Views of the sequences that can go on, except `without`."""
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
        """Take out a sequence that starts."""
        self._shown = None
        place = place_of(self._sequences, sequence)
        del self._sequences[place], self._views[place]
        self._may_be_held.discard(sequence)

    def end(self, sequence: SequenceState) -> None:
        self._shown = None
        self._ended.append(sequence)

    def hold(self, sequence: SequenceState) -> None:
        """Note that a sequence is paused."""
        self._may_be_held.add(sequence)

    def become(self, sequences: Iterable[SequenceState]) -> None:
        """Replace the queue with `sequences`, in order of arrival."""
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
    """Index of a sequence in a queue in order of arrival."""
    place = bisect_left(queue, sequence.sequence_id, key=_by_arrival)
    if place == len(queue) or queue[place] is not sequence:
        raise InvariantError(f"{sequence} is not in its queue")
    return place
