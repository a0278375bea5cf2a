"""Counts all gaps between the tokens of each completion, and stores none twice.

The completions in a step get their tokens at its end, so that those which were in the step before
too share one gap. Stored are that gap and how many had it: two numbers a step, and two for each
completion that is being made.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aioserve.simulation.spread import Spread, weighted_spread

__all__ = ["TokenGaps"]


class TokenGaps:
    """Gaps of one run. Several steps with the same completions may be added at once or one by
    one."""

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("q")
        """Number of times that each of `_seconds` was a gap."""
        self._last: dict[int, float] = {}
        """Time of the last token of each completion that isn't in `_since`."""
        self._longest: dict[int, float] = {}
        """Longest gap of each completion; of those in `_since`, until they joined it."""
        self._since: dict[int, int] = {}
        """Completions of the last step, with the number of the first gap that each has shared."""
        self._together: Sequence[int] = ()
        """Completions of the last step, in the order in which they were added."""
        self._end = 0.0
        """End of the last step."""
        self._num_shared = 0
        """Number of gaps that all but the new ones of a step shared."""
        self._peaks: list[tuple[int, float]] = []
        """Number and length of each of them that no later one has reached."""

    def add(self, sequence_ids: Sequence[int], ends: Sequence[float]) -> None:
        """Add one token for each of these at each of these times, which go up and follow those
        added before."""
        if not sequence_ids or not ends:
            return
        if sequence_ids != self._together:
            self._change(list(sequence_ids), ends[0])
            ends = ends[1:]
        if ends:
            gaps = [end - before for before, end in pairwise((self._end, *ends))]
            self._seconds.extend(gaps)
            self._counts.extend([len(self._together)] * len(gaps))
            self._share(max(gaps))
            self._end = ends[-1]

    def ended(self, sequence_id: int) -> float | None:
        """Return the longest gap of a completion that gets no more tokens; None with fewer than
        two."""
        if sequence_id in self._since:
            self._part(sequence_id)
            self._together = ()
        self._last.pop(sequence_id, None)
        return self._longest.pop(sequence_id, None)

    def spread(self) -> Spread | None:
        """Spread of all gaps of all completions."""
        return weighted_spread(*self.counted())

    def counted(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Every gap of all completions in seconds, in no order, and how often each was one."""
        return np.array(self._seconds, np.float64), np.array(self._counts, np.int64)

    def _change(self, sequence_ids: list[int], end: float) -> None:
        """Let these come together, of which some may have had tokens before."""
        since, last = self._since, self._last
        for sequence_id in since.keys() - set(sequence_ids):
            self._part(sequence_id)
        before = Counter([self._end if one in since else last.get(one) for one in sequence_ids])
        for came, count in before.items():
            if came is not None:
                self._count(end - came, count)
        if since:
            self._share(end - self._end)
        for sequence_id in sequence_ids:
            if sequence_id not in since:
                since[sequence_id] = self._num_shared
                came = last.pop(sequence_id, end)
                if came < end:
                    longest = self._longest.get(sequence_id, 0.0)
                    self._longest[sequence_id] = max(longest, end - came)
        self._together, self._end = sequence_ids, end

    def _part(self, sequence_id: int) -> None:
        """Write down for a completion of the last step the gaps that it shared with others."""
        since = self._since.pop(sequence_id)
        self._last[sequence_id] = self._end
        if since < self._num_shared:
            _, shared = self._peaks[bisect_left(self._peaks, (since, 0.0))]
            self._longest[sequence_id] = max(self._longest.get(sequence_id, 0.0), shared)

    def _share(self, seconds: float) -> None:
        peaks = self._peaks
        while peaks and peaks[-1][1] <= seconds:
            peaks.pop()
        peaks.append((self._num_shared, seconds))
        self._num_shared += 1

    def _count(self, seconds: float, count: int) -> None:
        self._seconds.append(seconds)
        self._counts.append(count)
