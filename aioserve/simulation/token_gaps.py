"""The gaps between the tokens of each answer: all of them counted, and none kept twice.

The answers in a step get their tokens at its end, so that those which were in the step before too
share one gap. What is kept is that gap and how many had it: two numbers a step, and two for each
answer that is being made.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aioserve.simulation.spread import Spread, weighted_spread

__all__ = ["TokenGaps"]


class TokenGaps:
    """Of one run. Several steps with the same answers may be told at once or one by one."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("q")
        """How often each of `_seconds` was a gap."""
        self._last: dict[int, float] = {}
        """When the last token of each answer came; of those in `_together`, at the least."""
        self._longest: dict[int, float] = {}
        self._together: list[int] = []
        """The answers of the last step."""
        self._end = 0.0
        """Of the last step."""
        self._longest_together = 0.0
        """Gap since the answers in `_together` have been so."""

    def add(self, sequence_ids: Sequence[int], ends: Sequence[float]) -> None:
        """Each of these got one token at each of these times, which go up and follow those told
        before."""
        if not sequence_ids or not ends:
            return
        if sequence_ids != self._together:
            self._begin(list(sequence_ids), ends[0])
            ends = ends[1:]
        if len(ends) == 1:
            self._count(ends[0] - self._end, len(self._together))
            self._longest_together = max(self._longest_together, ends[0] - self._end)
        elif ends:
            gaps = np.diff(np.array([self._end, *ends], np.float64))
            self._seconds.frombytes(gaps.tobytes())
            self._counts.extend([len(self._together)] * len(gaps))
            self._longest_together = max(self._longest_together, float(gaps.max()))
        if ends:
            self._end = ends[-1]

    def ended(self, sequence_id: int) -> float | None:
        """The longest gap of an answer that gets no more tokens; None with fewer than two."""
        self._part()
        self._last.pop(sequence_id, None)
        return self._longest.pop(sequence_id, None)

    def spread(self) -> Spread | None:
        """Over all gaps of all answers."""
        return weighted_spread(*self.counted())

    def counted(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Every gap of all answers in seconds, in no order, and how often each was one."""
        return np.array(self._seconds, np.float64), np.array(self._counts, np.int64)

    def _begin(self, sequence_ids: list[int], end: float) -> None:
        """These come together, and some of them may have had tokens before."""
        self._part()
        last, longest = self._last, self._longest
        before = Counter[float]()
        for sequence_id in sequence_ids:
            came = last.get(sequence_id)
            if came is not None:
                before[came] += 1
                longest[sequence_id] = max(longest.get(sequence_id, 0.0), end - came)
        for came, count in before.items():
            self._count(end - came, count)
        self._together, self._end = sequence_ids, end

    def _part(self) -> None:
        """Write down for each what they had together."""
        for sequence_id in self._together:
            self._last[sequence_id] = self._end
        if self._longest_together:
            for sequence_id in self._together:
                longest = self._longest.get(sequence_id, 0.0)
                self._longest[sequence_id] = max(longest, self._longest_together)
        self._together, self._longest_together = [], 0.0

    def _count(self, seconds: float, count: int) -> None:
        self._seconds.append(seconds)
        self._counts.append(count)
